"""Compaction: survivors become dense.

Two forms, in two launches each whatever the number of requests, layers and heads: ``pack_ragged`` keeps the order of
the slots and writes to private blocks; ``fill_ragged`` moves the survivors of the tail, slots [keep, length), into the
holes of the head, slots [0, keep), so it moves few of them, in place, and sources and destinations are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nitro.kernels._checks import check_device, check_positions, check_ragged, check_row_lengths, check_tables
from nitro.kernels._moves import list_shape, move, scratch_for
from nitro.kernels.paged import PagedLayers, RaggedBatch

# A move must keep every bit, also of NaNs, and work for dtypes that have no arithmetic: move integers of equal width.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_ref(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows in the order of ``index``, out of place and bit for bit.

    Args:
        x: ``[..., N, D]``, any dtype of 1, 2, 4 or 8 bytes, any strides.
        index: int32 or int64 ``[..., keep]`` with the leading dimensions of ``x``; ``0 <= index < N``. The bounds are
            checked on the CPU only, since looking at them elsewhere would wait for the device.

    Returns:
        A new tensor ``[..., keep, D]`` of ``x``'s dtype; row r is ``x[..., index[..., r], :]``.

    Raises:
        TypeError: if a dtype is none of the above.
        ValueError: if shapes do not fit, or an index is out of bounds.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"index must be int32 or int64, got {index.dtype}")
    if x.itemsize not in _INTEGERS:
        raise TypeError(f"x must have a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if x.ndim < 2 or x.shape[:-2] != index.shape[:-1] or x.ndim != index.ndim + 1:
        raise ValueError(
            f"x must be [..., N, D] and index [..., keep] with equal leading dimensions, "
            f"got {list(x.shape)} and {list(index.shape)}"
        )
    num_rows, width = x.shape[-2:]
    if index.device.type == "cpu" and index.numel():
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= num_rows:
            raise ValueError(f"index spans {low} to {high}, but must stay within 0 to {num_rows - 1}, the rows of x")
    rows = index.to(torch.int64).unsqueeze(-1).expand(*index.shape, width)
    return x.view(_INTEGERS[x.itemsize]).gather(-2, rows).view(x.dtype)


def pack_ragged(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    positions: Tensor,
    *,
    masses: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Copy the surviving slots, in order, to the slots [0, count) of ``batch.dst_tables``.

    Moves K, V and logical position in all layers and heads, bit for bit. Nothing else changes: a destination's other
    slots keep what they held. Sources may be shared; destinations must belong to one request, and not be the source of
    any request of the batch. The mask has the counts; ``batch.keep`` only says how long the rows of ``dst_tables`` must
    at least be, so a mask of more than ``keep`` slots needs rows for them.

    Args:
        layers: the caches, read and written.
        batch: the requests.
        mask: uint8 ``[L, H, total]``, contiguous along the slots; nonzero stays.
        positions: int32 ``[L, num_blocks, H, block_size]``, the logical position in each slot, read and written.
        masses: int32 like ``positions``, how many tokens each slot stands for, if pooling keeps that; moves along.
        scratch: int32 ``[L, H, total]``, contiguous, overwritten; saves an allocation. Scores, once they have been
            selected from, will do: ``scores.view(torch.int32)``.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, the destination is the source, or Triton cannot run here.
    """
    if batch.total and batch.dst_tables.data_ptr() == batch.block_tables.data_ptr():
        raise ValueError("dst_tables is block_tables, but packing in place overwrites survivors: give fresh blocks")
    _check(layers, batch, mask, positions, masses)
    check_row_lengths(layers, batch, destinations=True)
    check_device(layers.device, "pack_ragged_ref")
    moves, num_moves = scratch_for(mask, batch, scratch)
    if num_moves.numel():
        from nitro.kernels._triton.compact import list_pack_kernel

        tile, num_warps = list_shape(batch.max_length)
        list_pack_kernel[(num_moves.numel(),)](
            mask,
            moves,
            num_moves,
            batch.lengths,
            batch.offsets,
            *mask.stride()[:2],
            batch.total,
            layers.num_layers,
            layers.num_kv_heads,
            BLOCK=tile,
            num_warps=num_warps,
        )
        move(layers, batch, positions, moves, num_moves, fill=False, masses=masses)


