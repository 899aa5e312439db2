"""Merging in three steps: slots are listed, evicted tokens find their survivors, survivors gather their own tokens.

Nothing is added up by atomics: who adds what in which order depends on the row alone, so a request gets the same bits
in every batch. A row's list stands in the columns of its request in an int32 ``[L, H, total]``: survivors from its
front on, evicted slots from its back.
"""

import triton
import triton.language as tl

from .score_tile import finite, head_pointer, load_rows, ragged_row, row_of, slot_offset, values_of

_MIN_NORM = tl.constexpr(1e-12)  # a shorter key has no direction worth the name
_BF16 = tl.constexpr(tl.bfloat16)


@triton.jit
def _mass_index(table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE: tl.constexpr):
    """Return where slots' masses are, int64, in ``[L, num_blocks, H, BLOCK_SIZE]``."""
    slot = slot.to(tl.uint32)  # see `slot_offset`
    block = tl.load(table + slot // BLOCK_SIZE, mask=live, other=0).to(tl.uint32).to(tl.int64)
    first = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE
    return first + block * (H * BLOCK_SIZE) + (slot % BLOCK_SIZE).to(tl.int64)


@triton.jit(do_not_specialize=["mask_layer", "mask_head", "total", "L", "H"])
def list_both_kernel(
    mask,  # uint8 [L, H, total]
    order,  # int32 [L, H, total], written
    num_kept,  # int32 [R, L, H], written
    targets,  # int32 [L, H, total], written: -1
    lengths,
    offsets,
    mask_layer,
    mask_head,
    total,
    L,
    H,
    BLOCK: tl.constexpr,
):
    """One program lists one row."""
    row = tl.program_id(0)
    request, layer, head = row_of(row, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + tl.load(offsets + request)
    order += first
    targets += first
    count = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        exists = slot < length
        kept = (tl.load(mask + slot, mask=exists, other=0) != 0).to(tl.int32)
        before = count + tl.cumsum(kept) - kept
        tl.store(order + tl.where(kept != 0, before, length - 1 - (slot - before)), slot, mask=exists)
        tl.store(targets + slot, -1, mask=exists)
        count += tl.sum(kept)
    tl.store(num_kept + row, count)


@triton.jit(do_not_specialize=["least", "total", "max_blocks", "splits", "L", "H"])
def nearest_kernel(
    base,
    tables,
    lengths,
    protect,
    offsets,
    order,
    num_kept,
    targets,  # int32 [L, H, total], written: of evicted slots the survivor that takes them, or -1
    least,
    total,
    max_blocks,
    splits,  # programs that share a row
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GONE: tl.constexpr,  # evicted slots at a time
    KEPT: tl.constexpr,  # survivors at a time
    CHANNELS: tl.constexpr,  # of keys at a time
):
    """One program finds the survivors of every ``splits``-th tile of one row's evicted tokens."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    request, layer, head = row_of(row, L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = values_of(keys, stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    order += first
    targets += first
    length = tl.load(lengths + request)
    kept = tl.load(num_kept + row)
    gone = length - kept
    sinks = tl.load(protect + request)
    for begin in range(split * GONE, gone, splits * GONE):
        index = begin + tl.arange(0, GONE)
        live = index < gone
        slot = tl.load(order + (length - 1 - index), mask=live, other=0)
        offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
        square = tl.zeros([GONE], tl.float32)
        value_square = tl.zeros([GONE], tl.float32)
        for channel in range(0, D, CHANNELS):
            x = _channels(keys, offset, live, channel, stride_dim, D, CHANNELS).to(tl.float32)
            square += tl.sum(x * x, axis=1)
            x = _channels(values, offset, live, channel, stride_dim, D, CHANNELS).to(tl.float32)
            value_square += tl.sum(x * x, axis=1)
        best = tl.full([GONE], float("-inf"), tl.float32)
        where = tl.zeros([GONE], tl.int32)
        for start in range(0, kept, KEPT):
            rank = start + tl.arange(0, KEPT)
            there = rank < kept
            near = tl.load(order + rank, mask=there, other=0)
            near_offset = slot_offset(table, near, there, stride_block, stride_slot, BLOCK_SIZE)
            near_square = tl.zeros([KEPT], tl.float32)
            product = tl.zeros([GONE, KEPT], tl.float32)
            for channel in range(0, D, CHANNELS):
                own = _channels(keys, offset, live, channel, stride_dim, D, CHANNELS)
                other = _channels(keys, near_offset, there, channel, stride_dim, D, CHANNELS)
                product = tl.dot(own, tl.trans(other), product, input_precision="tf32x3")
                other = other.to(tl.float32)
                near_square += tl.sum(other * other, axis=1)
            able = there & finite(near_square) & (near >= sinks)
            cosine = product / tl.maximum(tl.sqrt_rn(near_square), _MIN_NORM)[None, :]
            cosine = tl.where(able[None, :], cosine, float("-inf"))
            top, at = tl.max(cosine, axis=1, return_indices=True, return_indices_tie_break_left=True)
            where = tl.where(top > best, start + at, where)
            best = tl.maximum(best, top)
        best = best / tl.maximum(tl.sqrt_rn(square), _MIN_NORM)
        taken = live & finite(square) & finite(value_square) & (best > float("-inf")) & (best >= least)
        target = tl.load(order + where, mask=taken, other=-1)
        tl.store(targets + slot, target, mask=live)


@triton.jit
def _channels(pointer, offset, live, channel, stride_dim, D: tl.constexpr, CHANNELS: tl.constexpr):
    """Return some numbers of each slot as they are, ``[len(offset), CHANNELS]``; zero where not live and from D on."""
    column = channel + tl.arange(0, CHANNELS)
    wanted = live[:, None]
    if D % CHANNELS != 0:
        wanted = wanted & (column < D)[None, :]
    return tl.load(pointer + offset[:, None] + (column.to(tl.int64) * stride_dim)[None, :], mask=wanted, other=0.0)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return float32 numbers as elements of the cache, rounded to the nearest."""
    if DTYPE == _BF16 and not COMPILED:  # the interpreter cuts bits off
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit(
    do_not_specialize=["own", "most", "total", "max_blocks", "max_dst_blocks", "num_blocks", "splits", "L", "H"]
)
def fold_kernel(
    base,
    tables,
    dst_tables,
    lengths,
    offsets,
    order,
    num_kept,
    targets,
    masses,  # int32 [L, num_blocks, H, BLOCK_SIZE], read and written
    own,  # what a survivor that stands for itself weighs
    most,
    total,
    max_blocks,
    max_dst_blocks,
    num_blocks,
    splits,  # programs that share a row
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GONE: tl.constexpr,
    KEPT: tl.constexpr,
    PACKED: tl.constexpr,  # survivors are where `pack_ragged` has put them
    PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One program lets every ``splits``-th tile of one row's survivors gather what was folded into them."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    request, layer, head = row_of(row, L, H)
    values = values_of(head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED), stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    order += first
    targets += first
    length = tl.load(lengths + request)
    kept = tl.load(num_kept + row)
    gone = length - kept
    survivors = kept
    if PACKED:  # `pack_ragged` does not move what has no room
        survivors = tl.minimum(kept, max_dst_blocks * BLOCK_SIZE)
        dst_table = dst_tables + request.to(tl.int64) * max_dst_blocks
    for begin in range(split * KEPT, survivors, splits * KEPT):
        rank = begin + tl.arange(0, KEPT)
        there = rank < survivors
        slot = tl.load(order + rank, mask=there, other=-2)
        total_mass = tl.zeros([KEPT], tl.int32)
        sums = tl.zeros([KEPT, WIDTH], tl.float32)
        for start in range(0, gone, GONE):
            index = start + tl.arange(0, GONE)
            live = index < gone
            source = tl.load(order + (length - 1 - index), mask=live, other=0)
            target = tl.load(targets + source, mask=live, other=-1)
            hit = slot[:, None] == target[None, :]
            if tl.max(hit.to(tl.int32)) > 0:
                live = target >= 0
                mass = tl.load(
                    masses + _mass_index(table, source, live, layer, head, num_blocks, H, BLOCK_SIZE), live, other=0
                )
                offset = slot_offset(table, source, live, stride_block, stride_slot, BLOCK_SIZE)
                value = load_rows(values, offset, live, stride_dim, DTYPE, D, WIDTH)
                weight = tl.where(hit, mass[None, :], 0)
                sums = tl.dot(weight.to(tl.float32), value, sums, input_precision=PRECISION)
                total_mass += tl.sum(weight, axis=1)
        if tl.max(total_mass) > 0:
            if PACKED:
                place, where = dst_table, rank
            else:
                place, where = table, slot
            takes = total_mass > 0
            if PACKED:
                takes = takes & (tl.load(place + where // BLOCK_SIZE, mask=takes, other=-1) >= 0)
            offset = slot_offset(place, where, takes, stride_block, stride_slot, BLOCK_SIZE)
            value = load_rows(values, offset, takes, stride_dim, DTYPE, D, WIDTH)
            at = masses + _mass_index(place, where, takes, layer, head, num_blocks, H, BLOCK_SIZE)
            mass = tl.load(at, mask=takes, other=1)
            weight = own + (mass - 1).to(tl.float32)
            mean = (weight[:, None] * value + sums) / (weight + total_mass.to(tl.float32))[:, None]
            takes = takes & finite(tl.sum(value * value, axis=1))
            column = tl.arange(0, WIDTH)
            wanted = takes[:, None] & (column < D)[None, :]
            to = values + offset[:, None] + (column.to(tl.int64) * stride_dim)[None, :]
            tl.store(to, _rounded(mean, DTYPE, COMPILED), mask=wanted)
            tl.store(at, tl.minimum(mass + total_mass, most), mask=takes)
