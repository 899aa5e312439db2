"""The newest tokens of each row, found by their logical positions."""

import triton
import triton.language as tl

from .score_tile import position_of, ragged_row, row_of

_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit(do_not_specialize=["total", "max_blocks", "num_blocks", "window", "splits", "L", "H"])
def force_kernel(
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE]
    logical_lengths,  # int32 [R]
    tables,
    lengths,
    offsets,
    scores,  # float32 [L, H, total], read and written
    total,
    max_blocks,
    num_blocks,
    window,
    splits,  # programs that share a row, tile by tile
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Infinity for each token of the window, at most the largest number for all others; NaNs stay."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    scores += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    first = tl.load(logical_lengths + request) - window
    for start in range(program % splits * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        position = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
        score = tl.load(scores + slot, mask=live, other=0.0)
        score = tl.where(score > _LARGEST, _LARGEST, score)
        tl.store(scores + slot, tl.where(position >= first, float("inf"), score), mask=live)
