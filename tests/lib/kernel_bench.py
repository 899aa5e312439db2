"""What ci/bench_kernels.py and tests/perf time: shapes, caches full of numbers, and tasks that check themselves.

Bytes are those that any implementation has to move: K, V and positions of moved tokens are read and written once,
keys, values and scores are read once, scores and masks are written once; block tables, lists of moves and whatever a
kernel reads twice do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nitro.kernels import _moves, compact, select
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch


@dataclass(frozen=True)
class Shape:
    """What is evicted in one step; ``layers`` are timed together, of ``model_layers`` that the model has."""

    requests: int
    length: int
    keep: int
    model_layers: int
    layers: int
    heads: int
    head_dim: int
    block_size: int = 16
    protect: int = 4
    window: int = 32


SHAPES = {
    # All 32 layers would take 137 GB for the sources alone: 8 are timed, with blocks of their own for each request.
    "large": Shape(requests=256, length=4096, keep=2048, model_layers=32, layers=8, heads=8, head_dim=128),
    # Qwen2.5-0.5B with 2,048 requests, budget 330 and slack 64: every step, 32 requests have grown by the slack.
    "essay": Shape(requests=32, length=394, keep=330, model_layers=24, layers=24, heads=2, head_dim=64),
    # One prompt of 128k tokens.
    "long": Shape(requests=1, length=131072, keep=32768, model_layers=24, layers=24, heads=2, head_dim=64),
    # As large as fits GPUs of 20 GB, and several times any L2 cache.
    "medium": Shape(requests=64, length=2048, keep=1024, model_layers=32, layers=8, heads=8, head_dim=128),
}


@dataclass(frozen=True)
class Setup:
    """The caches and the batch of a shape, on the GPU."""

    shape: Shape
    layers: PagedLayers
    positions: torch.Tensor
    batch: RaggedBatch
    scores: torch.Tensor
    mask: torch.Tensor
    scratch: torch.Tensor

    def sample(self) -> tuple[list[int], list[int]]:
        """Return the layers and the requests of which a check looks at everything."""
        shape = self.shape
        return sorted({0, shape.layers - 1}), sorted({0, shape.requests // 2, shape.requests - 1})

    def columns(self, request: int) -> slice:
        return slice(request * self.shape.length, (request + 1) * self.shape.length)


@dataclass(frozen=True)
class Task:
    """Something to time; ``check`` raises unless it does what it should, and is called first.

    Attributes:
        nbytes: that any implementation has to move.
        passes_nbytes: likewise, where what is read again cannot stay on the chip: the mean is needed before the
            first score, and a row is larger than what a processor holds. 0: there is no second pass.
    """

    name: str
    call: Callable[[], Any]
    nbytes: int
    check: Callable[[], None]
    passes_nbytes: int = 0


def make_setup(shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> Setup:
    """NHD caches; every request has blocks of its own, shuffled, and private blocks to pack to.

    The keys and values of a head have an offset in common, as real ones do. As after a ``fill``, the first ``keep``
    slots hold tokens in any order.
    """
    torch.manual_seed(0)
    size = shape.block_size
    blocks, kept_blocks = -(-shape.length // size), -(-shape.keep // size)
    num_blocks = shape.requests * (blocks + kept_blocks)
    drawn = torch.bfloat16 if dtype in FP8 else dtype
    offsets = 2 * torch.randn(shape.heads, 2 * shape.head_dim, dtype=drawn, device=device)
    caches = [
        torch.empty(num_blocks, size, shape.heads, 2 * shape.head_dim, dtype=drawn, device=device)
        .normal_()
        .add_(offsets)
        .to(dtype)
        .transpose(1, 2)
        for _ in range(shape.layers)
    ]
    free = torch.randperm(num_blocks, dtype=torch.int32, device=device)
    tables = free[: shape.requests * blocks].view(shape.requests, blocks)
    lengths = torch.full((shape.requests,), shape.length, dtype=torch.int32, device=device)
    total = shape.requests * shape.length
    batch = RaggedBatch(
        block_tables=tables,
        lengths=lengths,
        keep=torch.full_like(lengths, shape.keep),
        protect=torch.full_like(lengths, shape.protect),
        offsets=torch.arange(shape.requests + 1, device=device) * shape.length,
        window=shape.window,
        max_length=shape.length,
        total=total,
        dst_tables=free[shape.requests * blocks :].view(shape.requests, kept_blocks),
    )
    scores = torch.randn(shape.layers, shape.heads, total, device=device)
    mask, _ = select.select_ragged(scores, batch)
    logical = torch.arange(blocks * size, dtype=torch.int32, device=device)
    logical[: shape.keep] = torch.randperm(shape.keep, dtype=torch.int32, device=device)
    positions = torch.zeros(shape.layers, num_blocks, shape.heads, size, dtype=torch.int32, device=device)
    for layer in positions:
        layer[tables.long()] = logical.view(blocks, 1, size)
    return Setup(
        shape, PagedLayers.of(caches), positions, batch, scores, mask, torch.empty_like(scores).view(torch.int32)
    )


def moved_bytes(setup: Setup, moves: int) -> int:
    """Return what so many moves read and write: K, V and position of each."""
    return 2 * moves * (2 * setup.shape.head_dim * setup.layers.dtype.itemsize + 4)


def fill_moves(setup: Setup, mask: torch.Tensor) -> int:
    """Return how many tokens ``fill`` moves: the survivors of the tails."""
    shape = setup.shape
    return int((mask.view(-1, shape.requests, shape.length)[..., shape.keep :] != 0).sum())


def select_tasks(setup: Setup) -> Iterator[Task]:
    scores, batch, shape = setup.scores, setup.batch, setup.shape
    nbytes = scores.numel() * (4 + 1)
    theta = torch.zeros((), device=scores.device)

    def check_select() -> None:
        mask, counts = select.select_ragged(scores, batch)
        assert bool((counts == shape.keep).all())
        for layer in range(shape.layers):
            rows = scores[layer].view(shape.heads, shape.requests, shape.length)
            want = select.select_topk_ref(rows, shape.keep, shape.protect, shape.window)
            got = mask[layer].view_as(rows).nonzero()[:, 2].view_as(want)
            assert torch.equal(got, want)

    def check_threshold() -> None:
        mask, counts = select.threshold_ragged(scores, batch, theta)
        rows = scores.view(*scores.shape[:2], shape.requests, shape.length)
        want = rows >= 0
        want[..., : shape.protect] = True
        want[..., shape.length - shape.window :] = True
        assert torch.equal(mask.view_as(want) != 0, want)
        assert torch.equal(counts, want.sum(-1, dtype=torch.int32).permute(2, 0, 1))

    yield Task("select top-k", lambda: select.select_ragged(scores, batch), nbytes, check_select)
    yield Task("select threshold", lambda: select.threshold_ragged(scores, batch, theta), nbytes, check_threshold)


def stitch_tasks(setup: Setup) -> Iterator[Task]:
    layers, batch, shape = setup.layers, setup.batch, setup.shape
    kept = setup.mask.view(shape.layers, shape.heads, shape.requests, shape.length)
    moves = {"pack": int(kept.sum()), "fill": fill_moves(setup, setup.mask)}
    calls = {"pack": compact.pack_ragged, "fill": compact.fill_ragged}

    def check(name: str) -> None:
        """Of three requests, every surviving slot, in all layers and heads."""
        requests = setup.sample()[1]
        expect = {}
        for request in requests:
            before = [layers.rows(layer, batch.block_tables[request], shape.length) for layer in range(shape.layers)]
            expect[request] = [
                compact.pack_ref(rows, _kept_slots(kept[layer, :, request], shape.keep, in_place=name == "fill"))
                for layer, rows in enumerate(before)
            ]
        calls[name](layers, batch, setup.mask, setup.positions, scratch=setup.scratch)
        for request in requests:
            table = batch.dst_tables[request] if name == "pack" else batch.block_tables[request]
            for layer, want in enumerate(expect[request]):
                assert torch.equal(layers.rows(layer, table, shape.keep).view(torch.int16), want.view(torch.int16))

    for name, call in calls.items():
        yield Task(
            f"stitch {name}",
            lambda call=call: call(layers, batch, setup.mask, setup.positions, scratch=setup.scratch),
            moved_bytes(setup, moves[name]),
            lambda name=name: check(name),
        )
        # The second of the two launches alone, with the lists that the first one made.
        lists = setup.scratch.clone()
        call(layers, batch, setup.mask, setup.positions, scratch=lists)
        moving = kept[..., shape.keep :] if name == "fill" else kept
        numbers = (moving != 0).sum(-1, dtype=torch.int32).permute(2, 0, 1).contiguous()
        yield Task(
            f"moves of {name}",
            lambda name=name, lists=lists, numbers=numbers: _moves.move(
                layers, batch, setup.positions, lists, numbers, fill=name == "fill"
            ),
            moved_bytes(setup, moves[name]),
            lambda: None,  # checked with the list
        )


def _kept_slots(kept: torch.Tensor, keep: int, *, in_place: bool) -> torch.Tensor:
    """Return ``[H, keep]``, of each slot after the move the one that it comes from, given the mask ``[H, length]``."""
    if not in_place:
        return kept.nonzero()[:, 1].view(len(kept), keep)
    slots = torch.arange(keep, device=kept.device).expand(len(kept), -1).clone()
    for row, source in zip(kept != 0, slots, strict=True):
        source[~row[:keep]] = row[keep:].nonzero().flatten() + keep
    return slots
