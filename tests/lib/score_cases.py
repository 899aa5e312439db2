"""Caches with known keys and values, everything else in them NaN, and what scores of them have to be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st
from paged_cases import BLOCK_SIZES, HEAD_DIMS, LAYOUTS, Shape, cache_view, poisoned_empty
from sparse_memory import sparse
from tolerances import assert_close
from wide_checks import WIDE_STRIDES, wide_batch

from nitro import policies
from nitro.kernels import score
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.policies.base import ScoreInput

TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of cosines and sines
DTYPES = (*TABLE_DTYPES, *FP8)
SEED, MODEL_LAYERS, MODEL_HEADS = 0x1234_5678_9ABC, 5, 3  # the first layer and head of this worker

shapes = st.builds(
    Shape,
    num_layers=st.integers(1, 2),
    num_heads=st.integers(1, 2),
    block_size=st.sampled_from([*BLOCK_SIZES, 7]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a policy sees it: tokens in logical order, and the slots that hold them."""

    key: int  # unsigned 64-bit
    keys: torch.Tensor  # [L, H, N, D] in the cache's dtype, or what its FP8 numbers stand for in float32
    values: torch.Tensor
    positions: torch.Tensor  # int32 [L, H, N], ascending
    slots: torch.Tensor  # int64 [L, H, N]
    logical_length: int

    def by_slot(self, x: torch.Tensor) -> torch.Tensor:
        """``[L, H, N]`` in logical order, by slot."""
        return torch.empty_like(x).scatter_(2, self.slots, x)


@dataclass(frozen=True, slots=True)
class Case:
    shape: Shape
    layers: PagedLayers
    batch: RaggedBatch
    positions: torch.Tensor
    order: torch.Tensor  # int32 [L, H, total]
    logical_lengths: torch.Tensor
    states: torch.Tensor
    requests: list[Request]
    moved: bool  # slots are not in logical order, or not every token is cached
    columns: list[slice] = field(default_factory=list)

    def order_or_none(self) -> torch.Tensor | None:
        return self.order if self.moved else None

    def positions_or_none(self) -> torch.Tensor | None:
        return self.positions if self.moved else None

    def inputs(self) -> Iterator[tuple[slice, Request, ScoreInput]]:
        for columns, request in zip(self.columns, self.requests, strict=True):
            if request.keys.shape[2]:
                yield (
                    columns,
                    request,
                    ScoreInput(
                        keys=request.keys,
                        values=request.values,
                        positions=request.positions,
                        layers=torch.arange(self.shape.num_layers) + MODEL_LAYERS,
                        heads=torch.arange(self.shape.num_heads) + MODEL_HEADS,
                        request_key=request.key,
                        logical_len=request.logical_length,
                        sinks=0,
                        window=max(self.batch.window, 1),
                        seed=SEED,
                    ),
                )


