"""Scoring as something to time: every score of a setup, checked on a few requests and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from kernel_bench import Setup, Task
from tolerances import assert_close

from nitro.kernels import score
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch

_RADIUS = 4
_LAG = 128


@dataclass(frozen=True)
class Inputs:
    """What scores are computed from."""

    layers: PagedLayers
    batch: RaggedBatch
    positions: torch.Tensor
    logical_lengths: torch.Tensor
    states: torch.Tensor
    layer_ids: torch.Tensor
    head_ids: torch.Tensor
    cos_sin: torch.Tensor

    def of(self, layer_indices: list[int], requests: list[int]) -> Inputs:
        """Return those of some layers and requests; the latter are of equal length."""
        batch, device = self.batch, self.batch.device
        part = RaggedBatch(
            block_tables=batch.block_tables[requests],
            lengths=batch.lengths[requests],
            keep=batch.keep[requests],
            protect=batch.protect[requests],
            offsets=torch.arange(len(requests) + 1, device=device) * batch.max_length,
            window=batch.window,
            max_length=batch.max_length,
            total=len(requests) * batch.max_length,
            dst_tables=batch.dst_tables[requests],
        )
        return Inputs(
            PagedLayers.of([self.layers.caches[layer] for layer in layer_indices]),
            part,
            self.positions[layer_indices],
            self.logical_lengths[requests],
            self.states[requests],
            self.layer_ids[layer_indices],
            self.head_ids,
            self.cos_sin,
        )


def make_inputs(setup: Setup) -> Inputs:
    shape, device = setup.shape, setup.layers.device
    frequencies = 1e6 ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angles = torch.arange(2 * shape.length, device=device)[:, None] * frequencies
    return Inputs(
        setup.layers,
        setup.batch,
        setup.positions,
        setup.batch.lengths + shape.length // 2,
        torch.tensor([score.random_state(0, request) for request in range(shape.requests)], device=device),
        torch.arange(shape.layers, device=device),
        torch.arange(shape.heads, device=device),
        # As in vLLM, of the model's own type.
        torch.cat([angles.cos(), angles.sin()], -1).to(
            torch.bfloat16 if setup.layers.dtype in FP8 else setup.layers.dtype
        ),
    )


Launch = Callable[[Inputs, torch.Tensor], torch.Tensor]
Reference = Callable[[Inputs], torch.Tensor]


@dataclass(frozen=True)
class PagedScore:
    """A score of paged caches: how to launch it, its reference, and what it reads of a slot.

    Attributes:
        rows: keys and values (each one row) that are read once.
        again: rows that are needed a second time, after a mean or spread over all slots.
        extra: bytes of a slot that are read beside them (its position).
    """

    launch: Launch
    reference: Reference
    rows: int = 0
    again: int = 0
    extra: int = 0


def _plain(name: str, rows: int, again: int = 0) -> PagedScore:
    launch, reference = getattr(score, name), getattr(score, f"{name}_ref")
    return PagedScore(
        lambda x, out: launch(x.layers, x.batch, out=out), lambda x: reference(x.layers, x.batch), rows, again
    )


PAGED: dict[str, PagedScore] = {
    "knorm": _plain("knorm", 1),
    "vnorm": _plain("vnorm", 1),
    "keydiff": _plain("keydiff", 1, 1),
    "vnorm_centred": _plain("vnorm_centred", 1, 1),
    "keydiff_unrotated": PagedScore(
        lambda x, out: score.keydiff_unrotated(x.layers, x.batch, x.cos_sin, x.positions, out=out),
        lambda x: score.keydiff_unrotated_ref(x.layers, x.batch, x.cos_sin, x.positions),
        rows=1,
        again=1,
        extra=4,
    ),
    "gravity": _plain("gravity", 2, 1),
    "lagkv": PagedScore(
        lambda x, out: score.lagkv(x.layers, x.batch, sinks=4, lag=_LAG, out=out),
        lambda x: score.lagkv_ref(x.layers, x.batch, sinks=4, lag=_LAG),
        rows=2,
    ),
    "streaming": PagedScore(
        lambda x, out: score.streaming(x.layers, x.batch, x.logical_lengths, x.positions, out=out),
        lambda x: score.streaming_ref(x.layers, x.batch, x.logical_lengths, x.positions),
        extra=4,
    ),
    "random": PagedScore(
        lambda x, out: score.random(x.layers, x.batch, x.states, x.layer_ids, x.head_ids, x.positions, out=out),
        lambda x: score.random_ref(x.layers, x.batch, x.states, x.layer_ids, x.head_ids, x.positions),
        extra=4,
    ),
}


def slot_bytes(setup: Setup, scored: PagedScore) -> tuple[int, int]:
    """Return how many bytes of a slot are read and written at least, and how many of them have to be read again."""
    row = setup.shape.head_dim * setup.layers.dtype.itemsize
    return scored.rows * row + scored.extra + 4, scored.again * (row + scored.extra)


def score_tasks(setup: Setup) -> Iterator[Task]:
    inputs, out = make_inputs(setup), torch.empty_like(setup.scores)
    for name, scored in PAGED.items():
        once, again = slot_bytes(setup, scored)
        yield Task(
            f"score {name}",
            lambda scored=scored: scored.launch(inputs, out),
            out.numel() * once,
            lambda name=name, scored=scored: _check_paged(setup, inputs, name, scored),
            out.numel() * (once + again) if again else 0,
        )


def _check_paged(setup: Setup, inputs: Inputs, name: str, scored: PagedScore) -> None:
    """Of the sampled requests and layers, every score."""
    got = scored.launch(inputs, torch.full_like(setup.scores, -7.0))
    layers, requests = setup.sample()
    for request in requests:
        want = scored.reference(inputs.of(layers, [request]))
        found = got[layers][..., setup.columns(request)]
        if name == "lagkv":
            _assert_ranks(found, want)
        else:
            assert_close(found, want, name, setup.layers.dtype)


def _assert_ranks(got: torch.Tensor, want: torch.Tensor) -> None:
    """Ranks in parts of the sequence: scores that are equal but for rounding may change places."""
    assert bool(((got - want).abs() <= 2.5 / _LAG).all())
    assert float((got != want).float().mean()) < 0.02


def combine_tasks(setup: Setup) -> Iterator[Task]:
    """Arithmetic on scores; what each does is checked with torch's own operations."""
    shape, batch, a = setup.shape, setup.batch, setup.scores
    b, out = torch.randn_like(a), torch.empty_like(a)
    low, high = shape.protect, shape.length - shape.window

    def rows(x: torch.Tensor) -> torch.Tensor:
        """Return ``[layers, heads, requests, length]`` of the sampled layers and requests."""
        layers, requests = setup.sample()
        return x.view(*x.shape[:2], shape.requests, shape.length)[layers][:, :, requests]

    def compare(got: torch.Tensor, want: torch.Tensor, op: str) -> None:
        for request in range(want.shape[2]):
            assert_close(rows(got)[:, :, request], want[:, :, request].float(), op, torch.float32)

    def forced(x: torch.Tensor) -> torch.Tensor:
        x[..., :low] = x[..., high:] = torch.inf
        return x

    def check_neighbours() -> None:
        x = rows(a).double()
        mean = torch.nn.functional.avg_pool1d(
            x.flatten(0, 2).unsqueeze(1), 2 * _RADIUS + 1, 1, _RADIUS, count_include_pad=False
        )
        compare(score.neighbour_mean(batch, a, _RADIUS), mean.view_as(x), "neighbour_mean")

    def ranks(x: torch.Tensor) -> torch.Tensor:
        x = rows(x)
        ordered = x[..., low:high].sort(-1).values
        less, up_to = (torch.searchsorted(ordered, x.contiguous(), right=right) for right in (False, True))
        return (less + up_to - 1).double() / (2 * (high - low - 1))

    def zscores(x: torch.Tensor) -> torch.Tensor:
        x = rows(x).double()
        counted = x[..., low:high]
        return (x - counted.mean(-1, keepdim=True)) / counted.std(-1, keepdim=True, correction=0)

    def check_order() -> None:
        got = rows(score.logical_order(setup.layers, batch, setup.positions))
        inputs = make_inputs(setup).of(*setup.sample())
        want = score.logical_order_ref(inputs.layers, inputs.batch, inputs.positions)
        assert torch.equal(got, want.view_as(got))

    yield Task(
        "neighbour mean",
        lambda: score.neighbour_mean(batch, a, _RADIUS, out=out),
        8 * a.numel(),
        check_neighbours,
    )
    yield Task(
        "rank sum",
        lambda: score.rank_sum(batch, a, b, out=out),
        12 * a.numel(),
        lambda: compare(score.rank_sum(batch, a, b), forced(ranks(a) + ranks(b)), "rank_sum"),
    )
    yield Task(
        "z-score sum",
        lambda: score.zscore_sum(batch, a, b, out=out),
        12 * a.numel(),
        lambda: compare(score.zscore_sum(batch, a, b), forced(zscores(a) + zscores(b)), "zscore_sum"),
        20 * a.numel(),
    )
    yield Task(
        "logical order",
        lambda: score.logical_order(setup.layers, batch, setup.positions),
        8 * a.numel(),
        check_order,
    )
