"""Steps of new tokens with known keys and values, and what write-time scoring and the write filter make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import write_filter
import write_scores
from hypothesis import strategies as st
from paged_cases import INTEGERS, LAYOUTS, Shape, cache_view, poisoned_empty
from sparse_memory import sparse
from tolerances import assert_close

from nitro.kernels import score
from nitro.kernels.paged import PagedLayers, RaggedBatch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INPUTS = ("contiguous", "qkv", "heads first", "every other")
UNTOUCHED = -12345.0

shapes = st.builds(
    Shape,
    num_layers=st.just(1),
    num_heads=st.integers(1, 3),
    block_size=st.sampled_from([7, 8, 16, 128]),
    head_dim=st.sampled_from([2, 33, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
)


@dataclass(frozen=True, slots=True)
class Step:
    """What one layer gets in one engine step."""

    shape: Shape
    keys: torch.Tensor  # [>= T, H, D]
    values: torch.Tensor
    slot_mapping: torch.Tensor  # int64 [T]
    cache: torch.Tensor  # [num_blocks, H, block_size, 2 * D], full of a NaN
    memory: torch.Tensor  # int8, all bytes of the cache, and those between
    scores: torch.Tensor  # float32 [num_blocks, H, block_size], full of UNTOUCHED


def make_step(
    shape: Shape,
    tokens: int,
    *,
    layout: str = "qkv",
    unwritten: float = 0.2,
    bad: float = 0.1,
    padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Step:
    """New tokens for random slots.

    Args:
        shape: of the caches.
        tokens: T.
        layout: of keys and values, one of ``INPUTS``.
        unwritten: share of the tokens with slot -1.
        bad: share of the rows of K and V with something that is not finite, or has too large a square.
        padding: rows of keys beyond T, which must not be looked at.
        seed: of everything random.
        device: where to put the tensors.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    heads, dim, size = shape.num_heads, shape.head_dim, shape.block_size
    rows = torch.randn(2, tokens + padding, heads, dim, generator=generator) * 3
    for index in np.argwhere(rng.random(rows.shape[:3]) < bad).tolist():
        rows[(*index, int(rng.integers(dim)))] = rng.choice([math.nan, math.inf, -math.inf, 1e30, 300.0, 1e-30])
    rows = rows.to(shape.dtype).to(device)
    rows[:, tokens:] = math.nan
    keys, values = (_laid_out(x, layout) for x in rows)
    num_blocks = -(-tokens // size) + 2
    slots = rng.permutation(num_blocks * size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < unwritten] = -1
    elements = {"odd": 2 * size * (2 * dim + 1), "strided": size * 4 * dim}
    count = num_blocks * heads * elements.get(shape.layout, size * 2 * dim)
    memory = torch.full((count,), math.nan, dtype=shape.dtype, device=device).view(torch.int8)
    return Step(
        shape=shape,
        keys=keys,
        values=values,
        slot_mapping=torch.from_numpy(slots).to(device),
        cache=cache_view(shape, memory),
        memory=memory,
        scores=torch.full((num_blocks, heads, size), UNTOUCHED, device=device),
    )


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same ``[T, H, D]`` with other strides; all else in its memory is NaN."""
    tokens, heads, dim = x.shape
    if layout == "contiguous":
        return x.contiguous()
    if layout == "qkv":  # a part of each row of a larger matrix
        whole = torch.full((tokens, heads + 3, dim), math.nan, dtype=x.dtype, device=x.device)
        out = whole[:, 2 : 2 + heads]
    elif layout == "heads first":
        out = torch.full((heads, tokens, dim), math.nan, dtype=x.dtype, device=x.device).transpose(0, 1)
    else:
        out = torch.full((tokens, heads, 2 * dim), math.nan, dtype=x.dtype, device=x.device)[..., ::2]
    return out.copy_(x)


@st.composite
def steps(draw: st.DrawFn, *, most: int, device: str = "cpu", shape: Shape | None = None) -> Step:
    return make_step(
        shape or draw(shapes),
        draw(st.integers(0, most)),
        layout=draw(st.sampled_from(INPUTS)),
        unwritten=draw(st.sampled_from([0.0, 0.3, 1.0])),
        bad=draw(st.sampled_from([0.0, 0.3])),
        padding=draw(st.sampled_from([0, 5])),
        seed=draw(st.integers(0, 2**31)),
        device=device,
    )


def check_writes(step: Step) -> None:
    """Both scores, by themselves and with the cache write: each token's own, and nothing else is touched."""
    written = step.slot_mapping >= 0
    slots, size = step.slot_mapping[written], step.shape.block_size
    where = (slots // size, slice(None), slots % size)
    untouched = torch.ones_like(step.scores, dtype=torch.bool)
    untouched[where] = False
    want_memory = step.memory.clone()
    want_cache = cache_view(step.shape, want_memory).view(INTEGERS[step.cache.itemsize])
    rows = torch.cat([step.keys, step.values], -1)[: len(written)][written]
    want_cache[where] = rows.view(INTEGERS[step.cache.itemsize])

    for name, x in (("knorm", step.keys), ("vnorm", step.values)):
        write = getattr(write_scores, f"write_{name}")
        want, got, fused = (step.scores.clone() for _ in range(3))
        getattr(write_scores, f"write_{name}_ref")(x, step.slot_mapping, want)
        write(x, step.slot_mapping, got)
        memory = step.memory.clone()
        write_scores.write_cache(step.keys, step.values, step.slot_mapping, cache_view(step.shape, memory), fused, name)
        assert torch.equal(memory, want_memory)
        for scores in (got, fused):
            assert bool((scores[untouched] == UNTOUCHED).all())
            # One row each: every token by itself, so that no large score hides the error of a small one.
            assert_close(scores[where].flatten()[None, :, None], want[where].flatten()[None, :, None], name, x.dtype)
        # By definition, in float64, so that the reference is not only compared with its own kind.
        exact = torch.linalg.vector_norm(x[: len(written)][written].double(), dim=-1)
        exact = exact.masked_fill(~(exact.square() < torch.finfo(torch.float32).max), math.nan)
        sign = -1.0 if name == "knorm" else 1.0
        torch.testing.assert_close(got[where].double(), sign * exact, rtol=1e-5, atol=1e-18, equal_nan=True)

    memory = step.memory.clone()
    write_scores.write_cache(step.keys, step.values, step.slot_mapping, cache_view(step.shape, memory))
    assert torch.equal(memory, want_memory)


def check_read(shape: Shape, lengths: list[int], seed: int = 0, device: str = "cpu") -> None:
    """What was kept comes back bit for bit, NaNs with payloads among it, and every element of the result is written."""
    rng = np.random.default_rng(seed)
    needs = [-(-length // shape.block_size) for length in lengths]
    num_blocks = sum(needs) + 2
    free = iter(rng.permutation(num_blocks).tolist())
    tables = [[next(free) for _ in range(need)] for need in needs]
    if len(tables) > 1 and min(needs[:2]):
        tables[1][0] = tables[0][0]  # a shared prefix
    lead = (num_blocks, shape.num_heads, shape.block_size)
    caches = [torch.zeros(*lead, 2 * shape.head_dim, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (shape.num_layers, *lead), dtype=np.int32))
    layers, batch = PagedLayers.of(caches), RaggedBatch.of(tables, lengths, lengths, device=device)
    kept = bits.view(torch.float32).to(device)
    with poisoned_empty():
        got = write_scores.read_scores(layers, batch, kept)
    want = torch.zeros(shape.num_layers, shape.num_heads, sum(lengths), dtype=torch.int32)
    column = 0
    for table, length in zip(tables, lengths, strict=True):
        for slot in range(length):
            want[..., column] = bits[:, table[slot // shape.block_size], :, slot % shape.block_size]
            column += 1
    assert torch.equal(got.view(torch.int32).cpu(), want)
    assert torch.equal(write_scores.read_scores_ref(layers, batch, kept).view(torch.int32).cpu(), want)
    out = torch.empty_like(got)
    assert write_scores.read_scores(layers, batch, kept, out=out) is out
    assert torch.equal(out.view(torch.int32).cpu(), want)


def check_same_as_at_eviction(shape: Shape, lengths: list[int], seed: int = 0, device: str = "cpu") -> None:
    """Written token by token in any order, then read: what the scores of the cache say."""
    size, tokens = shape.block_size, sum(lengths)
    step = make_step(shape, tokens, unwritten=0.0, seed=seed, device=device)
    num_blocks = sum(-(-length // size) for length in lengths)
    order = np.random.default_rng(seed).permutation(num_blocks)
    tables, slots, first = [], [], 0
    for length in lengths:
        blocks = order[first : first + -(-length // size)]
        first += len(blocks)
        tables.append(blocks.tolist())
        slots += [int(blocks[i // size]) * size + i % size for i in range(length)]
    scores = {
        name: torch.full((1, num_blocks, shape.num_heads, size), UNTOUCHED, device=device)
        for name in write_scores.SCORES
    }
    cache = torch.full((num_blocks, shape.num_heads, size, 2 * shape.head_dim), math.nan, device=device)
    cache = cache.to(shape.dtype)
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    half = tokens // 2  # two steps
    for part in (slice(0, half), slice(half, tokens)):
        arguments = step.keys[part], step.values[part], mapping[part].contiguous()
        write_scores.write_cache(*arguments, cache, scores["knorm"][0], "knorm")
        write_scores.write_vnorm(*arguments[1:], scores["vnorm"][0])
    layers, batch = PagedLayers.of([cache]), RaggedBatch.of(tables, lengths, lengths, device=device)
    for name, kept in scores.items():
        got = write_scores.read_scores(layers, batch, kept)
        assert_close(got, getattr(score, name)(layers, batch), name, shape.dtype)


def check_filter(lengths: list[int], padding: int, seed: int = 0, device: str = "cpu") -> None:
    """Against plain Python; the mapping stays as it was unless it is the output."""
    rng = np.random.default_rng(seed)
    requests, tokens = len(lengths), sum(lengths) + padding
    firsts = rng.integers(0, 40, requests)
    sinks = rng.integers(0, 30, requests)
    newest = rng.integers(0, 60, requests)
    slots = np.where(rng.random(tokens) < 0.1, -1, rng.integers(0, 2**40, tokens))
    positions = np.concatenate([*(np.arange(n) + f for n, f in zip(lengths, firsts, strict=True)), np.zeros(padding)])
    starts = np.cumsum([0, *lengths])
    want = [-1] * tokens
    for request in range(requests):
        for token in range(starts[request], starts[request + 1]):
            if positions[token] < sinks[request] or positions[token] >= newest[request]:
                want[token] = int(slots[token])
    arrays = (
        slots,
        positions.astype(np.int64),
        starts.astype(np.int32),
        sinks.astype(np.int32),
        newest.astype(np.int64),
    )
    arguments = [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays]
    with poisoned_empty():
        assert write_filter.filter_slots(*arguments).tolist() == want
    assert arguments[0].tolist() == slots.tolist()
    assert write_filter.filter_slots_ref(*arguments).tolist() == want
    assert write_filter.filter_slots(*arguments, out=arguments[0]).tolist() == want


def check_wide(device: str = "cpu") -> None:
    """Slots, and offsets of keys and cache rows, beyond 2**31."""
    size, slots = 16, [2**31 + 21, 5, -1, 2**30]
    scores = sparse((2**27 + 4, 1, size), torch.float32, device)
    # Strides below 2**31, but not their products with a token.
    keys = sparse((3 * (2**30 + 64) + 64,), torch.bfloat16, device).as_strided((4, 1, 64), (2**30 + 64, 64, 1))
    rows = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(0)).to(keys)
    keys.copy_(rows)
    mapping = torch.tensor(slots, device=device)
    write_scores.write_knorm(keys, mapping, scores)
    want = -torch.linalg.vector_norm(rows.float(), dim=-1).cpu()
    got = [float(scores[slot // size, 0, slot % size]) for slot in slots if slot >= 0]
    torch.testing.assert_close(torch.tensor(got), want[[0, 1, 3], 0])
    assert int(torch.count_nonzero(scores[:1])) == 1  # nothing has wrapped around to slot 21

    # Blocks overlap in memory except those in use.
    cache = sparse((2**31 + 2**20,), torch.bfloat16, device).as_strided((2**27 + 4, 1, size, 128), (16, 2**30, 128, 1))
    for token in (0, 1, 3):
        scores[slots[token] // size, 0, slots[token] % size] = 0.0
    write_scores.write_cache(keys, keys, mapping, cache, scores)
    for token in (0, 1, 3):
        row = cache[slots[token] // size, 0, slots[token] % size]
        assert torch.equal(row.cpu(), torch.cat([rows[token, 0]] * 2).cpu())
        got_score = scores[slots[token] // size, 0, slots[token] % size].cpu()
        torch.testing.assert_close(got_score, want[token, 0], rtol=1e-6, atol=0.0)
    layers = PagedLayers.of([cache])
    batch = RaggedBatch.of([[2**27 + 1, 0]], [32], [32], device=device)
    got_scores = write_scores.read_scores(layers, batch, scores[None])
    assert float(got_scores[0, 0, 5]) == float(scores[2**27 + 1, 0, 5]) != 0.0
    assert float(got_scores[0, 0, 16 + 5]) == float(scores[0, 0, 5]) != 0.0
