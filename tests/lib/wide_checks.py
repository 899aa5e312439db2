"""Offsets beyond 2**31 elements, one kind of array at a time: 32-bit arithmetic would wrap around."""

from __future__ import annotations

import numpy as np
import torch
from paged_cases import Stitch
from sparse_memory import sparse

from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.kernels.select import select_ragged, select_ragged_ref, threshold_ragged, threshold_ragged_ref

BEYOND = 2**31
# A step of less than 2**31, and an index of more than one: only their product does not fit 32 bits.
WIDE_STRIDES = {  # of [3 blocks, 3 heads, 8 slots, 64]
    "block": (2**30 + 64, 2048, 64, 1),
    "head": (2048, 2**30 + 64, 64, 1),
    "slot": (64, 256, 2**29 + 1024, 1),
    "dim": (8, 32, 1, 2**26 + 128),
}


def _bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.int16).cpu()


def check_wide_caches(stitch: Stitch, reference: Stitch, wide: str, device: str = "cpu") -> None:
    """One dimension of the cache reaches beyond 2**31 elements."""
    shape, strides = (3, 3, 8, 64), WIDE_STRIDES[wide]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert reach > BEYOND
    cache = sparse((reach,), torch.bfloat16, device).as_strided(shape, strides)
    content = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(cache)
    mask = torch.tensor([0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.uint8, device=device).expand(1, 3, 12)
    batch = RaggedBatch.of([[2, 0]], [12], [7], dst_tables=[[1]], device=device)  # fill writes to block 2
    results = []
    for run in (stitch, reference):
        cache.copy_(content)
        positions = torch.arange(3 * 3 * 8, dtype=torch.int32, device=device).view(1, 3, 3, 8).clone()
        run(PagedLayers.of([cache]), batch, mask, positions)
        results.append((_bits(cache), positions.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], _bits(content))


def check_wide_positions(stitch: Stitch, reference: Stitch, device: str = "cpu") -> None:
    """More than 2**31 slots: block after block overlaps in the cache, but those in use do not."""
    size, width, num_blocks = 128, 64, 2**22 + 8
    memory = sparse(((num_blocks + 2 * size) * width,), torch.bfloat16, device)
    caches = [memory.as_strided((num_blocks, 2, size, width), (width, size * width, width, 1)) for _ in range(3)]
    positions = sparse((3, num_blocks, 2, size), torch.int32, device)
    assert positions.numel() > BEYOND
    used = [2**22, 2**21, 2**20]
    batch = RaggedBatch.of([used[:2]], [140], [90], dst_tables=[used[2:]], device=device)
    mask = torch.zeros(3, 2, 140, dtype=torch.uint8, device=device)
    mask[..., 50:] = 1
    results = []
    for run in (stitch, reference):
        for number, block in enumerate(used):
            memory[block * width : (block + 2 * size) * width] = number + 1
            positions[:, block] = torch.arange(6 * size, dtype=torch.int32, device=device).view(3, 2, size) + number
        run(PagedLayers.of(caches), batch, mask, positions)
        results.append((positions[:, used].cpu(), _bits(caches[0][used])))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def wide_batch(columns: int, device: str = "cpu") -> RaggedBatch:
    """One request of 40 slots whose columns are the last, as if others came before it."""
    small = RaggedBatch.of([[0]], [40], [13], protect=2, window=3, dst_tables=[[1]], device=device)
    return RaggedBatch(
        block_tables=small.block_tables,
        lengths=small.lengths,
        keep=small.keep,
        protect=small.protect,
        offsets=torch.tensor([columns - 40, columns], device=device),
        window=small.window,
        max_length=40,
        total=columns,
        dst_tables=small.dst_tables,
    )


WIDE_LEADS = ((1, 4, 2**30 + 40), (4, 1, 2**30 + 40), (1, 2, 2**31 + 40))  # of ragged arrays


def check_wide_selection(shape: tuple[int, int, int], device: str = "cpu") -> None:
    batch = wide_batch(shape[2], device)
    scores = sparse(shape, torch.float32, device)
    rng = np.random.default_rng(0)
    scores[..., -40:] = torch.from_numpy(rng.integers(-3, 3, (*shape[:2], 40)).astype(np.float32)).to(device)
    theta = torch.tensor(0.5, device=device)
    for got, want in (
        (select_ragged(scores, batch), select_ragged_ref(scores, batch)),
        (threshold_ragged(scores, batch, theta), threshold_ragged_ref(scores, batch, theta)),
    ):
        assert torch.equal(got[0][..., -40:], want[0][..., -40:])
        assert torch.equal(got[1], want[1])


def check_wide_masks(stitch: Stitch, reference: Stitch, shape: tuple[int, int, int], device: str = "cpu") -> None:
    """The keep mask, and the scratch for lists of moves."""
    num_layers, num_heads, columns = shape
    batch = wide_batch(columns, device)
    mask = sparse(shape, torch.uint8, device)
    mask[..., -13:] = 1
    scratch = sparse(shape, torch.int32, device)
    results = []
    for run, options in ((stitch, {"scratch": scratch}), (reference, {})):
        content = torch.arange(num_layers * 2 * num_heads * 64 * 64, dtype=torch.int32, device=device)
        caches = list(content.view(num_layers, 2, num_heads, 64, 64).clone())
        positions = content[: num_layers * 2 * num_heads * 64].view(num_layers, 2, num_heads, 64).clone()
        run(PagedLayers.of(caches), batch, mask, positions, **options)
        results.append((torch.stack(caches), positions))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