def make_case(
    shape: Shape,
    lengths: list[int],
    *,
    moved: bool = False,
    share: bool = False,
    bad: float = 0.0,
    window: int = 5,
    protect: int = 2,
    offset: float = 4.0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Keys with large common offsets, as real ones have, in shuffled blocks.

    Args:
        shape: of the caches.
        lengths: of the requests.
        moved: tokens lie in random slots of their request, and a third of all positions has been evicted.
        share: the requests that fill a block begin with the first one's first block.
        bad: share of the tokens that have something in key or value that is not finite.
        window: of the batch.
        protect: of the batch.
        offset: how large what all keys and values of a head have in common is, where they vary by 1.
        seed: of everything random.
        device: where to put the tensors.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    size, dim = shape.block_size, shape.head_dim
    lead = (shape.num_layers, shape.num_heads)
    needs = [-(-length // size) for length in lengths]
    num_blocks = sum(needs) + 3
    free = iter(rng.permutation(num_blocks).tolist())
    tables = [[next(free) for _ in range(need)] for need in needs]
    elements = {"odd": 2 * size * (2 * dim + 1), "strided": size * 4 * dim}
    count = num_blocks * shape.num_heads * elements.get(shape.layout, size * 2 * dim)
    memory = torch.full((shape.num_layers, count), torch.nan, device=device).to(shape.dtype)
    # Any scales, so that what depends on them shows; of a size that lets values remain far from float32's bounds.
    scales = None
    if shape.dtype in FP8:
        scales = torch.rand(shape.num_layers, 2, shape.num_heads, generator=generator) + 0.05
        factors = scales.transpose(1, 2).repeat_interleave(dim, dim=-1).unsqueeze(2)
    caches = [cache_view(shape, whole.view(torch.int8)) for whole in memory]
    positions = torch.full((shape.num_layers, num_blocks, shape.num_heads, size), -(2**30), dtype=torch.int32)
    offsets = offset * torch.randn(*lead, 1, 2 * dim, generator=generator)

    requests: list[Request] = []
    stored: list[torch.Tensor] = []
    for number, length in enumerate(lengths):
        rows = (torch.randn(*lead, length, 2 * dim, generator=generator) + offsets).to(shape.dtype)
        rows = _spoiled(rows, rng, bad, dim)
        logical_length = length + (length // 2 if moved else 0)
        where = np.broadcast_to(np.arange(length), (*lead, length))
        slots = torch.from_numpy(where.copy())
        if moved:
            where = np.sort(rng.random((*lead, logical_length)).argsort(-1)[..., :length], axis=-1)
            slots = torch.from_numpy(rng.random((*lead, length)).argsort(-1))
        if share and number and min(length, lengths[0]) >= size:
            tables[number][0] = tables[0][0]
            rows[:, :, :size] = stored[0][:, :, :size]
        stored.append(rows)
        stood_for = rows if scales is None else rows.float() * factors
        request = Request(
            key=int(rng.integers(0, 2**64, dtype=np.uint64)),
            keys=stood_for[..., :dim],
            values=stood_for[..., dim:],
            positions=torch.from_numpy(where.astype(np.int32)),
            slots=slots,
            logical_length=logical_length,
        )
        requests.append(request)
        _write(caches, positions, tables[number], request, rows)
    ends = np.cumsum([0, *lengths]).tolist()
    batch = RaggedBatch.of(tables, lengths, lengths, window=window, device=device)
    batch = replace(batch, protect=torch.full_like(batch.lengths, protect))  # also of requests that are shorter
    order = torch.cat([request.slots for request in requests], dim=-1).to(torch.int32)
    states = [score.random_state(SEED, request.key) for request in requests]
    return Case(
        shape=shape,
        layers=PagedLayers.of(caches, None if scales is None else scales.to(device)),
        batch=batch,
        positions=positions.to(device),
        order=order.to(device),
        logical_lengths=torch.tensor([r.logical_length for r in requests], dtype=torch.int32, device=device),
        states=torch.tensor(states, device=device),
        requests=requests,
        moved=moved,
        columns=[slice(a, b) for a, b in itertools.pairwise(ends)],
    )


def _spoiled(rows: torch.Tensor, rng: np.random.Generator, share: float, dim: int) -> torch.Tensor:
    worst = [np.nan, np.inf, -np.inf]
    spoilt = rows.float()
    for index in np.argwhere(rng.random(rows.shape[:3]) < share).tolist():
        spoilt[(*index, int(rng.integers(2 * dim)))] = rng.choice(worst)
    return spoilt.to(rows.dtype)


def _write(
    caches: list[torch.Tensor], positions: torch.Tensor, table: list[int], request: Request, rows: torch.Tensor
) -> None:
    for layer, head in np.ndindex(rows.shape[:2]):
        slots = request.slots[layer, head]
        blocks = torch.tensor(table, dtype=torch.int64)[slots // len(positions[0, 0, 0])]
        within = slots % len(positions[0, 0, 0])
        caches[layer][blocks, head, within] = rows[layer, head].to(caches[layer].device)
        positions[layer, blocks, head, within] = request.positions[layer, head]


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    longest: int,
    most: int = 3,
    device: str = "cpu",
    share: bool = True,
    shape: Shape | None = None,
) -> Case:
    """Ragged batches: lengths around the edges of blocks."""
    shape = shape or draw(shapes)
    size = shape.block_size
    edges = [n for n in (0, 1, 2, size - 1, size, size + 1, 2 * size) if n <= longest]
    length = st.one_of(st.sampled_from(edges), st.integers(1, longest))
    moved = draw(st.booleans())
    return make_case(
        shape,
        draw(st.lists(length, min_size=1, max_size=most)),
        moved=moved,
        share=share and not moved and draw(st.booleans()),
        bad=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
        window=draw(st.sampled_from([1, 3, 16, 40])),
        protect=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**31)),
        device=device,
    )


Check = Callable[[Case], None]
Score = Callable[[PagedLayers, RaggedBatch], torch.Tensor]


def run(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call a launcher whose outputs and scratch are poisoned before."""
    with poisoned_empty():
        return call()


def check(case: Case, op: str, got: torch.Tensor, ref: torch.Tensor, policy: policies.Policy | None = None) -> None:
    """Compare scores with the reference, and with a policy that is given what was put into the caches."""
    dtype = case.shape.dtype
    for columns in case.columns:
        assert_close(got[..., columns], ref[..., columns], op, dtype)
    if policy is not None:
        for columns, request, x in case.inputs():
            assert_close(got[..., columns], request.by_slot(policy.score(x)), op, dtype)


def check_norms(case: Case) -> None:
    for op, launch, ref in (("knorm", score.knorm, score.knorm_ref), ("vnorm", score.vnorm, score.vnorm_ref)):
        got = run(lambda launch=launch: launch(case.layers, case.batch))
        check(case, op, got, ref(case.layers, case.batch), policies.get(op))


def check_streaming(case: Case) -> None:
    arguments = case.layers, case.batch, case.logical_lengths, case.positions_or_none()
    got = run(lambda: score.streaming(*arguments))
    check(case, "streaming", got, score.streaming_ref(*arguments), policies.get("streaming"))


def check_random(case: Case) -> None:
    device = case.batch.device
    layers = torch.arange(case.shape.num_layers, device=device) + MODEL_LAYERS
    heads = torch.arange(case.shape.num_heads, device=device) + MODEL_HEADS
    arguments = case.layers, case.batch, case.states, layers, heads, case.positions_or_none()
    got = run(lambda: score.random(*arguments))
    check(case, "random", got, score.random_ref(*arguments), policies.get("random"))


def check_keydiff(case: Case) -> None:
    got = run(lambda: score.keydiff(case.layers, case.batch))
    check(case, "keydiff", got, score.keydiff_ref(case.layers, case.batch), policies.get("keydiff"))


def check_centred(case: Case) -> None:
    got = run(lambda: score.vnorm_centred(case.layers, case.batch))
    check(case, "vnorm_centred", got, score.vnorm_centred_ref(case.layers, case.batch))
    for columns, request, x in case.inputs():
        values = x.values.double().masked_fill(~_finite(x.values).unsqueeze(-1), torch.nan)
        want = (values - values.nanmean(2, keepdim=True)).norm(dim=-1)
        assert_close(got[..., columns], request.by_slot(want.float()), "vnorm_centred", case.shape.dtype)


def check_gravity(case: Case, softening: float = 0.1) -> None:
    options = {"softening": softening, "order": case.order_or_none()}
    got = run(lambda: score.gravity(case.layers, case.batch, **options))
    ref = score.gravity_ref(case.layers, case.batch, **options)
    check(case, "gravity", got, ref, policies.get("gravity", softening=softening))


def rotary_table(rotary: int, positions: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """cos and sin of positions, ``[positions, rotary]``."""
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return (torch.cat([angles.cos(), angles.sin()], -1) * scale).to(dtype)


def check_unrotated(case: Case, rotary: int, *, interleaved: bool, dtype: torch.dtype, scale: float) -> None:
    """Undo, token by token, what is in the caches, by solving for what the rotation was applied to."""
    longest = max(request.logical_length for request in case.requests)
    table = rotary_table(rotary, longest, dtype, scale)
    arguments = case.layers, case.batch, table.to(case.batch.device), case.positions_or_none()
    got = run(lambda: score.keydiff_unrotated(*arguments, interleaved=interleaved))
    ref = score.keydiff_unrotated_ref(*arguments, interleaved=interleaved)
    check(case, "keydiff_unrotated", got, ref)
    policy = policies.get("keydiff")
    half = rotary // 2
    first = torch.arange(half) * 2 if interleaved else torch.arange(half)
    second = first + 1 if interleaved else first + half
    for columns, request, x in case.inputs():
        angles = table.double()[x.positions.long()]
        c, s = angles[..., :half], angles[..., half:]
        keys = x.keys.double()
        rotation = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
        pairs = torch.stack([keys[..., first], keys[..., second]], -1)
        undone = torch.linalg.solve(rotation, pairs.nan_to_num(torch.nan, torch.nan, torch.nan))
        keys[..., first], keys[..., second] = undone[..., 0], undone[..., 1]
        want = policy.score(replace(x, keys=keys.float()))
        assert_close(got[..., columns], request.by_slot(want), "keydiff_unrotated", case.shape.dtype)


def check_lagkv(case: Case, sinks: int, lag: int) -> None:
    """The scores against the reference and the formula; the ranks against the scores, ties apart."""
    options = {"sinks": sinks, "lag": lag, "order": case.order_or_none()}
    scores = run(lambda: score.lagkv(case.layers, case.batch, ranked=False, **options))
    ref = score.lagkv_ref(case.layers, case.batch, ranked=False, **options)
    check(case, "lagkv", scores, ref)
    ranks = run(lambda: score.lagkv(case.layers, case.batch, **options)).cpu()
    ranks_ref = score.lagkv_ref(case.layers, case.batch, **options).cpu()
    for columns, request in zip(case.columns, case.requests, strict=True):
        length = request.keys.shape[2]
        parts = max(length - sinks, 0) // lag
        end = sinks + (parts - 1) * lag if parts > 1 else 0
        tokens = [x[..., columns].gather(2, request.slots) for x in (scores.cpu(), ranks, ranks_ref)]
        rest = [torch.cat([x[..., : sinks if end else length], x[..., end or length :]], -1) for x in tokens]
        assert torch.equal(rest[1], rest[2])
        assert torch.equal(rest[0], rest[2])
        bad = ~(_finite(request.keys) & _finite(request.values))
        if not end:
            continue
        assert torch.equal(tokens[1][..., sinks:end].isnan(), bad[..., sinks:end])
        for layer, head, part in np.ndindex(*bad.shape[:2], parts - 1):
            inside = slice(sinks + part * lag, sinks + (part + 1) * lag)
            part_scores, part_ranks, part_bad = (x[layer, head, inside] for x in (*tokens[:2], bad))
            by_rank = (part_ranks[~part_bad] * lag).round().long()
            assert by_rank.sort().values.tolist() == list(range(int((~part_bad).sum())))
            in_order = torch.empty(len(by_rank)).scatter_(0, by_rank, part_scores[~part_bad])
            assert bool((in_order.diff() >= -1e-6 * in_order[:-1]).all())
            if not bool(bad[layer, head, sinks : sinks + parts * lag].any()):
                want = _lagkv_formula(request, layer, head, inside, lag)
                assert np.allclose(part_scores.numpy(), want, rtol=1e-4, atol=1e-7)


def _lagkv_formula(request: Request, layer: int, head: int, inside: slice, lag: int) -> np.ndarray:
    """Equations 1 to 5 of https://arxiv.org/abs/2504.04704 in float64."""
    both = []
    for x in (request.keys, request.values):
        rows = x[layer, head].double().numpy()
        following = rows[inside.stop : inside.stop + lag]
        low, high = following.min(0), following.max(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            unit = (rows[inside] - low) / (high - low)
        unit[:, high == low] = 0.0  # ours
        spread = np.exp(unit.std(-1, ddof=1))
        both.append(spread / spread.sum())
    return (both[0] + both[1]) / 2


def check_order(case: Case) -> None:
    got = run(lambda: score.logical_order(case.layers, case.batch, case.positions))
    want = score.logical_order_ref(case.layers, case.batch, case.positions)
    for columns in case.columns:
        assert torch.equal(got[..., columns], want[..., columns])
        assert torch.equal(got[..., columns], case.order[..., columns])


@dataclass(frozen=True, slots=True)
class Scores:
    """Two ragged arrays of scores on a batch, with ties, NaNs and infinities."""

    batch: RaggedBatch
    a: torch.Tensor
    b: torch.Tensor
    order: torch.Tensor | None

    def rows(self) -> Iterator[tuple[int, slice]]:
        ends = self.batch.offsets.tolist()
        yield from enumerate(slice(a, b) for a, b in itertools.pairwise(ends))


@st.composite
def score_cases(draw: st.DrawFn, *, longest: int, most: int = 3, device: str = "cpu") -> Scores:
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))
    lead = draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]))
    flavour = draw(st.sampled_from(["normal", "ties", "special"]))
    return make_scores(lengths, lead, flavour, rng, moved=draw(st.booleans()), device=device)


