"""`pack` and `fill` compiled, against plain Python, byte for byte."""

from __future__ import annotations

import numpy as np
import paged_cases as cases
import pytest
import torch
import wide_checks
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import compact
from nitro.kernels.paged import RaggedBatch

pytestmark = pytest.mark.gpu

PAIRS = {
    "pack": (compact.pack_ragged, compact.pack_ragged_ref),
    "fill": (compact.fill_ragged, compact.fill_ragged_ref),
}
kinds = pytest.mark.parametrize("kind", PAIRS)

# Each is compiled anew, so not every combination; every value of every property occurs.
SHAPES = [
    cases.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    cases.Shape(2, 2, 16, 64, torch.float16, "hnd"),
    cases.Shape(1, 8, 16, 128, torch.bfloat16, "nhd"),
    cases.Shape(2, 3, 32, 80, torch.float16, "nhd"),
    cases.Shape(2, 2, 64, 96, torch.bfloat16, "hnd"),
    cases.Shape(2, 1, 128, 256, torch.float32, "nhd"),
    cases.Shape(2, 2, 8, 32, torch.float8_e4m3fn, "hnd"),
    cases.Shape(2, 2, 16, 64, torch.bfloat16, "odd"),
    cases.Shape(2, 2, 8, 80, torch.float32, "odd"),
    cases.Shape(2, 2, 16, 128, torch.float16, "strided"),
    cases.Shape(1, 2, 7, 33, torch.bfloat16, "nhd"),
]


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_batch(kind: str, shape: cases.Shape, data: st.DataObject, seed: int) -> None:
    requests = data.draw(cases.batches(shape, longest=300, most=6))
    case = cases.make_case(shape, requests, seed=seed, device="cuda")
    cases.check_stitch(case, PAIRS[kind][0], fill=kind == "fill")


@kinds
@pytest.mark.parametrize("share", [False, True])
def test_many_requests(kind: str, share: bool) -> None:
    shape, rng = cases.Shape(3, 2, 16, 64), np.random.default_rng(0)
    lengths = rng.integers(50, 700, 40).tolist()
    requests = [cases.Request(n, rng.integers(16, n, (3, 2)).astype(np.int32)) for n in lengths]
    case = cases.make_case(shape, requests, share=share, device="cuda")
    cases.check_stitch(case, PAIRS[kind][0], fill=kind == "fill")


@kinds
@pytest.mark.parametrize("length", [5000, 70_000])
def test_long_request(kind: str, length: int) -> None:
    """Several tiles of lists, and several programs a row."""
    shape = cases.Shape(1, 2, 16, 64)
    requests = [cases.Request(length, np.array([[length // 3, length - 100]], np.int32))]
    case = cases.make_case(shape, requests, device="cuda")
    cases.check_stitch(case, PAIRS[kind][0], fill=kind == "fill")


@kinds
def test_nothing_waits_for_the_device(kind: str) -> None:
    shape = cases.Shape()
    case = cases.make_case(shape, [cases.Request(20, np.full((2, 2), 12, np.int32))], device="cuda")
    layers, stitch = case.layers(), PAIRS[kind][0]
    stitch(layers, case.batch, case.mask, case.positions)  # compiles
    with cases.no_synchronisation():
        stitch(layers, case.batch, case.mask, case.positions)


@kinds
@pytest.mark.parametrize("wide", wide_checks.WIDE_STRIDES)
def test_wide_caches(kind: str, wide: str) -> None:
    wide_checks.check_wide_caches(*PAIRS[kind], wide, "cuda")


@kinds
def test_wide_positions(kind: str) -> None:
    wide_checks.check_wide_positions(*PAIRS[kind], "cuda")


@kinds
@pytest.mark.parametrize("shape", wide_checks.WIDE_LEADS)
def test_wide_masks(kind: str, shape: tuple[int, int, int]) -> None:
    wide_checks.check_wide_masks(*PAIRS[kind], shape, "cuda")


def test_a_batch_from_the_host_does_not_wait_either() -> None:
    arguments = ([[3, 1], [2]], [20, 9], [12, 9])
    RaggedBatch.of(*arguments, device="cuda")
    with cases.no_synchronisation():
        batch = RaggedBatch.of(*arguments, dst_tables=[[4], [5, 6]], device="cuda")
    for name in ("block_tables", "lengths", "keep", "protect", "offsets", "dst_tables"):
        assert getattr(batch, name).data_ptr() % 16 == 0  # or Triton compiles its kernels once more
    assert batch.dst_tables.tolist() == [[4, -1], [5, 6]]
    assert batch.offsets.tolist() == [0, 20, 29]
