"""Merging, compiled, token by token in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paged_cases as paged
import pool_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import pool

pytestmark = pytest.mark.gpu

# Each is compiled anew, so not every combination; every value of every property occurs.
SHAPES = [
    paged.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    paged.Shape(2, 2, 16, 64, torch.float16, "hnd"),
    paged.Shape(1, 8, 16, 128, torch.bfloat16, "nhd"),
    paged.Shape(2, 3, 32, 80, torch.float16, "nhd"),
    paged.Shape(2, 1, 128, 256, torch.float32, "nhd"),
    paged.Shape(1, 2, 64, 256, torch.bfloat16, "hnd"),
    paged.Shape(2, 2, 8, 96, torch.float32, "odd"),
    paged.Shape(2, 2, 16, 128, torch.float16, "strided"),
    paged.Shape(1, 2, 7, 32, torch.float32, "nhd"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(data=st.data(), options=cases.any_options, seed=st.integers(0, 2**31))
def test_any_batch(shape: paged.Shape, data: st.DataObject, options: cases.Options, seed: int) -> None:
    requests = data.draw(paged.batches(shape, longest=200, most=3))
    kinds, bad, protect = (data.draw(st.sampled_from(x)) for x in ((0, 1, 3, 12), (0.0, 0.1), (0, 4)))
    case = cases.make_case(shape, requests, kinds=kinds, bad=bad, protect=protect, seed=seed, device="cuda")
    cases.check_merge(case, pool.merge_ragged, options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [700, 3000])
def test_long_request(length: int, packed: bool) -> None:
    """Several programs a row."""
    shape = paged.Shape(1, 1, 16, 64)
    requests = [paged.Request(length, np.array([[length // 3]], np.int32))]
    case = cases.make_case(shape, requests, protect=4, device="cuda")
    cases.check_merge(case, pool.merge_ragged, cases.Options(packed=packed))


def test_a_request_gets_the_same_bits_twice_and_beside_others() -> None:
    shape = paged.Shape(2, 2, 16, 128)
    requests = [paged.Request(n, np.full((2, 2), n // 4, np.int32)) for n in (500, 90, 777)]
    case = cases.make_case(shape, requests, device="cuda")
    results = [cases.run(case, pool.merge_ragged, cases.Options())[1] for _ in range(3)]
    assert all(torch.equal(x.paged.memory, results[0].paged.memory) for x in results)
    batch = case.paged.batch
    alone = case.copy()
    for request, first in enumerate(batch.offsets.tolist()[:-1]):
        one = slice(request, request + 1)
        length = int(batch.lengths[request])
        part = replace(
            batch,
            block_tables=batch.block_tables[one],
            dst_tables=batch.dst_tables[one],
            lengths=batch.lengths[one],
            keep=batch.keep[one],
            protect=batch.protect[one],
            offsets=torch.tensor([0, length], device="cuda"),
            max_length=length,
            total=length,
        )
        mask = case.paged.mask[..., first : first + length].contiguous()
        pool.merge_ragged(alone.paged.layers(), part, mask, alone.masses, least=0.3)
    assert torch.equal(alone.paged.memory, results[0].paged.memory)


def test_nothing_waits_for_the_device() -> None:
    shape = paged.Shape()
    case = cases.make_case(shape, [paged.Request(40, np.full((2, 2), 12, np.int32))], device="cuda")
    x = case.paged
    layers = x.layers()
    pool.merge_ragged(layers, x.batch, x.mask, case.masses)  # compiles
    with paged.no_synchronisation():
        pool.merge_ragged(layers, x.batch, x.mask, case.masses)
