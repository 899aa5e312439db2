"""Stitching in two steps: prefix sums over the keep mask list the moves of each row, then all rows move at once.

A row is one (request, layer, KV head); rows are numbered ``(request * L + layer) * H + head``. A row's list stands in
the columns of its request in an int32 ``[L, H, total]``.
"""

import triton
import triton.language as tl


@triton.jit
def _row(lengths, offsets, total, L, H, row):
    """Return a row's request, layer and head, its length, and where it begins in a contiguous ``[L, H, total]``."""
    request, layer, head = row // (L * H), row // H % L, row % H
    first = (layer * H + head).to(tl.int64) * total + tl.load(offsets + request)
    return request, layer, head, tl.load(lengths + request), first


@triton.jit(do_not_specialize=["mask_layer", "mask_head", "total", "L", "H"])
def list_pack_kernel(
    mask,  # uint8 [L, H, total]
    moves,  # int32 [L, H, total], written: a row's survivors, in order
    num_moves,  # int32 [R, L, H], written
    lengths,
    offsets,
    mask_layer,
    mask_head,
    total,
    L,
    H,
    BLOCK: tl.constexpr,
):
    """One program lists the survivors of one row."""
    row = tl.program_id(0)
    request, layer, head, length, first = _row(lengths, offsets, total, L, H, row)
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + tl.load(offsets + request)
    count = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        kept = (tl.load(mask + slot, mask=slot < length, other=0) != 0).to(tl.int32)
        rank = count + tl.cumsum(kept) - kept
        tl.store(moves + first + rank, slot, mask=kept != 0)
        count += tl.sum(kept)
    tl.store(num_moves + row, count)


@triton.jit(do_not_specialize=["mask_layer", "mask_head", "total", "L", "H"])
def list_fill_kernel(
    mask,  # uint8 [L, H, total]
    moves,  # int32 [L, H, total], written: a row's movers in its first half, the holes they fill in its second
    num_moves,  # int32 [R, L, H], written
    lengths,
    keep,
    offsets,
    mask_layer,
    mask_head,
    total,
    keep_request,
    keep_layer,
    keep_head,
    L,
    H,
    BLOCK: tl.constexpr,
):
    """One program matches the holes of one row's head to the survivors of its tail, rank to rank."""
    row = tl.program_id(0)
    request, layer, head, length, first = _row(lengths, offsets, total, L, H, row)
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + tl.load(offsets + request)
    kept_slots = tl.load(
        keep + request.to(tl.int64) * keep_request + layer.to(tl.int64) * keep_layer + head.to(tl.int64) * keep_head
    )
    half = length // 2  # no row has more moves: each takes a hole and a mover
    holes = tl.full((), 0, tl.int32)
    movers = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        exists = slot < length
        kept = tl.load(mask + slot, mask=exists, other=0) != 0
        in_head = slot < kept_slots
        hole = (exists & in_head & (kept == 0)).to(tl.int32)
        mover = (exists & (in_head == 0) & kept).to(tl.int32)
        both = hole | (mover << 16)  # one prefix sum for the two: a tile has fewer than 2**16 slots
        before = tl.cumsum(both) - both
        # A slot is a hole of the head or a mover of the tail, so one store does for both. The ranks stay below half
        # unless mask and keep disagree: then they must not leave the row.
        rank = tl.where(in_head, holes + (before & 0xFFFF), movers + (before >> 16))
        listed = (both != 0) & (rank < half)
        tl.store(moves + first + tl.where(in_head, half + rank, rank), slot, mask=listed)
        number = tl.sum(both)
        holes += number & 0xFFFF
        movers += number >> 16
    tl.store(num_moves + row, tl.minimum(tl.minimum(holes, movers), half))


