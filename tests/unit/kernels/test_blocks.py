"""Copies of whole blocks, and positions of new slots, as references and as kernels."""

from __future__ import annotations

import block_cases
import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import blocks

from .conftest import interpreted

COPY = [
    pytest.param(blocks.copy_blocks, id="kernel", marks=interpreted),
    pytest.param(blocks.copy_blocks_ref, id="ref"),
]
STAMP = [
    pytest.param(blocks.stamp_positions, id="kernel", marks=interpreted),
    pytest.param(blocks.stamp_positions_ref, id="ref"),
]
any_case = cases.any_shape.flatmap(lambda shape: st.tuples(st.just(shape), cases.batches(shape, longest=70)))


def request(length: int, shape: cases.Shape) -> cases.Request:
    return cases.Request(length, np.full((shape.num_layers, shape.num_heads), length, np.int32))


@pytest.mark.parametrize("copy", COPY)
@settings(max_examples=20)
@given(cases.any_shape, st.integers(0, 4), st.integers(0, 2**31))
def test_copy(copy: block_cases.Copy, shape: cases.Shape, number: int, seed: int) -> None:
    block_cases.check_copy(cases.make_case(shape, [request(20, shape)], seed=seed), copy, number=number, seed=seed)


@pytest.mark.parametrize("stamp", STAMP)
@settings(max_examples=20)
@given(any_case, st.integers(0, 2**31))
def test_stamp(stamp: block_cases.Stamp, drawn: tuple[cases.Shape, list[cases.Request]], seed: int) -> None:
    block_cases.check_stamp(cases.make_case(*drawn, seed=seed), stamp, seed=seed)


@interpreted
def test_stamp_over_several_tiles() -> None:
    shape = cases.Shape(1, 1)
    block_cases.check_stamp(cases.make_case(shape, [request(1500, shape), request(3, shape)]), blocks.stamp_positions)


@pytest.mark.parametrize("copy", COPY)
@pytest.mark.parametrize(
    ("pairs", "error", "said"),
    [
        (torch.zeros(2, 1, dtype=torch.int64), TypeError, "pairs must be torch.int32"),
        (torch.zeros(3, 1, dtype=torch.int32), ValueError, r"pairs must be \[2, -1\]"),
        (torch.zeros(4, 2, dtype=torch.int32)[::2], ValueError, "make it contiguous"),
    ],
)
def test_copy_refuses(copy: block_cases.Copy, pairs: torch.Tensor, error: type[Exception], said: str) -> None:
    case = cases.make_case(cases.Shape(), [])
    with pytest.raises(error, match=said):
        copy(case.layers(), case.positions, pairs)


@pytest.mark.parametrize("stamp", STAMP)
def test_stamp_refuses(stamp: block_cases.Stamp) -> None:
    shape = cases.Shape()
    case = cases.make_case(shape, [request(9, shape)])
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"first must be \[1\]"):
        stamp(case.layers(), case.batch, case.positions, two, one)
    with pytest.raises(TypeError, match=r"shift must be torch\.int32"):
        stamp(case.layers(), case.batch, case.positions, one, one.long())
    with pytest.raises(ValueError, match="positions"):
        stamp(case.layers(), case.batch, case.positions[:1], one, one)
