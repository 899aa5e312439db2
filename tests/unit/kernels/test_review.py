"""What a caller who keeps to the contracts of selection and compaction must not fall into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sparse_memory import sparse

from nitro.kernels.compact import fill_ragged, fill_ragged_ref, pack_ragged
from nitro.kernels.newest import force_newest, force_newest_ref
from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.kernels.select import select_ragged, select_ragged_ref, threshold_ragged, threshold_ragged_ref

from .conftest import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("dimension", ["layer", "head"])
def test_theta_with_wide_strides(dimension: str) -> None:
    """An index times a stride may not fit 32 bits: one column of a ragged array has H * total from layer to layer."""
    stride = 2**30 + 64  # fits 32 bits, as 2 does, but not their product
    # Where the product wraps around to is memory, too: what is read there is 0 and not a fault of the processor.
    memory = sparse((2**32 + 256,), torch.float32)
    shape, strides = ((1, 3, 1), (0, stride, 0)) if dimension == "layer" else ((1, 1, 3), (0, 0, stride))
    theta = memory.as_strided(shape, strides, storage_offset=2**31)
    theta[:] = 5.0
    batch = RaggedBatch.of([[]], [8], [0])
    scores = torch.arange(8.0).expand(*shape[1:], 8).contiguous()
    mask, counts = threshold_ragged(scores, batch, theta)
    want_mask, want_counts = threshold_ragged_ref(scores, batch, theta)
    assert torch.equal(counts, want_counts)
    assert torch.equal(mask, want_mask)


def test_theta_of_a_wrong_shape() -> None:
    batch = RaggedBatch.of([[], []], [8, 8], [0, 0])
    with pytest.raises(ValueError, match="theta"):
        threshold_ragged(torch.zeros(1, 2, 16), batch, torch.zeros(3, 1, 1))


def guarded_layers(block_size: int, num_blocks: int = 6) -> tuple[PagedLayers, torch.Tensor]:
    """One layer's cache, and the memory that it lies in: a block before the first belongs to somebody else."""
    memory = torch.arange((num_blocks + 1) * block_size * 4).to(torch.int16).view(num_blocks + 1, 1, block_size, 4)
    return PagedLayers.of([memory[1:]]), memory


def positions_of(layers: PagedLayers) -> torch.Tensor:
    # A block more before the first here, too.
    shape = (layers.num_layers, layers.num_blocks + 1, layers.num_kv_heads, layers.block_size)
    return torch.zeros(shape, dtype=torch.int32)[:, 1:].contiguous()


def test_a_block_table_that_is_too_short() -> None:
    """A short row is padded with block -1, which lies before the cache; the padded width says nothing of it."""
    layers, memory = guarded_layers(block_size=4)
    before = memory.clone()
    mask = torch.ones(1, 1, 16, dtype=torch.uint8)
    mask[..., [1, 2, 8, 9]] = 0

    def evict() -> None:
        batch = RaggedBatch.of([[3], [0, 1]], [8, 8], [6, 6])  # 8 slots need two blocks
        fill_ragged(layers, batch, mask, positions_of(layers))

    with pytest.raises(ValueError, match="table"):
        evict()
    assert torch.equal(memory, before)


def test_destination_tables_that_are_too_short() -> None:
    """Beyond a row begin the next request's blocks."""
    layers, memory = guarded_layers(block_size=4)
    before = memory.clone()

    def evict() -> None:
        # 6 slots stay, which need two blocks: the second request's only block takes the first one's overflow.
        batch = RaggedBatch.of([[0, 1], [2, 3]], [8, 8], [6, 4], dst_tables=[[4], [5]])
        mask, _ = select_ragged_ref(torch.arange(16.0).view(1, 1, 16), batch)
        pack_ragged(layers, batch, mask, positions_of(layers))

    with pytest.raises(ValueError, match="dst_tables"):
        evict()
    assert torch.equal(memory, before)


def test_pack_of_requests_without_slots() -> None:
    """Tables without columns have no address: equal addresses are no packing in place then."""
    layers, memory = guarded_layers(block_size=4)
    before = memory.clone()
    batch = RaggedBatch.of([[], []], [0, 0], [0, 0], dst_tables=[[], []])
    pack_ragged(layers, batch, torch.zeros(1, 1, 0, dtype=torch.uint8), positions_of(layers))
    assert torch.equal(memory, before)


def test_protect_that_wraps_around() -> None:
    """The sum of protect and window may not fit 32 bits."""
    with pytest.raises(ValueError, match="keeps 2 slots"):
        RaggedBatch.of([[0]], [8], [2], protect=2**31 - 1, window=1)


@pytest.mark.parametrize("force", [force_newest, force_newest_ref])
def test_the_newest_tokens_stay_after_fill(force: Callable[..., None]) -> None:
    """The window is of slots, and fill takes the newest tokens out of the last slots: they are found by position.

    Fewer tokens are appended here until the next eviction than the window has, and the oldest score highest.
    """
    budget, slack, window, block_size = 12, 4, 8, 4
    memory = torch.zeros(1, 4, 1, block_size, 4, dtype=torch.int16)
    layers = PagedLayers.of(list(memory))
    positions = torch.arange(16, dtype=torch.int32).view(1, 4, 1, block_size).clone()
    length = budget + slack
    for event in range(3):
        newest = budget + slack * (event + 1)  # tokens so far
        batch = RaggedBatch.of([[0, 1, 2, 3]], [length], [budget], window=window)
        scores = -positions.view(1, 1, length).float()
        scores[..., 3], scores[..., 5] = torch.inf, torch.nan
        force(layers, batch, scores, torch.tensor([newest], dtype=torch.int32), positions)
        mask, _ = select_ragged(scores, replace(batch, window=0))
        fill_ragged(layers, batch, mask, positions)
        kept = set(positions.flatten()[:budget].tolist())
        assert kept >= set(range(newest - window, newest)), f"eviction {event + 1}: of the window stay only {kept}"
        positions.view(-1)[budget:] = torch.arange(newest, newest + slack, dtype=torch.int32)


def test_a_negative_block() -> None:
    with pytest.raises(ValueError, match="request 1 holds block -1"):
        RaggedBatch.of([[0], [3, -1]], [4, 8], [2, 2])


def test_fill_as_the_reference_does_it() -> None:
    """So that the tables' tests above fail for what they say."""
    results = []
    for fill in (fill_ragged, fill_ragged_ref):
        layers, memory = guarded_layers(block_size=4)
        positions = positions_of(layers)
        batch = RaggedBatch.of([[3, 5], [0, 1]], [8, 8], [6, 6])
        mask = torch.ones(1, 1, 16, dtype=torch.uint8)
        mask[..., [4, 5, 8, 9]] = 0
        fill(layers, batch, mask, positions)
        results.append((memory, positions))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][0], guarded_layers(block_size=4)[1])
