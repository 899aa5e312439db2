"""Gravity: the pull of a row's newest tokens on each of its tokens.

Three passes: sums over the row, pulls, and the division by the mean pull. A row of up to WHOLE slots has one program
that makes all of them (phase 0); for longer ones each is a launch (phases 1 to 3) in which a program has one chunk of a
row, as in score_mean.py.
"""

import triton
import triton.language as tl

from .score_tile import (
    added_up,
    chunk_index,
    chunk_of,
    finite,
    head_pointer,
    length_here,
    load_elements,
    load_runs,
    one_added_up,
    ragged_row,
    row_of,
    slot_of,
    slot_offset,
    sum_of_runs,
    values_of,
)

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def _shifted(keys, offset, good, columns, inside, shift, stride_dim):
    """Return some columns of keys minus ``shift``, float32 ``[len(offset), len(columns)]``; zero where not good."""
    wanted = good[:, None] & inside[None, :]
    key = tl.load(keys + offset[:, None] + columns[None, :].to(tl.int64) * stride_dim, mask=wanted, other=0.0).to(
        tl.float32
    )
    return tl.where(wanted, key - shift[None, :], 0.0)


@triton.jit(do_not_specialize=["total", "max_blocks", "window", "softening2", "chunks", "partial_rows", "L", "H"])
def gravity_kernel(
    base,
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    tables,
    lengths,
    offsets,
    partials,  # float32 [L, H, partial_rows, WIDTH + 4]: of each chunk sums of keys, squares, masses, count, pulls
    scratch,  # float32 [2, L, H, total]: value norms, and squared distances of keys from the shift
    shifts,  # float32 [programs, WIDTH], scratch; None unless SPLIT
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    window,
    softening2,
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
    WINDOW: tl.constexpr,  # window slots that are held at a time; the row is streamed once for each such part
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,  # slots at a time in the first pass
    PULLED: tl.constexpr,  # slots at a time in the second pass
    SPLIT: tl.constexpr,  # keys are float32: too wide for a matrix product, which takes them apart some at a time
    CHANNELS: tl.constexpr,  # of keys at a time if SPLIT
    SCALE: tl.constexpr,  # a power of two, by which differences of keys fit the keys' type
    STAGES: tl.constexpr,
    RUNS: tl.constexpr,  # of channels, see `load_runs`
):
    """The pull of the window on each token, in units of the row's mean pull."""
    request, layer, head = row_of(tl.program_id(0) // chunks if PHASE > 0 else tl.program_id(0), L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = values_of(keys, stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    mass = scratch + first
    square = mass + (L * H).to(tl.int64) * total
    out += first
    if order is not None:
        order += first
    length = length_here(lengths, request, PHASE, WHOLE)
    window_start = tl.maximum(length - window, 0)
    chunk, begin, end = 0, 0, length  # known when this is compiled: that saves registers, but not for the widest keys
    if PHASE > 0 or WIDTH > 128:
        chunk, begin, end = chunk_of(chunks, length, CHUNK)
    partial: tl.constexpr = WIDTH + 4
    if partials is not None:
        partials += chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK) * partial
    column = tl.arange(0, WIDTH)

    if PHASE < 3:
        # Distances do not change when all keys move together, and sums of squares lose less near the mean. The
        # window's mean is near it, and known before the first pass.
        near_index = window_start + tl.arange(0, WINDOW)
        near_live = near_index < length
        near_slot = slot_of(order, near_index, near_live, order is not None)
        near_offset = slot_offset(table, near_slot, near_live, stride_block, stride_slot, BLOCK_SIZE)
        newest = load_runs(keys, near_offset, near_live, stride_dim, DTYPE, D, WIDTH, RUNS)
        near_good = near_live & finite(sum_of_runs(newest * newest))
        near_count = tl.maximum(tl.sum(near_good.to(tl.int32), axis=0), 1).to(tl.float32)
        run_shift = tl.sum(tl.where(near_good[:, None, None], newest, 0.0), axis=0) / near_count
        shift = tl.reshape(run_shift, [WIDTH])

    if PHASE < 2:
        sums = tl.zeros([TILE, RUNS, WIDTH // RUNS], tl.float32)
        squares = tl.zeros([TILE], tl.float32)
        masses = tl.zeros([TILE], tl.float32)
        counts = tl.zeros([TILE], tl.int32)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < end
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            value = load_runs(values, offset, live, stride_dim, DTYPE, D, WIDTH, RUNS)
            key = load_runs(keys, offset, live, stride_dim, DTYPE, D, WIDTH, RUNS)
            value_square = sum_of_runs(value * value)
            good = live & finite(value_square) & finite(sum_of_runs(key * key))
            norm = tl.where(good, tl.sqrt_rn(value_square), 0.0)
            tl.store(mass + slot, tl.where(good, norm, float("nan")), mask=live)
            key = tl.where(good[:, None, None], key - run_shift[None, :, :], 0.0)
            key_square = sum_of_runs(key * key)
            tl.store(square + slot, key_square, mask=live)
            sums += key
            squares += key_square
            masses += norm
            counts += good.to(tl.int32)
        mean = tl.reshape(tl.sum(sums, axis=0), [WIDTH])
        mean_square = tl.sum(squares, axis=0)
        mean_mass = tl.sum(masses, axis=0)
        count = tl.sum(counts, axis=0).to(tl.float32)
        if PHASE == 0:
            tl.debug_barrier()  # other threads of this program read masses and squares
        elif begin < end:
            partials_here = partials + chunk * partial
            tl.store(partials_here + column, mean)
            tl.store(partials_here + WIDTH, mean_square)
            tl.store(partials_here + WIDTH + 1, mean_mass)
            tl.store(partials_here + WIDTH + 2, count)

    if PHASE == 0 or PHASE == 2:
        if PHASE == 2:
            mean = added_up(partials, length, column, CHUNK, partial)
            mean_square = one_added_up(partials, length, WIDTH, CHUNK, partial)
            mean_mass = one_added_up(partials, length, WIDTH + 1, CHUNK, partial)
            count = one_added_up(partials, length, WIDTH + 2, CHUNK, partial)
        count = tl.maximum(count, 1.0)
        mean = mean / count
        spread = mean_square / count - tl.sum(mean * mean, axis=0)
        inverse_scale = 1.0 / tl.maximum(2.0 * spread, _TINY)
        inverse_mass = 1.0 / tl.maximum(mean_mass / count, _TINY)
        if SPLIT:
            shifts += tl.program_id(0).to(tl.int64) * WIDTH
            tl.store(shifts + column, shift)
            tl.debug_barrier()  # other threads of this program read it

        pulls = tl.zeros([PULLED], tl.float32)
        for part in range(window_start, length, WINDOW):
            last = part + WINDOW >= length
            near_index = part + tl.arange(0, WINDOW)
            near_live = near_index < length
            near_slot = slot_of(order, near_index, near_live, order is not None)
            near_offset = slot_offset(table, near_slot, near_live, stride_block, stride_slot, BLOCK_SIZE)
            near_mass = tl.load(mass + near_slot, mask=near_live, other=0.0)
            near_good = near_live & (near_mass == near_mass)
            near_mass = tl.where(near_good, near_mass * inverse_mass, 0.0)
            # Distances in units of the scale, and softened; what depends on one of the two tokens alone beforehand.
            near_square = tl.load(square + near_slot, mask=near_good, other=0.0) * inverse_scale + softening2
            if not SPLIT:
                # The keys of the row enter the product as they are, those of the window, from which the shift is
                # subtracted, as the sum of two numbers of the same type: together nearly as exact as float32.
                near_keys = load_elements(keys, near_offset, near_live, stride_dim, DTYPE, D, WIDTH)
                near = tl.where(near_good[:, None], near_keys.to(tl.float32) - shift[None, :], 0.0) * SCALE
                high = near.to(near_keys.dtype)
                low = (near - high.to(tl.float32)).to(near_keys.dtype)
                of_shift = tl.sum((high.to(tl.float32) + low.to(tl.float32)) * shift[None, :], axis=1)
                near_square += of_shift * (2.0 / SCALE * inverse_scale)
            for start in tl.range(begin, end, PULLED, num_stages=STAGES):
                pulled = start + tl.arange(0, PULLED)
                pulled_live = pulled < end
                own_mass = tl.load(mass + pulled, mask=pulled_live, other=0.0)
                own_square = tl.load(square + pulled, mask=pulled_live, other=0.0) * inverse_scale
                pulled_good = pulled_live & (own_mass == own_mass)
                pulled_offset = slot_offset(table, pulled, pulled_live, stride_block, stride_slot, BLOCK_SIZE)
                if SPLIT:
                    product = tl.zeros([PULLED, WINDOW], tl.float32)
                    for channel in tl.range(0, D, CHANNELS, num_stages=STAGES):
                        columns = channel + tl.arange(0, CHANNELS)
                        inside = columns < D
                        by = tl.load(shifts + columns, mask=inside, other=0.0)
                        some_near = _shifted(keys, near_offset, near_good, columns, inside, by, stride_dim)
                        some_own = _shifted(keys, pulled_offset, pulled_good, columns, inside, by, stride_dim)
                        product = tl.dot(some_own, tl.trans(some_near), product, input_precision="tf32x3")
                else:
                    own = load_elements(keys, pulled_offset, pulled_live, stride_dim, DTYPE, D, WIDTH)
                    product = tl.dot(own, tl.trans(high))
                    product = tl.dot(own, tl.trans(low), product)
                factor = 2.0 * inverse_scale if SPLIT else 2.0 / SCALE * inverse_scale
                distance = own_square[:, None] + near_square[None, :] - factor * product
                force = near_mass[None, :] / tl.maximum(distance, softening2)
                force = tl.where(pulled[:, None] == near_slot[None, :], 0.0, force)
                pull = tl.where(pulled_good, tl.sum(force, axis=1) * own_mass * inverse_mass, 0.0)
                if part > window_start:
                    pull += tl.load(out + pulled, mask=pulled_live, other=0.0)
                tl.store(out + pulled, pull, mask=pulled_live)
                pulls += tl.where(last, pull, 0.0)
            tl.debug_barrier()  # the next part, and the last pass, add to what other threads stored
        mean_pull = tl.sum(pulls, axis=0)
        if PHASE == 2:  # noqa: SIM102 (known when this is compiled)
            if begin < end:
                tl.store(partials + chunk * partial + WIDTH + 3, mean_pull)

    if PHASE == 0 or PHASE == 3:
        if PHASE == 3:
            mean_pull = one_added_up(partials, length, WIDTH + 3, CHUNK, partial)
            count = tl.maximum(one_added_up(partials, length, WIDTH + 2, CHUNK, partial), 1.0)
        inverse_pull = 1.0 / tl.maximum(mean_pull / count, _TINY)
        for start in range(begin, end, PULLED):
            slot = start + tl.arange(0, PULLED)
            live = slot < end
            norm = tl.load(mass + slot, mask=live, other=0.0)
            pull = tl.load(out + slot, mask=live, other=0.0) * inverse_pull
            tl.store(out + slot, tl.where(norm == norm, pull, float("nan")), mask=live)
