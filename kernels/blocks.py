"""What comes before an eviction: shared blocks get a private copy, and new slots their logical position."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, check_device, check_positions, check_tables
from nitro.kernels._moves import MOVE_WARPS, word_constexprs
from nitro.kernels._score import splits_of
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

_SLOTS = 256
"""Slots that one program stamps together: an eviction's new slots are few."""


def copy_blocks(layers: PagedLayers, positions: Tensor, pairs: Tensor, *, masses: Tensor | None = None) -> None:
    """Copy whole blocks of all layers and KV heads, K, V, logical positions and masses, bit for bit; one launch.

    Args:
        layers: the caches, read and written.
        positions: int32 ``[L, num_blocks, H, block_size]``, read and written.
        pairs: int32 ``[2, P]``, contiguous, on the caches' device: sources, then destinations. No block is a
            destination twice, or a destination and a source.
        masses: int32 like ``positions``, how many tokens each slot stands for, if pooling keeps that; also copied.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run here.
    """
    _check_copy(layers, positions, pairs, masses)
    check_device(layers.device, "copy_blocks_ref")
    if pairs.numel():
        from nitro.kernels._triton.blocks import copy_kernel

        copy_kernel[(pairs.shape[1] * layers.num_layers * layers.num_kv_heads,)](
            layers.base,
            positions,
            masses,
            pairs,
            pairs.shape[1],
            layers.num_blocks,
            layers.num_layers,
            layers.num_kv_heads,
            *layers.strides,
            **_copy_constexprs(layers.head_dim, layers.dtype.itemsize, layers.block_size, aligned=layers.aligned),
            num_warps=MOVE_WARPS,
        )


def copy_blocks_ref(layers: PagedLayers, positions: Tensor, pairs: Tensor, *, masses: Tensor | None = None) -> None:
    """Copy what ``copy_blocks`` copies, layer by layer."""
    _check_copy(layers, positions, pairs, masses)
    source, target = pairs.long()
    for cache, where in zip(layers.caches, positions, strict=True):
        cache[target] = cache[source]
        where[target] = where[source]
    if masses is not None:
        masses[:, target] = masses[:, source]


def stamp_positions(
    layers: PagedLayers,
    batch: RaggedBatch,
    positions: Tensor,
    first: Tensor,
    shift: Tensor,
    *,
    masses: Tensor | None = None,
) -> None:
    """Store position ``slot + shift``, and a mass of 1, in each request's slots ``[first, length)``; one launch.

    Slots that were written since a request's last eviction hold consecutive tokens, so that nothing has to be stored
    when a token is written. Blocks may be shared by requests that agree about the tokens in them.

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests; ``keep``, ``protect``, ``window`` and ``dst_tables`` are not looked at.
        positions: int32 ``[L, num_blocks, H, block_size]``, written.
        first: int32 ``[R]``, at least 0: slots held right after the last eviction, or 0.
        shift: int32 ``[R]``: tokens evicted so far.
        masses: int32 like ``positions``, how many tokens each slot stands for, if pooling keeps that; written.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run here.
    """
    _check_stamp(layers, batch, positions, first, shift, masses)
    check_device(layers.device, "stamp_positions_ref")
    rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
    if batch.total:
        from nitro.kernels._triton.blocks import stamp_kernel

        splits = splits_of(batch, rows, _SLOTS)
        stamp_kernel[(rows * splits,)](
            positions,
            masses,
            batch.block_tables,
            batch.lengths,
            first,
            shift,
            batch.block_tables.shape[1],
            layers.num_blocks,
            splits,
            layers.num_layers,
            layers.num_kv_heads,
            BLOCK_SIZE=layers.block_size,
            TILE=_SLOTS,
            num_warps=1,
        )


def stamp_positions_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    positions: Tensor,
    first: Tensor,
    shift: Tensor,
    *,
    masses: Tensor | None = None,
) -> None:
    """Store what ``stamp_positions`` stores, one request at a time."""
    _check_stamp(layers, batch, positions, first, shift, masses)
    for table, length, start, moved in zip(
        batch.block_tables, batch.lengths.tolist(), first.tolist(), shift.tolist(), strict=True
    ):
        slots = torch.arange(start, length, dtype=torch.int32, device=batch.device)
        blocks = table[slots // layers.block_size].long()
        positions[:, blocks, :, slots.long() % layers.block_size] = (slots + moved)[:, None, None]
        if masses is not None:
            masses[:, blocks, :, slots.long() % layers.block_size] = 1


def _check_copy(layers: PagedLayers, positions: Tensor, pairs: Tensor, masses: Tensor | None) -> None:
    check_positions(layers, positions, masses)
    check_array("pairs", pairs, torch.int32, (2, -1), layers.device)


def _check_stamp(
    layers: PagedLayers, batch: RaggedBatch, positions: Tensor, first: Tensor, shift: Tensor, masses: Tensor | None
) -> None:
    check_tables(layers, batch)
    check_positions(layers, positions, masses)
    for name, x in (("first", first), ("shift", shift)):
        check_array(name, x, torch.int32, (batch.num_requests,), layers.device)


def _copy_constexprs(head_dim: int, itemsize: int, block_size: int, *, aligned: bool) -> dict[str, object]:
    shared = word_constexprs(2 * head_dim, itemsize, block_size, aligned=aligned)
    most = 1 << (block_size - 1).bit_length()
    return {**shared, "ROWS": min(shared["ROWS"], most)}


def variants() -> list[Variant]:
    """Return what the launchers may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.blocks import copy_kernel, stamp_kernel

    where = {"positions": "*i32", "masses": "*i32"}
    found = [
        Variant(
            f"stamp{'-masses' if masses else ''}",
            stamp_kernel,
            {**where, "block_tables": "*i32", "lengths": "*i32", "first": "*i32", "shift": "*i32"},
            {"BLOCK_SIZE": 16, "TILE": _SLOTS} | ({} if masses else {"masses": None}),
            1,
        )
        for masses in (False, True)
    ]
    for head_dim, itemsize, block_size, aligned, masses in (
        (64, 2, 16, True, False),
        (128, 1, 16, True, False),
        (128, 2, 128, True, True),
        (256, 4, 16, False, False),
    ):
        constexprs = ({"stride_dim": 1} if aligned else {}) | ({} if masses else {"masses": None})
        kind = f"{'' if aligned else '-unaligned'}{'-masses' if masses else ''}"
        found.append(
            Variant(
                f"copy-{head_dim}x{itemsize}-{block_size}{kind}",
                copy_kernel,
                {**where, "base": "*i64", "pairs": "*i32"},
                constexprs | _copy_constexprs(head_dim, itemsize, block_size, aligned=aligned),
                MOVE_WARPS,
                divisible=("stride_block", "stride_head", "stride_slot") if aligned else (),
            )
        )
    return found
