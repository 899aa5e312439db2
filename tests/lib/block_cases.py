"""What `copy_blocks` and `stamp_positions` must do, block by block and slot by slot in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paged_cases as cases
import torch

from nitro.kernels.paged import PagedLayers, RaggedBatch

Copy = Callable[[PagedLayers, torch.Tensor, torch.Tensor], None]
Stamp = Callable[[PagedLayers, RaggedBatch, torch.Tensor, torch.Tensor, torch.Tensor], None]


def check_copy(case: cases.Case, copy: Copy, *, number: int, seed: int = 0) -> None:
    """Copy ``number`` blocks, fewer where there are too few; every byte of caches and positions is looked at."""
    device = case.memory.device
    want, got = case.copy("cpu"), case.copy(device)
    num_blocks = case.positions.shape[1]
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(num_blocks)
    targets = shuffled[: min(number, num_blocks // 2)]
    sources = rng.choice(shuffled[len(targets) :], len(targets))  # a block may be copied twice
    pairs = torch.tensor(np.stack([sources, targets]), dtype=torch.int32, device=device)
    copy(got.layers(), got.positions, pairs)
    caches = [cache.view(cases.INTEGERS[cache.itemsize]) for cache in want.layers().caches]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for layer, cache in enumerate(caches):
            cache[target] = cache[source]
            want.positions[layer, target] = want.positions[layer, source]
    assert torch.equal(got.positions.cpu(), want.positions)
    assert torch.equal(got.memory.cpu(), want.memory)


def check_stamp(case: cases.Case, stamp: Stamp, *, seed: int = 0) -> None:
    """Stamp from anywhere between 0 and the length on; caches stay as they are, as do all other positions."""
    device = case.memory.device
    want, got = case.copy("cpu"), case.copy(device)
    rng = np.random.default_rng(seed)
    lengths, tables = case.batch.lengths.tolist(), case.batch.block_tables.tolist()
    first = [int(rng.integers(0, length + 1)) for length in lengths]
    shift = rng.integers(0, 2**20, len(lengths)).tolist()
    numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (first, shift)]
    stamp(got.layers(), got.batch, got.positions, *numbers)
    size = case.shape.block_size
    for table, length, start, moved in zip(tables, lengths, first, shift, strict=True):
        for slot in range(start, length):
            want.positions[:, table[slot // size], :, slot % size] = slot + moved
    assert torch.equal(got.positions.cpu(), want.positions)
    assert torch.equal(got.memory.cpu(), want.memory)
