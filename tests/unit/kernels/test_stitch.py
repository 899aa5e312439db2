"""`pack` and `fill`, as references and as kernels: what they move compares byte for byte, and so does all the rest."""

from __future__ import annotations

import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import compact
from nitro.kernels.paged import PagedLayers, RaggedBatch

from .conftest import interpreted

PACK = [
    pytest.param(compact.pack_ragged, id="kernel", marks=interpreted),
    pytest.param(compact.pack_ragged_ref, id="ref"),
]
FILL = [
    pytest.param(compact.fill_ragged, id="kernel", marks=interpreted),
    pytest.param(compact.fill_ragged_ref, id="ref"),
]

any_case = cases.any_shape.flatmap(lambda shape: st.tuples(st.just(shape), cases.batches(shape, longest=70)))


def full(shape: cases.Shape, keep: int) -> np.ndarray:
    return np.full((shape.num_layers, shape.num_heads), keep, np.int32)


@pytest.mark.parametrize("pack", PACK)
@settings(max_examples=15)
@given(any_case, st.integers(0, 2**31))
def test_pack(pack: cases.Stitch, drawn: tuple[cases.Shape, list[cases.Request]], seed: int) -> None:
    cases.check_stitch(cases.make_case(*drawn, seed=seed), pack, fill=False)


@pytest.mark.parametrize("fill", FILL)
@settings(max_examples=15)
@given(any_case, st.integers(0, 2**31))
def test_fill(fill: cases.Stitch, drawn: tuple[cases.Shape, list[cases.Request]], seed: int) -> None:
    cases.check_stitch(cases.make_case(*drawn, seed=seed), fill, fill=True)


@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@interpreted
def test_every_width(dtype: torch.dtype, head_dim: int) -> None:
    shape = cases.Shape(num_layers=1, num_heads=1, dtype=dtype, head_dim=head_dim)
    case = cases.make_case(shape, [cases.Request(21, full(shape, 12))])
    cases.check_stitch(case, compact.pack_ragged, fill=False)
    cases.check_stitch(case, compact.fill_ragged, fill=True)


@interpreted
@pytest.mark.parametrize("targets", [[[6], [7]], [[6, 8], [7]]])
def test_what_has_no_room_is_not_moved(targets: list[list[int]]) -> None:
    """Counts that only the device knows: a row of dst_tables may be too short, and nothing else may be written to."""
    caches = [torch.arange(10 * 2 * 4 * 8).view(10, 2, 4, 8).float() + layer for layer in range(2)]
    before = [cache.clone() for cache in caches]
    layers = PagedLayers.of(caches)
    positions = torch.arange(4).repeat(2, 10, 2, 1).int()
    batch = RaggedBatch.of([[0, 1], [2, 3]], [8, 8], [4, 4], dst_tables=targets)
    mask = torch.ones(2, 2, 16, dtype=torch.uint8)  # all 8 of both stay; the second has room for 4
    counts = torch.full((2, 2, 2), 8, dtype=torch.int32)
    compact.pack_ragged(layers, batch.with_counts(counts), mask, positions)
    for cache, old in zip(caches, before, strict=True):
        want = old.clone()
        for row, sources in zip(targets, ([0, 1], [2, 3]), strict=True):
            for target, source in zip(row, sources, strict=False):
                want[target] = old[source]
        assert torch.equal(cache, want)


@interpreted
def test_lists_of_several_tiles() -> None:
    shape = cases.Shape(num_layers=1, num_heads=1)
    case = cases.make_case(shape, [cases.Request(5000, full(shape, 3000))])
    cases.check_stitch(case, compact.pack_ragged, fill=False)
    cases.check_stitch(case, compact.fill_ragged, fill=True)


@pytest.mark.parametrize("pack", PACK)
def test_pack_reads_shared_blocks(pack: cases.Stitch) -> None:
    shape = cases.Shape()
    requests = [cases.Request(20, full(shape, 5)), cases.Request(9, full(shape, 9)), cases.Request(11, full(shape, 3))]
    cases.check_stitch(cases.make_case(shape, requests, share=True), pack, fill=False)


@pytest.mark.parametrize("fill", FILL)
def test_fill_leaves_a_shared_block_without_holes_alone(fill: cases.Stitch) -> None:
    shape = cases.Shape()
    requests = [cases.Request(30, full(shape, 12)), cases.Request(19, full(shape, 9)), cases.Request(9, full(shape, 8))]
    cases.check_stitch(cases.make_case(shape, requests, share=True), fill, fill=True)


@interpreted
def test_fill_stays_within_its_row_where_mask_and_keep_disagree() -> None:
    shape = cases.Shape()
    case = cases.make_case(shape, [cases.Request(30, full(shape, 17)), cases.Request(20, full(shape, 20))])
    case.mask[..., 30:] = 0  # 20 holes and no mover
    want, got = case.copy("cpu"), case.copy("cpu")
    compact.fill_ragged_ref(want.layers(), want.batch, want.mask, want.positions)
    compact.fill_ragged(got.layers(), got.batch, got.mask, got.positions)
    assert torch.equal(got.memory, want.memory)
    assert torch.equal(got.positions, want.positions)
