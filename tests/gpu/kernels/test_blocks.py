"""Copies of blocks and positions, compiled, against plain Python, byte for byte."""

from __future__ import annotations

import block_cases
import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import blocks

pytestmark = pytest.mark.gpu

SHAPES = [
    cases.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    cases.Shape(1, 8, 16, 128, torch.float16, "hnd"),
    cases.Shape(2, 1, 128, 256, torch.float32, "nhd"),
    cases.Shape(2, 3, 32, 80, torch.bfloat16, "odd"),
    cases.Shape(2, 2, 7, 33, torch.float8_e4m3fn, "strided"),
]
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@any_shape
@settings(max_examples=20)
@given(number=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_copy(shape: cases.Shape, number: int, seed: int) -> None:
    request = cases.Request(700, np.full((shape.num_layers, shape.num_heads), 500, np.int32))
    case = cases.make_case(shape, [request], seed=seed, device="cuda")
    block_cases.check_copy(case, blocks.copy_blocks, number=number, seed=seed)


@any_shape
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_stamp(shape: cases.Shape, data: st.DataObject, seed: int) -> None:
    requests = data.draw(cases.batches(shape, longest=900, most=6))
    case = cases.make_case(shape, requests, seed=seed, device="cuda")
    block_cases.check_stamp(case, blocks.stamp_positions, seed=seed)
