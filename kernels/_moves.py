"""How moves are launched: what ``pack_ragged`` and ``fill_ragged`` have in common once they know what to move."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from nitro.kernels._checks import check_array
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import VECTOR_BYTES, PagedLayers, RaggedBatch

LIST_SHAPES = ((512, 512, 4), (16 * 1024, 1024, 1), (2**62, 4096, 8))
"""Longest request, the slots that one program lists together, and its warps. Many rows share a multiprocessor where a
program is one warp, which is the fastest; the longest requests are too few for that."""
MOVE_BYTES = 16 * 1024  # that one program moves together: 128 bytes in flight for each of its threads
MOVE_WARPS = 4
LONG_FACTOR = 2  # programs of this many times the bytes and warps, which look ahead, move rows that take several rounds
MOVE_PROGRAMS = 4096  # at least this many, if there is work for them: several for each multiprocessor


def scratch_for(mask: Tensor, batch: RaggedBatch, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return room for the lists of moves, and for their lengths ``[R, L, H]``."""
    if scratch is None:
        scratch = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    check_array("scratch", scratch, torch.int32, tuple(mask.shape), mask.device)
    return scratch, torch.empty(batch.num_requests, *mask.shape[:2], dtype=torch.int32, device=mask.device)


def list_shape(max_length: int) -> tuple[int, int]:
    """Return the slots per tile, and the warps that list them."""
    return next((tile, warps) for longest, tile, warps in LIST_SHAPES if max_length <= longest)


def word_constexprs(
    width: int, itemsize: int, block_size: int, *, aligned: bool, nbytes: int = MOVE_BYTES
) -> dict[str, Any]:
    """Return the constexpr parameters of kernels that move rows of K and V as integers."""
    import triton.language as tl

    columns = 1 << (width - 1).bit_length()
    return {
        "WORD": {1: tl.int8, 2: tl.int16, 4: tl.int32}[itemsize],
        "ALIGNED": aligned,
        "WIDTH": width,
        "COLUMNS": columns,
        # Where threads move single elements, the same number of bytes would take four to eight times the registers.
        "ROWS": max(1, nbytes // (columns * (itemsize if aligned else VECTOR_BYTES // 2))),
        "BLOCK_SIZE": block_size,
    }


def move_shape(
    width: int, itemsize: int, block_size: int, most: int, *, aligned: bool, fill: bool
) -> tuple[dict[str, Any], int]:
    """Return the constexpr parameters, and the warps, that make up to ``most`` moves in a row."""
    factor = LONG_FACTOR if aligned and most * width * itemsize > 2 * LONG_FACTOR * MOVE_BYTES else 1
    shape = word_constexprs(width, itemsize, block_size, aligned=aligned, nbytes=MOVE_BYTES * factor)
    return {**shape, "FILL": fill, "AHEAD": factor > 1}, MOVE_WARPS * factor


def move(
    layers: PagedLayers,
    batch: RaggedBatch,
    positions: Tensor,
    moves: Tensor,
    num_moves: Tensor,
    *,
    fill: bool,
    masses: Tensor | None = None,
) -> None:
    """Launch the moves that a ``list_*`` kernel has put in ``moves`` and ``num_moves``."""
    from nitro.kernels._triton.compact import move_kernel

    most = batch.max_length // 2 if fill else batch.max_length
    constexprs, num_warps = move_shape(
        2 * layers.head_dim, layers.dtype.itemsize, layers.block_size, most, aligned=layers.aligned, fill=fill
    )
    # Few long rows are split among programs; many short ones are not, since a program without work costs time, too.
    splits = min(math.ceil(most / constexprs["ROWS"]), math.ceil(MOVE_PROGRAMS / num_moves.numel()))
    dst_tables = batch.block_tables if fill else batch.dst_tables
    move_kernel[(num_moves.numel() * max(splits, 1),)](
        layers.base,
        positions,
        masses,
        moves,
        num_moves,
        batch.lengths,
        batch.offsets,
        batch.block_tables,
        dst_tables,
        batch.block_tables.shape[1],
        dst_tables.shape[1],
        *layers.strides,
        layers.num_blocks,
        batch.total,
        max(splits, 1),
        layers.num_layers,
        layers.num_kv_heads,
        **constexprs,
        num_warps=num_warps,
    )


def variants() -> list[Variant]:
    """Return what ``pack_ragged`` and ``fill_ragged`` may launch; of the moves, the shapes that differ most."""
    from nitro.kernels._triton.compact import list_fill_kernel, list_pack_kernel, move_kernel

    array = {"mask": "*u8", "moves": "*i32", "num_moves": "*i32", "lengths": "*i32", "offsets": "*i64"}
    found = []
    for _, tile, num_warps in LIST_SHAPES:
        found += [
            Variant(f"list_pack-{tile}", list_pack_kernel, array, {"BLOCK": tile}, num_warps),
            Variant(f"list_fill-{tile}", list_fill_kernel, array | {"keep": "*i32"}, {"BLOCK": tile}, num_warps),
        ]
    pointers = {
        "base": "*i64",
        "positions": "*i32",
        "masses": "*i32",
        "block_tables": "*i32",
        "dst_tables": "*i32",
    } | array
    del pointers["mask"]
    for head_dim, itemsize, block_size, aligned, fills, masses in (
        (32, 1, 16, True, (True,), False),
        (64, 2, 16, True, (True,), False),
        (80, 2, 32, True, (True,), False),
        (96, 2, 8, True, (True,), False),
        (128, 2, 16, True, (True, False), False),
        (128, 2, 16, True, (True, False), True),
        (128, 1, 16, True, (True, False), False),
        (128, 2, 128, False, (True,), False),
        (256, 2, 16, True, (True,), False),
        (256, 4, 64, True, (True, False), False),
        (256, 4, 16, False, (True, False), True),
    ):
        # Long rows have the same loads and stores, only more of them.
        for fill, most in itertools.product(fills, (1, 2**17) if aligned and head_dim in (64, 128) else (1,)):
            constexprs, num_warps = move_shape(2 * head_dim, itemsize, block_size, most, aligned=aligned, fill=fill)
            name = f"{'fill' if fill else 'pack'}-{head_dim}x{itemsize}-{block_size}{'' if aligned else '-unaligned'}"
            name += "-masses" if masses else ""
            found.append(
                Variant(
                    f"{name}{'-long' if constexprs['AHEAD'] else ''}",
                    move_kernel,
                    pointers,
                    ({"stride_dim": 1} if aligned else {}) | ({} if masses else {"masses": None}) | constexprs,
                    num_warps,
                    divisible=("stride_block", "stride_head", "stride_slot") if aligned else (),
                )
            )
    return found
