"""Merging: who takes what, what comes of it, and what must stay as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paged_cases as paged
import pool_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import blocks, compact, pool
from nitro.kernels.paged import PagedLayers, RaggedBatch

from .conftest import interpreted

MERGE = [
    pytest.param(pool.merge_ragged, id="kernel", marks=interpreted),
    pytest.param(pool.merge_ragged_ref, id="ref"),
]
merges = pytest.mark.parametrize("merge", MERGE)
SMALL = paged.Shape(num_layers=1, num_heads=1, dtype=torch.float32)


def requests(shape: paged.Shape, *sizes: tuple[int, int]) -> list[paged.Request]:
    full = [np.full((shape.num_layers, shape.num_heads), keep, np.int32) for _, keep in sizes]
    return [paged.Request(length, keep) for (length, _), keep in zip(sizes, full, strict=True)]


@merges
@settings(max_examples=10)
@given(cases.cases(longest=40, most=2), cases.any_options)
def test_any_batch(merge: cases.Merge, case: cases.Case, options: cases.Options) -> None:
    cases.check_merge(case, merge, options)


@merges
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_several_tiles(merge: cases.Merge, dtype: torch.dtype, packed: bool) -> None:
    shape = paged.Shape(num_layers=1, num_heads=2, dtype=dtype)
    case = cases.make_case(shape, requests(shape, (200, 90), (150, 10)), protect=3)
    cases.check_merge(case, merge, cases.Options(packed=packed))


@merges
@pytest.mark.parametrize("keep", [0, 40])
def test_nothing_evicted_or_nothing_left_changes_no_bit(merge: cases.Merge, keep: int) -> None:
    case = cases.make_case(SMALL, requests(SMALL, (40, keep)))
    targets, got = cases.run(case, merge, cases.Options(least=-1.0))
    assert (targets == -1).all()
    assert torch.equal(got.paged.memory, case.paged.memory)
    assert torch.equal(got.masses, case.masses)


@merges
@given(st.integers(0, 1000))
@settings(max_examples=4)
def test_the_order_of_tokens_does_not_matter(merge: cases.Merge, seed: int) -> None:
    """Evicted tokens trade places: each survivor gets the same, up to the rounding of another order."""
    length, keep = 60, 20
    case = cases.make_case(SMALL, requests(SMALL, (length, keep)), seed=seed)
    case.masses.fill_(1)
    (cache,), table = case.paged.layers().caches, case.paged.batch.block_tables[0].long()
    kept = case.paged.mask[0, 0] != 0
    gone = (~kept).nonzero().flatten()
    shuffled = gone[torch.from_numpy(np.random.default_rng(seed).permutation(len(gone)))]
    _, first = cases.run(case, merge, cases.Options(own=4.0))
    size = SMALL.block_size
    cache[table[gone // size], 0, gone % size] = cache[table[shuffled // size], 0, shuffled % size]
    _, second = cases.run(case, merge, cases.Options(own=4.0))
    stays = kept.nonzero().flatten()
    rows = [x.paged.layers().caches[0][table[stays // size], 0, stays % size] for x in (first, second)]
    torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-5)
    weights = [x.masses[0, table[stays // size], 0, stays % size] for x in (first, second)]
    assert torch.equal(*weights)


@merges
def test_equal_keys_go_to_the_first_survivor_behind_the_sinks(merge: cases.Merge) -> None:
    case = cases.make_case(SMALL, requests(SMALL, (30, 12)), protect=4)
    (cache,) = case.paged.layers().caches
    cache[..., : SMALL.head_dim] = 1.0
    targets, _ = cases.run(case, merge, cases.Options())
    kept = (case.paged.mask[0, 0] != 0).nonzero().flatten()
    assert set(targets[0, 0][case.paged.mask[0, 0] == 0].tolist()) == {int(kept[kept >= 4][0])}


@merges
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_degenerate_rows_have_no_nan(merge: cases.Merge, dtype: torch.dtype) -> None:
    shape = replace(SMALL, dtype=dtype)
    case = cases.make_case(shape, requests(shape, (40, 9)), kinds=0)
    for cache in case.paged.layers().caches:
        cache[..., shape.head_dim :] = 0.0
    targets, got = cases.run(case, merge, cases.Options(least=-1.0))
    assert (targets >= 0).any()
    assert all(not cache.isnan().any() for cache in got.paged.layers().caches)


@merges
def test_largest_values_and_masses_do_not_overflow(merge: cases.Merge) -> None:
    shape = replace(SMALL, dtype=torch.float16)
    case = cases.make_case(shape, requests(shape, (300, 2)), kinds=1)
    case.masses.fill_(pool.MOST)
    for cache in case.paged.layers().caches:
        cache[..., shape.head_dim :] = 65504.0 / 32
    _, got = cases.run(case, merge, cases.Options(least=-1.0))
    values = torch.stack([cache[..., shape.head_dim :] for cache in got.paged.layers().caches])
    assert (values == 65504.0 / 32).all()
    assert int(got.masses.max()) == pool.MOST


@merges
def test_two_events_are_as_one(merge: cases.Merge) -> None:
    """Of tokens that all go to one survivor, some in a first event, the rest in a second."""
    rng = np.random.default_rng(0)
    cache = torch.from_numpy(rng.normal(size=(4, 1, 8, 64))).float()
    cache[..., :32] = 1.0
    results = []
    for events in ([range(1, 30)], [range(1, 11), range(11, 30)]):
        layers = PagedLayers.of([cache.clone()])
        masses = torch.ones(1, 4, 1, 8, dtype=torch.int32)
        gone: set[int] = set()
        for event in events:
            # Between the events nothing is moved: what is gone already is dropped by the least cosine.
            layers.caches[0].view(32, 64)[list(gone), :32] = torch.tensor([1.0, -1.0]).repeat(16)
            gone |= set(event)
            mask = torch.tensor([[[slot not in gone for slot in range(32)]]]).to(torch.uint8)
            batch = RaggedBatch.of([[0, 1, 2, 3]], [32], [32 - len(gone)])
            merge(layers, batch, mask, masses, own=3.0, least=0.9)
        results.append((layers.caches[0].view(32, 64)[0, 32:], int(masses.view(-1)[0])))
    assert results[0][1] == results[1][1] == 30
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    want = (3 * cache.view(32, 64)[0, 32:] + cache.view(32, 64)[1:30, 32:].sum(0)) / 32
    torch.testing.assert_close(results[0][0], want, rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(cases.cases(longest=50, most=1), cases.any_options)
def test_gathered_rows_give_the_same(case: cases.Case, options: cases.Options) -> None:
    """Of one request whose heads all keep as many."""
    x = case.paged
    if not x.batch.total or int(x.batch.keep.min()) != int(x.batch.keep.max()):
        return
    options = replace(options, packed=False)
    _, got = cases.run(case, pool.merge_ragged_ref, options)
    length, keep, table = x.batch.total, int(x.batch.keep[0, 0, 0]), x.batch.block_tables[0]
    index = (x.mask != 0).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    dense = []
    for this in (case, got):
        layers = this.paged.layers()
        rows = torch.stack([layers.rows(layer, table, length) for layer in range(layers.num_layers)])
        slots = torch.arange(length)
        masses = this.masses[:, table[slots // x.shape.block_size].long(), :, slots % x.shape.block_size]
        dense.append((*rows.split(x.shape.head_dim, -1), masses.permute(1, 2, 0)))
    keys, values, masses = dense[0]
    merged, grown = pool.merge_dense_ref(
        keys,
        values,
        masses,
        index,
        protect=case.protect[0],
        least=options.least,
        own=options.own,
        most=options.most,
    )
    torch.testing.assert_close(merged, compact.pack_ref(dense[1][1], index), equal_nan=True)
    assert torch.equal(grown, dense[1][2].gather(-1, index))


@interpreted
def test_a_request_gets_the_same_bits_in_every_batch() -> None:
    shape = paged.Shape(num_layers=2, num_heads=2, dtype=torch.bfloat16)
    case = cases.make_case(shape, requests(shape, (90, 40), (33, 12), (70, 69)), protect=2)
    _, together = cases.run(case, pool.merge_ragged, cases.Options())
    x = case.paged
    apart = case.copy()
    for request, (first, length) in enumerate(zip(x.batch.offsets.tolist(), x.batch.lengths.tolist(), strict=False)):
        table = [block for block in x.batch.block_tables[request].tolist() if block >= 0]
        alone = RaggedBatch.of([table], [length], [length])
        alone.protect.fill_(2)
        mask = x.mask[..., first : first + length].contiguous()
        pool.merge_ragged(apart.paged.layers(), alone, mask, apart.masses, least=0.3)
    assert torch.equal(apart.paged.memory, together.paged.memory)
    assert torch.equal(apart.masses, together.masses)


STITCH = [
    pytest.param(compact.pack_ragged, id="pack", marks=interpreted),
    pytest.param(compact.pack_ragged_ref, id="pack-ref"),
    pytest.param(compact.fill_ragged, id="fill", marks=interpreted),
    pytest.param(compact.fill_ragged_ref, id="fill-ref"),
]


@pytest.mark.parametrize("stitch", STITCH)
def test_masses_move_with_their_tokens(stitch: paged.Stitch) -> None:
    """Masses that equal the positions still do so afterwards."""
    shape = paged.Shape()
    case = paged.make_case(shape, requests(shape, (30, 12), (20, 20), (17, 3)))
    masses = case.positions.clone()
    stitch(case.layers(), case.batch, case.mask, case.positions, masses=masses)
    assert torch.equal(masses, case.positions)


@pytest.mark.parametrize(
    ("copy", "stamp"),
    [
        pytest.param(blocks.copy_blocks, blocks.stamp_positions, id="kernel", marks=interpreted),
        pytest.param(blocks.copy_blocks_ref, blocks.stamp_positions_ref, id="ref"),
    ],
)
def test_new_slots_have_a_mass_of_one_and_copies_that_of_their_source(copy: object, stamp: object) -> None:
    case = paged.make_case(paged.Shape(), requests(paged.Shape(), (21, 21)))
    masses = torch.full_like(case.positions, 7)
    first = torch.tensor([5], dtype=torch.int32)
    stamp(case.layers(), case.batch, case.positions, first, torch.zeros_like(first), masses=masses)
    table, size = case.batch.block_tables[0].tolist(), case.shape.block_size
    for slot in range(3 * size):
        expected = 1 if 5 <= slot < 21 else 7
        assert (masses[:, table[slot // size], :, slot % size] == expected).all()
    assert int((masses == 1).sum()) == 16 * 4
    unused = next(block for block in range(masses.shape[1]) if block not in table)
    copy(case.layers(), case.positions, torch.tensor([[table[1]], [unused]], dtype=torch.int32), masses=masses)
    assert torch.equal(masses[:, unused], masses[:, table[1]])
    assert (masses[:, unused] == 1).all()


@merges
def test_refusals(merge: cases.Merge) -> None:
    case = cases.make_case(SMALL, requests(SMALL, (20, 9))).paged
    masses = torch.ones_like(case.positions)
    layers, batch, mask = case.layers(), case.batch, case.mask
    fp8 = paged.make_case(replace(SMALL, dtype=torch.float8_e4m3fn), requests(SMALL, (20, 9)))
    with pytest.raises(TypeError, match="float8_e4m3fn cannot be merged"):
        merge(fp8.layers(), fp8.batch, fp8.mask, torch.ones_like(fp8.positions))
    for name, value in (("least", 1.5), ("least", float("nan")), ("own", 0.5), ("most", 0), ("most", 4096)):
        with pytest.raises(ValueError, match=f"{name}=.* must lie within"):
            merge(layers, batch, mask, masses, **{name: value})
    with pytest.raises(TypeError, match=r"masses must be torch\.int32"):
        merge(layers, batch, mask, masses.long())
    with pytest.raises(ValueError, match="masses must be"):
        merge(layers, batch, mask, masses[:, 1:].contiguous())
    with pytest.raises(ValueError, match="dst_tables is block_tables"):
        merge(layers, replace(batch, dst_tables=batch.block_tables), mask, masses, packed=True)
    with pytest.raises(ValueError, match="mask is of 2 layers"):
        merge(layers, replace(batch, keep=batch.keep[:, 0, 0].contiguous()), mask.repeat(2, 1, 1), masses)