def make_scores(
    lengths: list[int],
    lead: tuple[int, int],
    flavour: str,
    rng: np.random.Generator,
    *,
    moved: bool,
    protect: int = 3,
    window: int = 4,
    device: str = "cpu",
) -> Scores:
    shape = (*lead, sum(lengths))
    both = []
    for _ in range(2):
        x = rng.normal(3.0, 2.0, shape)
        if flavour != "normal":
            x = np.round(x)
        if flavour == "special":
            x = np.where(rng.random(shape) < 0.2, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45], shape), x)
        both.append(torch.from_numpy(x.astype(np.float32)).to(device))
    batch = RaggedBatch.of([[]] * len(lengths), lengths, lengths, window=window, device=device)
    order = [torch.from_numpy(rng.random((*lead, length)).argsort(-1)) for length in lengths]
    return Scores(
        replace(batch, protect=torch.full_like(batch.lengths, protect)),
        *both,
        torch.cat(order, -1).to(device, torch.int32) if moved else None,
    )


def check_neighbours(x: Scores, radius: int) -> None:
    got = run(lambda: score.neighbour_mean(x.batch, x.a, radius, order=x.order))
    ref = score.neighbour_mean_ref(x.batch, x.a, radius, order=x.order)
    for _, columns in x.rows():
        assert_close(got[..., columns], ref[..., columns], "neighbour_mean", torch.float32)


