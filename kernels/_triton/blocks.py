"""Whole blocks to fresh places, and the logical positions of slots that no compaction has moved yet."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "L", "H"])
def copy_kernel(
    base,  # int64 [L]
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE]
    masses,  # the same, or None
    pairs,  # int32 [2, num_pairs]: sources, then destinations
    num_pairs,
    num_blocks,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    WORD: tl.constexpr,  # an integer as wide as an element, so that copies keep every bit
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of K and V of a slot
    COLUMNS: tl.constexpr,  # the power of two above
    ROWS: tl.constexpr,  # slots that are copied together
    BLOCK_SIZE: tl.constexpr,
):
    """One program copies one head's share of one block in one layer."""
    program = tl.program_id(0)
    pair, layer, head = program // (L * H), program // H % L, program % H
    cache = tl.load(base + layer).to(tl.pointer_type(WORD))
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    cache += head.to(tl.int64) * stride_head
    beside = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE
    positions += beside
    if masses is not None:
        masses += beside
    source = tl.load(pairs + pair).to(tl.int64)
    target = tl.load(pairs + num_pairs + pair).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    element = column.to(tl.int64) * stride_dim
    for start in range(0, BLOCK_SIZE, ROWS):
        slot = start + tl.arange(0, ROWS)
        live = slot < BLOCK_SIZE
        chosen = live[:, None] & (column < WIDTH)[None, :]
        offset = slot.to(tl.int64)[:, None] * stride_slot + element[None, :]
        words = tl.load(cache + source * stride_block + offset, mask=chosen)
        position = tl.load(positions + source * H * BLOCK_SIZE + slot, mask=live)
        tl.store(cache + target * stride_block + offset, words, mask=chosen)
        tl.store(positions + target * H * BLOCK_SIZE + slot, position, mask=live)
        if masses is not None:
            mass = tl.load(masses + source * H * BLOCK_SIZE + slot, mask=live)
            tl.store(masses + target * H * BLOCK_SIZE + slot, mass, mask=live)


@triton.jit(do_not_specialize=["table_width", "num_blocks", "splits", "L", "H"])
def stamp_kernel(
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE], written
    masses,  # the same, or None
    block_tables,
    lengths,
    first,  # int32 [R]
    shift,  # int32 [R]
    table_width,
    num_blocks,
    splits,  # programs that share a row, tile by tile
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program stamps every ``splits``-th tile of one (request, layer, KV head)."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    request, layer, head = row // (L * H), row // H % L, row % H
    beside = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE
    positions += beside
    if masses is not None:
        masses += beside
    block_tables += request.to(tl.int64) * table_width
    length = tl.load(lengths + request)
    moved = tl.load(shift + request)
    for start in range(tl.load(first + request) + split * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        block = tl.load(block_tables + slot // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        index = block * H * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(positions + index, slot + moved, mask=live)
        if masses is not None:
            tl.store(masses + index, 1, mask=live)
