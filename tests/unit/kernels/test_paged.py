"""Descriptors refuse what kernels could not survive, and say why."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import paged_cases as cases
import pytest
import torch

from nitro.kernels import compact
from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.kernels.tables import Tables

from .conftest import interpreted


def caches(*, count: int = 2, dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = (5, 2, 8, 64)) -> list[Any]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def test_layers_describe_the_caches() -> None:
    nhd = [torch.arange(5 * 8 * 2 * 64, dtype=torch.float32).view(5, 8, 2, 64).transpose(1, 2) for _ in range(3)]
    layers = PagedLayers.of(nhd)
    assert (layers.num_layers, layers.num_blocks, layers.num_kv_heads, layers.block_size) == (3, 5, 2, 8)
    assert (layers.head_dim, layers.dtype, layers.device) == (32, torch.float32, torch.device("cpu"))
    assert layers.base.tolist() == [cache.data_ptr() for cache in nhd]
    assert layers.strides == (1024, 64, 128, 1)
    table = torch.tensor([3, 0, 4], dtype=torch.int32)
    rows = layers.rows(1, table, 19)
    assert torch.equal(rows, torch.cat([nhd[1][3], nhd[1][0], nhd[1][4, :, :3]], dim=1))


@pytest.mark.parametrize(
    ("cache", "aligned"),
    [
        (torch.zeros(5, 2, 8, 64, dtype=torch.float16), True),
        (torch.zeros(5, 2, 8, 8, dtype=torch.float16), True),
        (torch.zeros(5, 2, 8, 4, dtype=torch.float16), False),
        (torch.zeros(5, 2, 8, 65, dtype=torch.float16)[..., :64], False),
        (torch.zeros(5, 2, 8, 72, dtype=torch.float16)[..., :64], True),
        (torch.zeros(5, 2, 8, 72, dtype=torch.float16)[..., 4:68], False),
        (torch.zeros(5, 2, 8, 128, dtype=torch.float16)[..., ::2], False),
    ],
)
def test_alignment(cache: torch.Tensor, aligned: bool) -> None:
    if cache.storage_offset() == 0:
        assert cache.data_ptr() % 16 == 0
    assert PagedLayers.of([cache]).aligned == aligned


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([], ValueError, "caches is empty"),
        (torch.zeros(5, 2, 8, 64), TypeError, "caches is one tensor: pass a list"),
        (caches(shape=(5, 2, 64)), ValueError, r"must be \[num_blocks.*got \[5, 2, 64\]"),
        (caches(shape=(5, 2, 8, 63)), ValueError, r"got \[5, 2, 8, 63\]"),
        (caches(shape=(0, 2, 8, 64)), ValueError, "not empty"),
        (caches(dtype=torch.float64), TypeError, "1, 2 or 4 bytes, got torch.float64"),
        (caches() + caches(dtype=torch.bfloat16), ValueError, "layer 2 has .*bfloat16.* where layer 0 has .*float16"),
        ([*caches(), torch.zeros(5, 8, 2, 64).half().transpose(1, 2)], ValueError, "layer 2 has"),
    ],
)
def test_layers_are_checked(given: list[torch.Tensor], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        PagedLayers.of(given)


def test_batch_from_the_host() -> None:
    batch = RaggedBatch.of([[4, 1], [2]], [20, 3], [12, 3], protect=[2, 0], window=5, dst_tables=[[7], []])
    assert batch.block_tables.tolist() == [[4, 1], [2, -1]]
    assert batch.dst_tables.tolist() == [[7], [-1]]
    assert batch.offsets.tolist() == [0, 20, 23]
    assert (batch.max_length, batch.total, batch.num_requests, batch.keep_strides) == (20, 23, 2, (1, 0, 0))
    wide = RaggedBatch.of([[4]], [9], np.full((1, 3, 2), 4))
    assert wide.dst_tables.data_ptr() == wide.block_tables.data_ptr()
    assert wide.keep_strides == (6, 2, 1)
    empty = RaggedBatch.of([], [], [])
    assert (empty.num_requests, empty.max_length, empty.total) == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([[1]], [4, 4], [2, 2]), "lengths is of 2 requests, but block_tables of 1, keep of 2 and protect of 2"),
        (([[1]], [4], [5]), r"request 0 keeps 5 slots, which must lie within 3 .* and its length, 4"),
        (([[1]], [4], [2]), r"request 0 keeps 2 slots, which must lie within 3 \(protect=1 \+ window=2"),
        (([[1], [2]], [4, 5], [[[3, 3]], [[4, 2]]]), "request 1 keeps 2 slots"),
        (([[1]], [-1], [0]), "lengths of request 0 is -1, must not be negative"),
    ],
)
def test_batch_is_checked_on_the_host(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RaggedBatch.of(*arguments, protect=1, window=2)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"lengths": torch.zeros(1, dtype=torch.int64)}, TypeError, "lengths must be torch.int32, got torch.int64"),
        ({"offsets": torch.zeros(2, dtype=torch.int32)}, TypeError, "offsets must be torch.int64, got torch.int32"),
        ({"offsets": torch.zeros(1, dtype=torch.int64)}, ValueError, r"offsets must be \[2\] .* got \[1\]"),
        ({"keep": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, r"keep must be \[1\] .* got \[1, 2\]"),
        ({"keep": torch.zeros(2, 2, 2, dtype=torch.int32)}, ValueError, r"keep must be \[1, -1, -1\]"),
        ({"protect": torch.zeros(1, dtype=torch.int32, device="meta")}, ValueError, "protect is on meta, lengths on"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]}, ValueError, "make it contiguous"),
        ({"total": -1}, ValueError, "total=-1 must not be negative"),
    ],
)
def test_batch_is_checked_on_the_device(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        dataclasses.replace(RaggedBatch.of([[1, 2]], [9], [4]), **change)


@interpreted
@pytest.mark.parametrize(
    "stitch", [compact.pack_ragged, compact.pack_ragged_ref, compact.fill_ragged, compact.fill_ragged_ref]
)
def test_stitching_is_checked(stitch: cases.Stitch) -> None:
    layers = PagedLayers.of(caches())
    batch = RaggedBatch.of([[1, 2]], [9], [4], dst_tables=[[3]])
    mask, positions = torch.zeros(2, 2, 9, dtype=torch.uint8), torch.zeros(2, 5, 2, 8, dtype=torch.int32)
    for change, error, said in (
        ((batch, mask.bool(), positions), TypeError, "mask must be torch.uint8, got torch.bool"),
        (
            (batch, mask[:1], positions),
            ValueError,
            "mask is of 1 layers and 2 KV heads, must be of the caches' 2 and 2",
        ),
        ((batch, mask, positions.long()), TypeError, "positions must be torch.int32"),
        ((batch, mask, positions[:, :4]), ValueError, r"positions must be \[2, 5, 2, 8\].* got \[2, 4, 2, 8\]"),
        ((batch, mask, positions.mT.contiguous().mT), ValueError, "positions has strides .* make it contiguous"),
        ((RaggedBatch.of([[1]], [9], [4], dst_tables=[[3]]), mask, positions), ValueError, "room for 8 slots, below"),
    ):
        with pytest.raises(error, match=said):
            stitch(layers, *change)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([[1]], [3.5], [3]), TypeError, r"lengths must be integers, got float64 \(3.5"),
        (([[1]], [4], [3.0]), TypeError, "keep must be integers, got float64"),
        (([[1.5]], [4], [3]), TypeError, "block ids must be integers, got float64"),
        (([[1]], [4], np.array([3 + 2**32])), ValueError, "keep holds 4294967299 to 4294967299, must lie within"),
        (([[2**31]], [4], [3]), ValueError, "block ids holds 2147483648"),
    ],
)
def test_numbers_are_never_rounded_or_wrapped(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        RaggedBatch.of(*arguments)


@interpreted
def test_blocks_that_the_caches_have_not_are_refused() -> None:
    layers = PagedLayers.of(caches())
    mask, positions = torch.zeros(2, 2, 9, dtype=torch.uint8), torch.zeros(2, 5, 2, 8, dtype=torch.int32)
    for tables, targets in (([[1, 5]], [[3]]), ([[1, 2]], [[5]])):
        batch = RaggedBatch.of(tables, [9], [4], dst_tables=targets)
        for stitch in (compact.pack_ragged, compact.pack_ragged_ref, compact.fill_ragged, compact.fill_ragged_ref):
            with pytest.raises(ValueError, match="name block 5, and the caches have 5 blocks, 0 to 4"):
                stitch(layers, batch, mask, positions)
    with pytest.raises(TypeError, match=r"positions must be a tensor of torch.int32 on cpu, got None"):
        compact.fill_ragged(layers, RaggedBatch.of([[1, 2]], [9], [4]), mask, None)  # type: ignore[arg-type]


@interpreted
def test_scratch_and_destination_are_checked() -> None:
    layers, batch = PagedLayers.of(caches()), RaggedBatch.of([[1, 2]], [9], [4])
    mask, positions = torch.zeros(2, 2, 9, dtype=torch.uint8), torch.zeros(2, 5, 2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="dst_tables is block_tables, but packing in place overwrites survivors"):
        compact.pack_ragged(layers, batch, mask, positions)
    with pytest.raises(TypeError, match=r"scratch must be torch.int32, got torch.float32"):
        compact.fill_ragged(layers, batch, mask, positions, scratch=torch.zeros(2, 2, 9))
    with pytest.raises(ValueError, match=r"scratch must be \[2, 2, 9\]"):
        compact.fill_ragged(layers, batch, mask, positions, scratch=torch.zeros(2, 2, 8, dtype=torch.int32))


def test_without_the_interpreter_a_cpu_is_refused() -> None:
    code = (
        "import torch; from nitro.kernels.paged import RaggedBatch; from nitro.kernels.select import select_ragged\n"
        "try: select_ragged(torch.zeros(1, 1, 4), RaggedBatch.of([[]], [4], [2]))\n"
        "except ValueError as error: print(error)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "set it before the process imports triton, or call select_ragged_ref" in done.stdout


def test_tables_may_come_one_after_the_other() -> None:
    lists = [[7, 2, 3], [], [4]]
    lengths, keep = [20, 0, 5], [9, 0, 5]
    tables = Tables(np.array([7, 2, 3, 4], np.int32), np.array([3, 0, 1], np.int32))
    given, same = (RaggedBatch.of(each, lengths, keep, dst_tables=each) for each in (tables, lists))
    for name in ("block_tables", "dst_tables", "lengths", "keep"):
        assert torch.equal(getattr(given, name), getattr(same, name))
    assert given.block_tables.tolist() == [[7, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert (given.min_block_size, given.min_dst_block_size) == (same.min_block_size, same.min_dst_block_size) == (7, 5)
    with pytest.raises(ValueError, match="block_tables has 3 blocks, but counts add up to 4"):
        RaggedBatch.of(tables._replace(blocks=tables.blocks[:3]), lengths, keep)
    with pytest.raises(ValueError, match="block_tables of request 2 holds block -4"):
        RaggedBatch.of([[7, 2, 3], [], [-4]], lengths, keep)