def check_rank_sum(x: Scores, weights: tuple[float, float], *, evictable: bool) -> None:
    """Against the reference, and where all is ranked against midranks by plain Python."""
    options = {"weights": weights, "evictable": evictable, "order": x.order}
    got = run(lambda: score.rank_sum(x.batch, x.a, x.b, **options)).cpu()
    ref = score.rank_sum_ref(x.batch, x.a, x.b, **options)
    for _, columns in x.rows():
        assert_close(got[..., columns], ref[..., columns], "rank_sum", torch.float32)
        if evictable or x.order is not None:
            continue
        for layer, head in np.ndindex(got.shape[:2]):
            row = [y[layer, head, columns].tolist() for y in (x.a.cpu(), x.b.cpu())]
            want = [weights[0] * a + weights[1] * b for a, b in zip(*map(_midranks, row), strict=True)]
            assert np.allclose(got[layer, head, columns].numpy(), want, rtol=1e-6, atol=1e-6, equal_nan=True)


def _midranks(row: list[float]) -> list[float]:
    known = sorted(y for y in row if y == y)
    last = max(len(known) - 1, 1)
    return [(known.index(y) + (known.count(y) - 1) / 2) / last if y == y else np.nan for y in row]


def check_zscore_sum(
    x: Scores, scopes: tuple[score.Scope, score.Scope], weights: tuple[float, float], *, evictable: bool
) -> None:
    options = {"scopes": scopes, "weights": weights, "evictable": evictable, "order": x.order}
    got = run(lambda: score.zscore_sum(x.batch, x.a, x.b, **options))
    ref = score.zscore_sum_ref(x.batch, x.a, x.b, **options)
    for _, columns in x.rows():
        assert_close(got[..., columns], ref[..., columns], "zscore_sum", torch.float32)


