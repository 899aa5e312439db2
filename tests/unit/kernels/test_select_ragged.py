"""Selection for ragged batches against the reference of one row, which test_select.py checks against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import select_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import select
from nitro.kernels.paged import RaggedBatch

from .conftest import interpreted

floats = st.one_of(st.sampled_from(cases.INTERESTING), st.floats(width=32))


@interpreted
@settings(max_examples=20)
@given(cases.cases(longest=90))
def test_select(case: cases.Case) -> None:
    cases.check_select(case, select.select_ragged)


@interpreted
@settings(max_examples=8)
@given(cases.cases(longest=70, most=1))
def test_select_over_several_tiles(case: cases.Case) -> None:
    cases.check_select(case, select.select_ragged, tile=32)


@interpreted
@settings(max_examples=20)
@given(st.data())
def test_threshold(data: st.DataObject) -> None:
    case = data.draw(cases.cases(longest=90))
    shape = case.batch.num_requests, *case.scores.shape[:2]
    shape = data.draw(st.sampled_from([(), shape[-1:], shape[-2:], shape]))
    theta = data.draw(st.lists(floats, min_size=math.prod(shape), max_size=math.prod(shape)))
    tensor = torch.tensor(theta, dtype=torch.float32).reshape(shape)
    cases.check_threshold(case, tensor, select.threshold_ragged, tile=data.draw(st.sampled_from([None, 16])))


@given(st.lists(floats, max_size=20), floats, st.integers(0, 4), st.integers(0, 4))
def test_threshold_reference_compares_floats(scores: list[float], theta: float, protect: int, window: int) -> None:
    batch = RaggedBatch.of([[]], [len(scores)], [len(scores)], protect=protect, window=window)
    x = torch.tensor(scores, dtype=torch.float32).reshape(1, 1, -1)
    mask, counts = select.threshold_ragged_ref(x, batch, torch.tensor(theta))
    forced = [slot < protect or slot >= len(scores) - window for slot in range(len(scores))]
    want = [score >= np.float32(theta) or must for score, must in zip(x.flatten().numpy(), forced, strict=True)]
    assert mask.flatten().tolist() == want
    assert counts.tolist() == [[[sum(want)]]]


@pytest.mark.parametrize("flavour", cases.FLAVOURS)
@interpreted
def test_every_flavour_all_and_one(flavour: str) -> None:
    case = cases.make_case([33, 1, 64], [[[0]], [[1]], [[63]]], flavour=flavour)
    cases.check_select(case, select.select_ragged)


@interpreted
@pytest.mark.parametrize("flavour", ["normal", "ties"])
def test_more_slots_than_a_program_holds(flavour: str) -> None:
    case = cases.make_case([9000], [4000], flavour=flavour, protect=4, window=32)
    cases.check_select(case, select.select_ragged)


@interpreted
@pytest.mark.parametrize("keep", [50, 350])
def test_ties_at_every_digit_over_several_tiles(keep: int) -> None:
    """Two neighbouring floats, 200 of each; between them, they end in each digit of the last round."""
    bits = torch.arange(400, dtype=torch.int32) % 2 + 0x3F800000
    for offset in range(4):
        scores = (bits + offset).view(torch.float32).reshape(1, 1, 400)
        case = cases.Case(scores, cases.make_case([400], [keep]).batch)
        cases.check_select(case, select.select_ragged, tile=256)


@interpreted
@pytest.mark.parametrize("theta", cases.INTERESTING)
def test_interesting_thresholds(theta: float) -> None:
    case = cases.make_case([60], [60], flavour="patterns", protect=1, window=2)
    cases.check_threshold(case, torch.tensor(theta), select.threshold_ragged)


@interpreted
def test_strided_scores() -> None:
    case = cases.make_case([20, 9], [7, 9], layers=2, heads=3)
    scores = torch.full((3, 2, 40), math.nan)
    scores[:, :, 5:34] = case.scores.transpose(0, 1)
    cases.check_select(cases.Case(scores.transpose(0, 1)[..., 5:34], case.batch), select.select_ragged)


@interpreted
def test_counts_hold_even_where_the_batch_breaks_its_contract() -> None:
    good = RaggedBatch.of([[]] * 3, [8, 8, 8], [8, 8, 8], protect=5, window=2)
    keep = torch.tensor([-1, 9, 6], dtype=torch.int32)
    bad = RaggedBatch(
        good.block_tables, good.lengths, keep, good.protect, good.offsets, 2, 8, good.total, good.dst_tables
    )
    mask, counts = select.select_ragged(torch.randn(1, 1, 24), bad)
    assert counts.flatten().tolist() == [0, 8, 6]
    assert mask.reshape(3, 8).sum(1).tolist() == [0, 8, 6]
    assert mask.reshape(3, 8)[2].tolist() == [1, 1, 1, 1, 1, 0, 1, 0]


@interpreted
@pytest.mark.parametrize("call", [select.select_ragged, select.select_ragged_ref])
def test_arguments_are_checked(call: cases.Select) -> None:
    batch = RaggedBatch.of([[]], [4], np.full((1, 2, 2), 2))
    with pytest.raises(TypeError, match=r"scores must be torch.float32, got torch.float16"):
        call(torch.zeros(2, 2, 4, dtype=torch.float16), batch)
    with pytest.raises(ValueError, match=r"scores must be \[-1, -1, 4\] \(-1: any size\), got \[2, 2, 5\]: pass"):
        call(torch.zeros(2, 2, 5), batch)
    with pytest.raises(ValueError, match=r"scores has stride 2 from slot to slot, must have 1"):
        call(torch.zeros(2, 2, 8)[..., ::2], batch)
    with pytest.raises(ValueError, match=r"keep is \[1, 2, 2\], which does not fit 3 layers and 2 KV heads"):
        call(torch.zeros(3, 2, 4), batch)


@interpreted
def test_threshold_and_tile_are_checked() -> None:
    batch, scores = RaggedBatch.of([[]], [4], [2]), torch.zeros(2, 2, 4)
    with pytest.raises(TypeError, match=r"theta must be float32, got torch.float64"):
        select.threshold_ragged(scores, batch, torch.zeros((), dtype=torch.float64))
    with pytest.raises(ValueError, match=r"tile=48 must be a power of two"):
        select.select_ragged(scores, batch, tile=48)
