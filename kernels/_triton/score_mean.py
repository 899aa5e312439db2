"""Scores against a mean of the row: one pass forms the mean, a second one compares each slot with it.

A row of up to WHOLE slots has one program that does both passes (phase 0), of which the second finds much of the row in
the cache. For longer ones, the programs of phase 1 each add up one chunk of a row, and those of phase 2 add up the
row's partial sums and score one chunk. What is added up in which order, and by which code, depends on the request
alone: it gets the same bits in every batch.
"""

import triton
import triton.language as tl

from .score_tile import (
    added_up,
    as_floats,
    as_numbers,
    chunk_index,
    chunk_of,
    finite,
    head_pointer,
    length_here,
    load_rows,
    one_added_up,
    ragged_row,
    reciprocal,
    row_of,
    scale_of,
    slot_offset,
    values_of,
)

_MIN_NORM = tl.constexpr(1e-12)  # a shorter vector has no direction worth the name


@triton.jit(do_not_specialize=["total", "max_blocks", "chunks", "partial_rows", "L", "H"])
def keydiff_kernel(
    base,
    tables,
    lengths,
    offsets,
    partials,  # float32 [L, H, partial_rows, WIDTH]: each chunk's sum of unit keys; None in phase 0
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    chunks,  # programs that share a row
    partial_rows,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    PHASE: tl.constexpr,
    WHOLE: tl.constexpr,  # rows of up to so many slots are those of phase 0, with CHUNK equal to it
    CHUNK: tl.constexpr,  # slots of a chunk
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Minus the cosine between each key and the mean of unit keys."""
    request, layer, head = row_of(tl.program_id(0) // chunks if PHASE > 0 else tl.program_id(0), L, H)
    pointer = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = length_here(lengths, request, PHASE, WHOLE)
    chunk, begin, end = 0, 0, length  # known when this is compiled: that saves registers
    if PHASE > 0:
        chunk, begin, end = chunk_of(chunks, length, CHUNK)
    if partials is not None:
        partials += chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK) * WIDTH
    column = tl.arange(0, WIDTH)

    if PHASE < 2:
        # Added up slot by slot of a tile, and over the tile at the end only: that sum goes through shared memory.
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            key = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
            square = tl.sum(key * key, axis=1)
            inverse = 1.0 / tl.maximum(tl.sqrt_rn(square), _MIN_NORM)
            # The second pass needs it again, and a NaN there makes the score one.
            tl.store(out + slot, tl.where(finite(square), inverse, float("nan")), mask=live)
            sums += tl.where(finite(square)[:, None], key, 0.0) * tl.where(finite(square), inverse, 0.0)[:, None]
        anchor = tl.sum(sums, axis=0)
        if PHASE == 0:
            tl.debug_barrier()  # other threads of this program read the inverse norms
        elif begin < end:
            tl.store(partials + chunk * WIDTH + column, anchor)

    if PHASE != 1:
        if PHASE == 2:
            anchor = added_up(partials, length, column, CHUNK, WIDTH)
        anchor = anchor / tl.maximum(tl.sqrt_rn(tl.sum(anchor * anchor, axis=0)), _MIN_NORM)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            inverse = tl.load(out + slot, mask=live, other=0.0)
            key = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
            cosine = tl.sum(key * anchor[None, :], axis=1) * inverse
            tl.store(out + slot, -cosine, mask=live)


@triton.jit
def _places(
    positions,
    first_position,
    table,
    start,
    end,
    stride_block,
    stride_head,
    stride_slot,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Return slots, which are there, where they are in the cache, and their positions, each for HEADS heads in turn."""
    lane = tl.arange(0, TILE)
    head = lane % HEADS
    slot = start + lane // HEADS
    live = slot < end
    position = slot
    if positions is not None:
        index = slot.to(tl.uint32)  # see `slot_offset`
        block = tl.load(table + index // BLOCK_SIZE, mask=live, other=0).to(tl.uint32).to(tl.int64)
        index = block * (H * BLOCK_SIZE) + (head * BLOCK_SIZE + (index % BLOCK_SIZE).to(tl.int32)).to(tl.int64)
        position = tl.load(positions + first_position + index, mask=live, other=0)
    offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
    if HEADS > 1:
        offset += head.to(tl.int64) * stride_head
    return slot, live, offset, position


@triton.jit
def _pairs(
    pointer,
    offset,
    position,
    live,
    cos_sin,
    max_position,
    stride_dim,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    RUNS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return keys as two tiles, cosines, sines, all ``[len(offset), RUNS, HALF // RUNS]``, and what is known.

    The first two tiles hold the two elements of each pair that is rotated together, then those that are not rotated.
    Where a position is not in the table, the numbers mean nothing.
    """
    pair = tl.arange(0, RUNS)[:, None] * (HALF // RUNS) + tl.arange(0, HALF // RUNS)[None, :]
    rotated = pair < ROTARY // 2
    if INTERLEAVED:
        column = tl.arange(0, RUNS)[:, None] * (2 * HALF // RUNS) + tl.arange(0, 2 * HALF // RUNS)[None, :]
        wanted = live[:, None, None]
        if D < 2 * HALF:
            wanted = wanted & (column < D)[None, :, :]
        x = tl.load(pointer + offset[:, None, None] + (column.to(tl.int64) * stride_dim)[None, :, :], wanted, other=0)
        a, b = tl.split(tl.reshape(as_numbers(x, DTYPE).to(tl.float32), [x.shape[0], RUNS, HALF // RUNS, 2]))
    else:
        first, second = pair, pair + D // 2
        if ROTARY < D:
            first = tl.where(rotated, pair, pair + ROTARY // 2)
            second = tl.where(rotated, pair + ROTARY // 2, pair + D // 2)
            if ROTARY % 16 == 0:  # runs of eight stay together, which the compiler can't see through the choice
                first = tl.max_contiguous(tl.multiple_of(first, [1, 8]), [1, 8])
                second = tl.max_contiguous(tl.multiple_of(second, [1, 4]), [1, 4]) if D % 8 == 0 else second
        wanted = live[:, None, None]
        if D < 2 * HALF:
            wanted = wanted & (pair < D // 2)[None, :, :]
        at = pointer + offset[:, None, None]
        a = tl.load(at + (first.to(tl.int64) * stride_dim)[None, :, :], mask=wanted, other=0)
        b = tl.load(at + (second.to(tl.int64) * stride_dim)[None, :, :], mask=wanted, other=0)
        a, b = as_floats(as_numbers(a, DTYPE), COMPILED), as_floats(as_numbers(b, DTYPE), COMPILED)
    inside = live & (position >= 0) & (position < max_position)
    angle = cos_sin + tl.where(inside, position, 0).to(tl.int64)[:, None, None] * ROTARY + pair[None, :, :]
    wanted = inside[:, None, None]
    if ROTARY < 2 * HALF:
        wanted = wanted & rotated[None, :, :]
    cos = tl.load(angle, mask=wanted, other=1.0)
    sin = tl.load(angle + ROTARY // 2, mask=wanted, other=0.0)
    return a, b, as_floats(cos, COMPILED), as_floats(sin, COMPILED), inside


@triton.jit
def _sum_of_pairs(x):
    """Return sums over the pairs of each slot: over runs first, of which a thread has all."""
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def _unit_sums(
    pointer,
    positions,
    first_position,
    table,
    cos_sin,
    out,
    out_stride,
    begin,
    end,
    max_position,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    H,
    CAREFUL: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    RUNS: tl.constexpr,
    HEADS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the heads' sums of unit keys, undone, ``[HEADS, RUNS, HALF // RUNS]`` each; store inverse norms.

    Unless CAREFUL, one number that is not finite makes a sum NaN: a choice for each number is an instruction.
    """
    sums_a = tl.zeros([TILE, RUNS, HALF // RUNS], tl.float32)
    sums_b = tl.zeros([TILE, RUNS, HALF // RUNS], tl.float32)
    slot, live, offset, position = _places(
        positions, first_position, table, begin, end, stride_block, stride_head, stride_slot, H, BLOCK_SIZE, TILE, HEADS
    )
    for start in range(begin, end, TILE // HEADS):
        a, b, cos, sin, inside = _pairs(
            pointer, offset, position, live, cos_sin, max_position, stride_dim, DTYPE, D, ROTARY, INTERLEAVED, HALF,
            RUNS, COMPILED,
        )  # fmt: skip
        here, there = out + (tl.arange(0, TILE) % HEADS).to(tl.int64) * out_stride + slot, live
        # Where the next ones are: looked up while these come.
        slot, live, offset, position = _places(
            positions, first_position, table, start + TILE // HEADS, end, stride_block, stride_head, stride_slot, H,
            BLOCK_SIZE, TILE, HEADS,
        )  # fmt: skip
        # The table may scale (YaRN) and is rounded: not a rotation exactly, so divide by its determinant. But for that,
        # a rotation leaves lengths as they are.
        inverse = reciprocal(cos * cos + sin * sin, COMPILED)
        square = _sum_of_pairs((a * a + b * b) * inverse)
        good = inside & finite(square)
        scale = tl.minimum(tl.rsqrt(square), 1.0 / _MIN_NORM)
        # The second pass needs it again, and a NaN there makes the score one.
        tl.store(here, tl.where(good, scale, float("nan")), mask=there)
        inverse *= tl.where(good, scale, 0.0)[:, None, None]
        undone_a, undone_b = a * cos + b * sin, b * cos - a * sin
        if CAREFUL:
            undone_a = tl.where(good[:, None, None], undone_a, 0.0)
            undone_b = tl.where(good[:, None, None], undone_b, 0.0)
        sums_a += undone_a * inverse
        sums_b += undone_b * inverse
    shape: tl.constexpr = [TILE // HEADS, HEADS, RUNS, HALF // RUNS]
    return tl.sum(tl.reshape(sums_a, shape), axis=0), tl.sum(tl.reshape(sums_b, shape), axis=0)


@triton.jit
def _for_slots(x, SLOTS: tl.constexpr):
    """Return what each head has, ``[HEADS, RUNS, n]``, for a tile of slots: ``[SLOTS * HEADS, RUNS, n]``."""
    x = tl.broadcast_to(x[None, :, :, :], [SLOTS, x.shape[0], x.shape[1], x.shape[2]])
    return tl.reshape(x, [SLOTS * x.shape[1], x.shape[2], x.shape[3]])


@triton.jit(do_not_specialize=["total", "max_blocks", "num_blocks", "max_position", "chunks", "partial_rows", "L", "H"])
def keydiff_unrotated_kernel(
    base,
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE], or None: the slot's index
    cos_sin,  # [max_position, ROTARY]: cosines, then sines
    tables,
    lengths,
    offsets,
    partials,  # float32 [L, H, partial_rows, 2 * HALF]: each chunk's sum of unit keys, first elements of pairs first
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    num_blocks,
    max_position,
    chunks,
    partial_rows,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    PHASE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # at least D / 2
    RUNS: tl.constexpr,  # that HALF is cut into: a thread has some numbers of each
    HEADS: tl.constexpr,  # of a program, side by side: a divisor of H, a power of two, and 1 but in phase 0
    COMPILED: tl.constexpr,  # for a GPU, whose own instructions may be used
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,  # slots of all these heads together
):
    """As `keydiff_kernel`, on keys as they were before RoPE.

    Heads that are side by side have the same positions until something is evicted, and similar ones later: their
    threads share what is fetched of the table, which otherwise is as much as the keys.
    """
    request, layer, head = row_of(tl.program_id(0) // chunks if PHASE > 0 else tl.program_id(0), L, H // HEADS)
    head = head * HEADS
    pointer = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    table = tables + request.to(tl.int64) * max_blocks
    first_position = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE
    out += ragged_row(offsets, request, layer, head, H, total)
    length = length_here(lengths, request, PHASE, WHOLE)
    chunk, begin, end = 0, 0, length  # known when this is compiled: that saves registers
    if PHASE > 0:
        chunk, begin, end = chunk_of(chunks, length, CHUNK)
    if partials is not None:
        partials += chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK) * 2 * HALF
    pair = tl.arange(0, HALF)

    if PHASE < 2:
        anchor_a, anchor_b = _unit_sums(
            pointer, positions, first_position, table, cos_sin, out, total, begin, end, max_position,
            stride_block, stride_head, stride_slot, stride_dim, H, False, ROTARY, INTERLEAVED, D, HALF, RUNS, HEADS,
            COMPILED, BLOCK_SIZE, DTYPE, TILE,
        )  # fmt: skip
        if not finite(tl.sum(_sum_of_pairs(anchor_a * anchor_a + anchor_b * anchor_b), axis=0)):
            anchor_a, anchor_b = _unit_sums(
                pointer, positions, first_position, table, cos_sin, out, total, begin, end, max_position,
                stride_block, stride_head, stride_slot, stride_dim, H, True, ROTARY, INTERLEAVED, D, HALF, RUNS, HEADS,
                COMPILED, BLOCK_SIZE, DTYPE, TILE,
            )  # fmt: skip
        if PHASE == 0:
            tl.debug_barrier()  # other threads of this program read the inverse norms
        elif begin < end:
            tl.store(partials + chunk * 2 * HALF + pair, tl.reshape(anchor_a, [HALF]))
            tl.store(partials + chunk * 2 * HALF + HALF + pair, tl.reshape(anchor_b, [HALF]))

    if PHASE != 1:
        if PHASE == 2:
            anchor_a = tl.reshape(added_up(partials, length, pair, CHUNK, 2 * HALF), [1, RUNS, HALF // RUNS])
            anchor_b = tl.reshape(added_up(partials, length, pair + HALF, CHUNK, 2 * HALF), [1, RUNS, HALF // RUNS])
        norm = tl.maximum(tl.sqrt_rn(_sum_of_pairs(anchor_a * anchor_a + anchor_b * anchor_b)), _MIN_NORM)
        anchor_a = _for_slots(anchor_a / norm[:, None, None], TILE // HEADS)
        anchor_b = _for_slots(anchor_b / norm[:, None, None], TILE // HEADS)
        slot, live, offset, position = _places(
            positions, first_position, table, begin, end, stride_block, stride_head, stride_slot, H, BLOCK_SIZE, TILE,
            HEADS,
        )  # fmt: skip
        for start in range(begin, end, TILE // HEADS):
            a, b, cos, sin, _ = _pairs(
                pointer, offset, position, live, cos_sin, max_position, stride_dim, DTYPE, D, ROTARY, INTERLEAVED, HALF,
                RUNS, COMPILED,
            )  # fmt: skip
            here, there = out + (tl.arange(0, TILE) % HEADS).to(tl.int64) * total + slot, live
            scale = tl.load(here, mask=there, other=0.0)
            slot, live, offset, position = _places(
                positions, first_position, table, start + TILE // HEADS, end, stride_block, stride_head, stride_slot, H,
                BLOCK_SIZE, TILE, HEADS,
            )  # fmt: skip
            inverse = reciprocal(cos * cos + sin * sin, COMPILED)
            # The anchor's product with the key undone is the key's with the anchor turned.
            turned_a = cos * anchor_a - sin * anchor_b
            turned_b = sin * anchor_a + cos * anchor_b
            cosine = _sum_of_pairs((a * turned_a + b * turned_b) * inverse) * scale
            tl.store(here, -cosine, mask=there)


@triton.jit(do_not_specialize=["total", "max_blocks", "chunks", "partial_rows", "L", "H"])
def centred_kernel(
    base,
    scales,  # float32 [L, 2, H], or None: 1
    tables,
    lengths,
    offsets,
    partials,  # float32 [L, H, partial_rows, WIDTH + 4]: each chunk's sum of values and, after it, their number
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    chunks,
    partial_rows,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    PHASE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The distance of each value from the mean value."""
    request, layer, head = row_of(tl.program_id(0) // chunks if PHASE > 0 else tl.program_id(0), L, H)
    pointer = values_of(head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED), stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = length_here(lengths, request, PHASE, WHOLE)
    chunk, begin, end = 0, 0, length  # known when this is compiled: that saves registers
    if PHASE > 0:
        chunk, begin, end = chunk_of(chunks, length, CHUNK)
    partial: tl.constexpr = WIDTH + 4  # a multiple of 16 bytes
    if partials is not None:
        partials += chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK) * partial
    column = tl.arange(0, WIDTH)

    if PHASE < 2:
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        counts = tl.zeros([TILE], tl.int32)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
            good = live & finite(tl.sum(x * x, axis=1))
            sums += tl.where(good[:, None], x, 0.0)
            counts += good.to(tl.int32)
        mean = tl.sum(sums, axis=0)
        count = tl.sum(counts, axis=0).to(tl.float32)
        if PHASE == 1:  # noqa: SIM102 (known when this is compiled)
            if begin < end:
                tl.store(partials + chunk * partial + column, mean)
                tl.store(partials + chunk * partial + WIDTH, count)

    if PHASE != 1:
        if PHASE == 2:
            mean = added_up(partials, length, column, CHUNK, partial)
            count = one_added_up(partials, length, WIDTH, CHUNK, partial)
        mean = mean / tl.maximum(count, 1.0)
        unit = 1.0
        if scales is not None:
            unit = scale_of(scales, layer, head, H, 1)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            # Masked columns are zero here and in the mean. A bad value stays bad when a finite mean is subtracted.
            x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH) - mean[None, :]
            square = tl.sum(x * x, axis=1)
            tl.store(out + slot, tl.where(finite(square), unit * tl.sqrt_rn(square), float("nan")), mask=live)