def check_same_bits_alone(case: Case, score_of: Score) -> None:
    """A request scores the same bits whatever else is in the batch."""
    together = score_of(case.layers, case.batch)
    for number, columns in enumerate(case.columns):
        length = columns.stop - columns.start
        table = case.batch.block_tables[number].tolist()
        alone = RaggedBatch.of(
            [[block for block in table if block >= 0]],
            [length],
            [length],
            window=case.batch.window,
            device=case.batch.device,
        )
        got = score_of(case.layers, alone)
        assert torch.equal(got.view(torch.int32), together[..., columns].view(torch.int32))


def check_wide(score_of: Score, ref: Score, wide: str, device: str = "cpu") -> None:
    """One dimension of the cache reaches beyond 2**31 elements."""
    shape, strides = (3, 3, 8, 64), WIDE_STRIDES[wide]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    cache = sparse((reach,), torch.bfloat16, device).as_strided(shape, strides)
    cache.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    batch = RaggedBatch.of([[2, 0]], [14], [14], window=3, device=device)
    layers = PagedLayers.of([cache])
    want = ref(layers, batch)
    assert_close(score_of(layers, batch), want, "gravity", torch.bfloat16)
    assert not bool((want == want[..., :1]).all())


def check_wide_scores(device: str = "cpu") -> None:
    """Arrays of scores beyond 2**31 elements, in which one request's are the last of each layer and head."""
    shape = (2, 2, 2**30 + 40)
    batch = wide_batch(shape[2], device)
    x = sparse(shape, torch.float32, device)
    x[..., -40:] = torch.randn(2, 2, 40, generator=torch.Generator().manual_seed(0)).to(device)
    out = sparse(shape, torch.float32, device)
    score.neighbour_mean(batch, x, 3, out=out)
    want = score.neighbour_mean_ref(wide_batch(40, device), x[..., -40:].contiguous(), 3)
    assert_close(out[..., -40:], want, "neighbour_mean", torch.float32)


def _finite(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().square().sum(-1).isfinite()
