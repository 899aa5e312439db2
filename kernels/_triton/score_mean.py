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
    position_of,
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
    COMPILED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Return keys as two tiles, cosines, sines, inverse determinants, all ``[len(offset), HALF]``, and what is known.

    The first two tiles hold the two elements of each pair that is rotated together, then those that are not rotated.
    Where a position is not in the table, the numbers mean nothing.
    """
    pair = tl.arange(0, HALF)
    rotated = pair < ROTARY // 2
    if INTERLEAVED:
        x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, 2 * HALF)
        a, b = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
    else:
        first, second = pair, pair + D // 2
        if ROTARY < D:
            first = tl.where(rotated, pair, pair + ROTARY // 2)
            second = tl.where(rotated, pair + ROTARY // 2, pair + D // 2)
            if ROTARY % 16 == 0:  # runs of eight stay together, which the compiler can't see through the choice
                first = tl.max_contiguous(tl.multiple_of(first, 8), 8)
                second = tl.max_contiguous(tl.multiple_of(second, 4), 4) if D % 8 == 0 else second
        wanted = live[:, None] & (pair < D // 2)[None, :]
        a = tl.load(pointer + offset[:, None] + first[None, :].to(tl.int64) * stride_dim, mask=wanted, other=0)
        b = tl.load(pointer + offset[:, None] + second[None, :].to(tl.int64) * stride_dim, mask=wanted, other=0)
        a, b = as_floats(as_numbers(a, DTYPE), COMPILED), as_floats(as_numbers(b, DTYPE), COMPILED)
    inside = live & (position >= 0) & (position < max_position)
    angle = cos_sin + tl.where(inside, position, 0).to(tl.int64)[:, None] * ROTARY + pair[None, :]
    wanted = inside[:, None]
    if ROTARY < 2 * HALF:
        wanted = wanted & rotated[None, :]
    cos = tl.load(angle, mask=wanted, other=1.0, eviction_policy=POLICY)
    sin = tl.load(angle + ROTARY // 2, mask=wanted, other=0.0, eviction_policy=POLICY)
    cos, sin = as_floats(cos, COMPILED), as_floats(sin, COMPILED)
    # The table may scale (YaRN) and is rounded: not a rotation exactly, so divide by its determinant.
    return a, b, cos, sin, reciprocal(cos * cos + sin * sin, COMPILED), inside


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
    COMPILED: tl.constexpr,  # for a GPU, whose own instructions may be used
    POLICY: tl.constexpr,  # which of what is in the multiprocessor's cache the table's rows are to replace
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `keydiff_kernel`, on keys as they were before RoPE."""
    request, layer, head = row_of(tl.program_id(0) // chunks if PHASE > 0 else tl.program_id(0), L, H)
    pointer = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = length_here(lengths, request, PHASE, WHOLE)
    chunk, begin, end = 0, 0, length  # known when this is compiled: that saves registers
    if PHASE > 0:
        chunk, begin, end = chunk_of(chunks, length, CHUNK)
    if partials is not None:
        partials += chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK) * 2 * HALF
    pair = tl.arange(0, HALF)

    if PHASE < 2:
        sums_a = tl.zeros([TILE, HALF], tl.float32)
        sums_b = tl.zeros([TILE, HALF], tl.float32)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            position = slot
            if positions is not None:
                position = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            a, b, cos, sin, inverse, inside = _pairs(
                pointer, offset, position, live, cos_sin, max_position, stride_dim, DTYPE, D, ROTARY, INTERLEAVED, HALF,
                COMPILED, POLICY,
            )  # fmt: skip
            # A rotation leaves lengths as they are, but for the determinant.
            square = tl.sum((a * a + b * b) * inverse, axis=1)
            good = inside & finite(square)
            scale = tl.minimum(tl.rsqrt(square), 1.0 / _MIN_NORM)
            # The second pass needs it again, and a NaN there makes the score one.
            tl.store(out + slot, tl.where(good, scale, float("nan")), mask=live)
            inverse *= tl.where(good, scale, 0.0)[:, None]
            sums_a += tl.where(good[:, None], a * cos + b * sin, 0.0) * inverse
            sums_b += tl.where(good[:, None], b * cos - a * sin, 0.0) * inverse
        anchor_a = tl.sum(sums_a, axis=0)
        anchor_b = tl.sum(sums_b, axis=0)
        if PHASE == 0:
            tl.debug_barrier()  # other threads of this program read the inverse norms
        elif begin < end:
            tl.store(partials + chunk * 2 * HALF + pair, anchor_a)
            tl.store(partials + chunk * 2 * HALF + HALF + pair, anchor_b)

    if PHASE != 1:
        if PHASE == 2:
            anchor_a = added_up(partials, length, pair, CHUNK, 2 * HALF)
            anchor_b = added_up(partials, length, pair + HALF, CHUNK, 2 * HALF)
        norm = tl.maximum(tl.sqrt_rn(tl.sum(anchor_a * anchor_a + anchor_b * anchor_b, axis=0)), _MIN_NORM)
        anchor_a /= norm
        anchor_b /= norm
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            position = slot
            if positions is not None:
                position = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            scale = tl.load(out + slot, mask=live, other=0.0)
            a, b, cos, sin, inverse, _ = _pairs(
                pointer, offset, position, live, cos_sin, max_position, stride_dim, DTYPE, D, ROTARY, INTERLEAVED, HALF,
                COMPILED, POLICY,
            )  # fmt: skip
            # The anchor's product with the key undone is the key's with the anchor turned.
            turned_a = cos * anchor_a[None, :] - sin * anchor_b[None, :]
            turned_b = sin * anchor_a[None, :] + cos * anchor_b[None, :]
            cosine = tl.sum((a * turned_a + b * turned_b) * inverse, axis=1) * scale
            tl.store(out + slot, -cosine, mask=live)


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
