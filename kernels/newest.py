"""The newest tokens stay also where ``fill`` has moved them out of the last slots."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, check_device, check_positions, check_tables
from nitro.kernels._score import REQUESTS, dense_positions, splits_of
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

_SLOTS = 1024  # per tile


def force_newest(
    layers: PagedLayers, batch: RaggedBatch, scores: Tensor, logical_lengths: Tensor, positions: Tensor
) -> None:
    """Lift the scores of each request's newest ``batch.window`` tokens above all others, in place; one launch.

    ``batch.window`` is of slots for the selection. That is the same as long as the newest tokens stand last, which
    ``fill`` undoes; until ``window`` new ones have come, call this and select with a batch whose window is 0. The
    tokens get +inf, and any other score at most the largest float32.

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests; ``keep`` and ``protect`` are not looked at.
        scores: float32 ``[L, H, total]``, contiguous, read and written.
        logical_lengths: int32 ``[R]``, contiguous, tokens computed so far, counting evicted ones.
        positions: int32 ``[L, num_blocks, H, block_size]``, logical position of each slot.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run here.
    """
    _check(layers, batch, scores, logical_lengths, positions)
    check_device(layers.device, "force_newest_ref")
    if scores.numel():
        from nitro.kernels._triton.newest import force_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, _SLOTS)
        force_kernel[(rows * splits,)](
            positions,
            logical_lengths,
            batch.block_tables,
            batch.lengths,
            batch.offsets,
            scores,
            batch.total,
            batch.block_tables.shape[1],
            layers.num_blocks,
            batch.window,
            splits,
            layers.num_layers,
            layers.num_kv_heads,
            BLOCK_SIZE=layers.block_size,
            TILE=_SLOTS,
            num_warps=4,
        )


def force_newest_ref(
    layers: PagedLayers, batch: RaggedBatch, scores: Tensor, logical_lengths: Tensor, positions: Tensor
) -> None:
    """Do what ``force_newest`` does, one request at a time."""
    _check(layers, batch, scores, logical_lengths, positions)
    scores.clamp_(max=torch.finfo(torch.float32).max)
    ends = batch.offsets.tolist()
    for request in range(batch.num_requests):
        where = dense_positions(layers, batch, positions, request)
        row = scores[..., ends[request] : ends[request + 1]]
        row.masked_fill_(where >= logical_lengths[request] - batch.window, torch.inf)


def _check(layers: PagedLayers, batch: RaggedBatch, scores: Tensor, logical_lengths: Tensor, positions: Tensor) -> None:
    check_tables(layers, batch)
    check_positions(layers, positions)
    shape = (layers.num_layers, layers.num_kv_heads, batch.total)
    check_array("scores", scores, torch.float32, shape, layers.device)
    check_array("logical_lengths", logical_lengths, torch.int32, (batch.num_requests,), layers.device)


def variants() -> list[Variant]:
    """Return what the launcher may launch."""
    from nitro.kernels._triton.newest import force_kernel

    pointers = {**REQUESTS, "positions": "*i32", "logical_lengths": "*i32", "scores": "*fp32"}
    return [Variant("force_newest", force_kernel, pointers, {"BLOCK_SIZE": 16, "TILE": _SLOTS}, 4)]
