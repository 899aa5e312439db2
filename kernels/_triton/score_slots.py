"""Scores that look at one slot at a time: norms, age, a random draw."""

import triton
import triton.language as tl

from .score_tile import (
    finite,
    head_pointer,
    load_rows,
    position_of,
    ragged_row,
    row_of,
    scale_of,
    slot_offset,
    values_of,
)

# SplitMix64's increment and multipliers; the launcher's file names the source.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit(do_not_specialize=["total", "max_blocks", "splits", "L", "H"])
def norm_kernel(
    base,
    scales,  # float32 [L, 2, H], or None: 1
    tables,
    lengths,
    offsets,
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    splits,  # programs that share a row, tile by tile
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    PART: tl.constexpr,  # 0: keys, 1: values
    SIGN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """SIGN times the L2 norm of each key or value; NaN where that is not finite."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    pointer = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    if PART == 1:
        pointer = values_of(pointer, stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    unit = SIGN
    if scales is not None:
        unit = SIGN * scale_of(scales, layer, head, H, PART)
    for start in tl.range(program % splits * TILE, length, splits * TILE, num_stages=STAGES):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
        x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
        square = tl.sum(x * x, axis=1)
        tl.store(out + slot, tl.where(finite(square), unit * tl.sqrt_rn(square), float("nan")), mask=live)


@triton.jit(do_not_specialize=["total", "max_blocks", "num_blocks", "splits", "L", "H"])
def streaming_kernel(
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE], or None: the slot's index
    logical_lengths,  # int32 [R]
    tables,
    lengths,
    offsets,
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    num_blocks,
    splits,
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Minus the age of each token."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    logical_length = tl.load(logical_lengths + request)
    for start in range(program % splits * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        position = slot
        if positions is not None:
            position = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
        tl.store(out + slot, (position - logical_length).to(tl.float32), mask=live)


@triton.jit
def _absorb(h, counter):
    """SplitMix64's output function of ``(h ^ counter) + gamma``; all uint64."""
    z = (h ^ counter) + _GAMMA
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["total", "max_blocks", "num_blocks", "splits", "L", "H"])
def random_kernel(
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE], or None: the slot's index
    states,  # int64 [R], bits of the generator after seed and request
    layers,  # int64 [L]
    heads,  # int64 [H]
    tables,
    lengths,
    offsets,
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    num_blocks,
    splits,
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A multiple of 2**-24 in [0, 1), drawn for each (state, layer, head, position)."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    h = tl.load(states + request).to(tl.uint64, bitcast=True)
    h = _absorb(h, tl.load(layers + layer).to(tl.uint64, bitcast=True))
    h = _absorb(h, tl.load(heads + head).to(tl.uint64, bitcast=True))
    for start in range(program % splits * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        position = slot
        if positions is not None:
            position = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
        draw = _absorb(h, position.to(tl.uint64)) >> 40
        tl.store(out + slot, draw.to(tl.int32).to(tl.float32) * (1.0 / 16777216), mask=live)