@triton.jit
def _places(moves, block_tables, dst_tables, rank, live, length, BLOCK_SIZE: tl.constexpr, FILL: tl.constexpr):
    """Return the slots that the moves of these ranks lead from and to, and the int64 blocks of both."""
    src = tl.load(moves + rank, mask=live, other=0)
    dst = rank
    if FILL:
        dst = tl.load(moves + length // 2 + rank, mask=live, other=0)
    src_block = tl.load(block_tables + src // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    dst_block = tl.load(dst_tables + dst // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    return src, dst, src_block, dst_block


@triton.jit(do_not_specialize=["table_width", "dst_width", "total", "splits", "L", "H"])
def move_kernel(
    base,  # int64 [L]
    positions,  # int32 [L, num_blocks, H, block_size]
    masses,  # the same, or None
    moves,
    num_moves,
    lengths,
    offsets,
    block_tables,
    dst_tables,
    table_width,
    dst_width,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    num_blocks,
    total,
    splits,
    L,
    H,
    WORD: tl.constexpr,  # an integer as wide as an element, so that moves keep every bit
    ALIGNED: tl.constexpr,  # rows start at multiples of 16 bytes
    WIDTH: tl.constexpr,  # elements of K and V of a slot
    COLUMNS: tl.constexpr,  # the power of two above
    ROWS: tl.constexpr,  # slots that move together
    BLOCK_SIZE: tl.constexpr,
    FILL: tl.constexpr,  # moves list destinations, too; otherwise the destination is a move's rank
    AHEAD: tl.constexpr,  # look up the next group's places, three loads that wait for each other, while this one moves
):
    """One program makes every ``splits``-th group of a row's moves: K, V, position, and mass if there is one."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    request, layer, head, length, first = _row(lengths, offsets, total, L, H, row)
    count = tl.load(num_moves + row)
    cache = tl.load(base + layer).to(tl.pointer_type(WORD))
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    cache += head.to(tl.int64) * stride_head
    beside = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE
    positions += beside
    if masses is not None:
        masses += beside
    block_tables += request.to(tl.int64) * table_width
    dst_tables += request.to(tl.int64) * dst_width
    moves += first
    column = tl.arange(0, COLUMNS)
    element = column.to(tl.int64) * stride_dim

    # A row of dst_tables may be too short for what a mask has, of which only the device knows: no move then leads to
    # another request's row, or to -1, with which rows are padded.
    if not FILL:
        count = tl.minimum(count, dst_width * BLOCK_SIZE)
    rank = split * ROWS + tl.arange(0, ROWS)
    src, dst, src_block, dst_block = _places(
        moves, block_tables, dst_tables, rank, rank < count, length, BLOCK_SIZE, FILL
    )
    for start in range(split * ROWS, count, splits * ROWS):
        # Computed here, not carried from round to round: that would halve the speed.
        live = start + tl.arange(0, ROWS) < count
        if not FILL:
            live = live & (dst_block >= 0)
        source = src_block * stride_block + (src % BLOCK_SIZE).to(tl.int64) * stride_slot
        target = dst_block * stride_block + (dst % BLOCK_SIZE).to(tl.int64) * stride_slot
        from_beside = src_block * H * BLOCK_SIZE + src % BLOCK_SIZE
        to_beside = dst_block * H * BLOCK_SIZE + dst % BLOCK_SIZE
        chosen = live[:, None] & (column < WIDTH)[None, :]
        words = tl.load(cache + source[:, None] + element[None, :], mask=chosen)
        position = tl.load(positions + from_beside, mask=live)
        if masses is not None:
            mass = tl.load(masses + from_beside, mask=live)
        rank = start + splits * ROWS + tl.arange(0, ROWS)
        if AHEAD:
            src, dst, src_block, dst_block = _places(
                moves, block_tables, dst_tables, rank, rank < count, length, BLOCK_SIZE, FILL
            )
        tl.store(cache + target[:, None] + element[None, :], words, mask=chosen)
        tl.store(positions + to_beside, position, mask=live)
        if masses is not None:
            tl.store(masses + to_beside, mass, mask=live)
        if not AHEAD:
            src, dst, src_block, dst_block = _places(
                moves, block_tables, dst_tables, rank, rank < count, length, BLOCK_SIZE, FILL
            )