def fill_ragged(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    positions: Tensor,
    *,
    masses: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Move the survivors of each tail into the holes of its head, rank to rank, in place.

    With ``keep`` the count of a (request, layer, KV head), the i-th surviving slot of [keep, length) goes to the i-th
    slot of [0, keep) that does not survive, with K, V and logical position, bit for bit. Nothing else changes.
    ``batch.dst_tables`` is not looked at. Blocks with a hole must belong to one request.

    Args:
        layers: the caches, read and written.
        batch: the requests; its ``keep`` counts the ones of the mask. Where it does not, the surplus holes or movers
            of higher slots are left alone.
        mask: uint8 ``[L, H, total]``, contiguous along the slots; nonzero stays.
        positions: int32 ``[L, num_blocks, H, block_size]``, the logical position in each slot, read and written.
        masses: int32 like ``positions``, how many tokens each slot stands for, if pooling keeps that; moves along.
        scratch: int32 ``[L, H, total]``, as for ``pack_ragged``.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run here.
    """
    _check(layers, batch, mask, positions, masses)
    check_device(layers.device, "fill_ragged_ref")
    moves, num_moves = scratch_for(mask, batch, scratch)
    if num_moves.numel():
        from nitro.kernels._triton.compact import list_fill_kernel

        tile, num_warps = list_shape(batch.max_length)
        list_fill_kernel[(num_moves.numel(),)](
            mask,
            moves,
            num_moves,
            batch.lengths,
            batch.keep,
            batch.offsets,
            *mask.stride()[:2],
            batch.total,
            *batch.keep_strides,
            layers.num_layers,
            layers.num_kv_heads,
            BLOCK=tile,
            num_warps=num_warps,
        )
        move(layers, batch, positions, moves, num_moves, fill=True, masses=masses)


def pack_ragged_ref(
    layers: PagedLayers, batch: RaggedBatch, mask: Tensor, positions: Tensor, *, masses: Tensor | None = None
) -> None:
    """Move what ``pack_ragged`` moves, one (request, layer, KV head) at a time."""
    _check(layers, batch, mask, positions, masses)
    for request, layer, head, kept in _rows(batch, mask):
        source = kept.nonzero().flatten()
        target = torch.arange(source.numel(), device=source.device)
        tables = batch.block_tables[request], batch.dst_tables[request]
        _move_ref(layers, (positions, masses), layer, head, tables, source, target)


def fill_ragged_ref(
    layers: PagedLayers, batch: RaggedBatch, mask: Tensor, positions: Tensor, *, masses: Tensor | None = None
) -> None:
    """Move what ``fill_ragged`` moves, one (request, layer, KV head) at a time."""
    _check(layers, batch, mask, positions, masses)
    keep = batch.keep if batch.keep.ndim == 3 else batch.keep[:, None, None].expand(-1, *mask.shape[:2])
    for request, layer, head, kept in _rows(batch, mask):
        count = int(keep[request, layer, head])
        holes = (~kept[:count]).nonzero().flatten()
        movers = kept[count:].nonzero().flatten() + count
        number = min(holes.numel(), movers.numel())
        tables = batch.block_tables[request], batch.block_tables[request]
        _move_ref(layers, (positions, masses), layer, head, tables, movers[:number], holes[:number])


def _rows(batch: RaggedBatch, mask: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield (request, layer, head, bool ``[length]``)."""
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        for layer in range(mask.shape[0]):
            for head in range(mask.shape[1]):
                yield request, layer, head, mask[layer, head, first : first + length] != 0


def _move_ref(
    layers: PagedLayers,
    beside: tuple[Tensor, Tensor | None],
    layer: int,
    head: int,
    tables: tuple[Tensor, Tensor],
    source: Tensor,
    target: Tensor,
) -> None:
    size = layers.block_size
    read = tables[0][source // size].to(torch.int64), head, source % size
    write = tables[1][target // size].to(torch.int64), head, target % size
    cache = layers.caches[layer].view(_INTEGERS[layers.dtype.itemsize])
    cache[write] = cache[read]
    for numbers in beside:
        if numbers is not None:
            numbers[layer][write] = numbers[layer][read]


def _check(layers: PagedLayers, batch: RaggedBatch, mask: Tensor, positions: Tensor, masses: Tensor | None) -> None:
    check_tables(layers, batch)
    check_ragged("mask", mask, torch.uint8, batch)
    if mask.shape[:2] != (layers.num_layers, layers.num_kv_heads):
        raise ValueError(
            f"mask is of {mask.shape[0]} layers and {mask.shape[1]} KV heads, must be of the caches' "
            f"{layers.num_layers} and {layers.num_kv_heads}"
        )
    check_positions(layers, positions, masses)
