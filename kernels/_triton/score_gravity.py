"""Gravity: the pull of a row's newest tokens on each of its tokens."""

import triton
import triton.language as tl

from .score_tile import finite, head_pointer, load_rows, ragged_row, row_of, slot_of, slot_offset, values_of

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def _centred(keys, offset, good, columns, inside, centre, stride_dim):
    """Return some columns of keys minus their mean, float32 ``[len(offset), len(columns)]``; zero where not good."""
    wanted = good[:, None] & inside[None, :]
    key = tl.load(keys + offset[:, None] + columns[None, :].to(tl.int64) * stride_dim, mask=wanted, other=0.0).to(
        tl.float32
    )
    return tl.where(wanted, key - centre[None, :], 0.0)


@triton.jit(do_not_specialize=["total", "max_blocks", "window", "softening2", "L", "H"])
def gravity_kernel(
    base,
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    tables,
    lengths,
    offsets,
    mass,  # float32 [L, H, total], scratch: value norms
    means,  # float32 [R, L, H, WIDTH], scratch
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    window,
    softening2,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,  # window slots that are held at a time; the row is streamed once for each such part
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,  # slots at a time in the first pass
    PULLED: tl.constexpr,  # slots at a time in the second pass
    CHANNELS: tl.constexpr,  # of keys at a time there
    STAGES: tl.constexpr,
):
    """One program scores one row in three passes: means, pulls, and the division by the mean pull."""
    row = tl.program_id(0)
    request, layer, head = row_of(row, L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = values_of(keys, stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    mass += first
    out += first
    means += row.to(tl.int64) * WIDTH
    if order is not None:
        order += first
    length = tl.load(lengths + request)
    window_start = tl.maximum(length - window, 0)

    # Distances do not change when all keys move together, and sums of squares lose less near the mean. The window's
    # mean is near it, and known before the pass.
    near_index = window_start + tl.arange(0, WINDOW)
    near_live = near_index < length
    near_slot = slot_of(order, near_index, near_live, order is not None)
    near_offset = slot_offset(table, near_slot, near_live, stride_block, stride_slot, BLOCK_SIZE)
    near_key = load_rows(keys, near_offset, near_live, stride_dim, D, WIDTH)
    near_good = near_live & finite(tl.sum(near_key * near_key, axis=1))
    near_count = tl.maximum(tl.sum(near_good.to(tl.int32), axis=0), 1).to(tl.float32)
    shift = tl.sum(tl.where(near_good[:, None], near_key, 0.0), axis=0) / near_count

    sums = tl.zeros([TILE, WIDTH], tl.float32)
    squares = tl.zeros([TILE], tl.float32)
    masses = tl.zeros([TILE], tl.float32)
    counts = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
        value = load_rows(values, offset, live, stride_dim, D, WIDTH)
        key = load_rows(keys, offset, live, stride_dim, D, WIDTH)
        value_square = tl.sum(value * value, axis=1)
        good = live & finite(value_square) & finite(tl.sum(key * key, axis=1))
        norm = tl.where(good, tl.sqrt_rn(value_square), 0.0)
        tl.store(mass + slot, tl.where(good, norm, float("nan")), mask=live)
        key = tl.where(good[:, None], key - shift[None, :], 0.0)
        sums += key
        squares += tl.sum(key * key, axis=1)
        masses += norm
        counts += good.to(tl.int32)
    count = tl.maximum(tl.sum(counts, axis=0), 1).to(tl.float32)
    mean = tl.sum(sums, axis=0) / count
    spread = tl.sum(squares, axis=0) / count - tl.sum(mean * mean, axis=0)
    inverse_scale = 1.0 / tl.maximum(2.0 * spread, _TINY)
    inverse_mass = 1.0 / tl.maximum(tl.sum(masses, axis=0) / count, _TINY)
    tl.store(means + tl.arange(0, WIDTH), mean + shift)
    tl.debug_barrier()  # other threads of this program read masses and means

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
        for start in range(0, length, PULLED):
            pulled = start + tl.arange(0, PULLED)
            pulled_live = pulled < length
            own_mass = tl.load(mass + pulled, mask=pulled_live, other=0.0)
            pulled_good = pulled_live & (own_mass == own_mass)
            pulled_offset = slot_offset(table, pulled, pulled_live, stride_block, stride_slot, BLOCK_SIZE)
            # Some channels at a time. The window's keys come from the cache next to the processor from the second
            # tile on: to hold them all in registers, as a matrix product would, takes more than there are.
            product = tl.zeros([PULLED, WINDOW], tl.float32)
            pulled_square = tl.zeros([PULLED], tl.float32)
            near_square = tl.zeros([WINDOW], tl.float32)
            for channel in tl.range(0, D, CHANNELS, num_stages=STAGES):
                columns = channel + tl.arange(0, CHANNELS)
                inside = columns < D
                centre = tl.load(means + columns, mask=inside, other=0.0)
                near = _centred(keys, near_offset, near_good, columns, inside, centre, stride_dim)
                own = _centred(keys, pulled_offset, pulled_good, columns, inside, centre, stride_dim)
                product = tl.dot(own, tl.trans(near), product, input_precision="tf32x3")
                near_square += tl.sum(near * near, axis=1)
                pulled_square += tl.sum(own * own, axis=1)
            distance = tl.maximum(pulled_square[:, None] + near_square[None, :] - 2.0 * product, 0.0)
            force = near_mass[None, :] / (distance * inverse_scale + softening2)
            force = tl.where(pulled[:, None] == near_slot[None, :], 0.0, force)
            pull = tl.where(pulled_good, tl.sum(force, axis=1) * own_mass * inverse_mass, 0.0)
            if part > window_start:
                pull += tl.load(out + pulled, mask=pulled_live, other=0.0)
            tl.store(out + pulled, pull, mask=pulled_live)
            pulls += tl.where(last, pull, 0.0)
        tl.debug_barrier()  # the next part, and the last pass, add to what other threads stored

    inverse_pull = 1.0 / tl.maximum(tl.sum(pulls, axis=0) / count, _TINY)
    for start in range(0, length, TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        norm = tl.load(mass + slot, mask=live, other=0.0)
        pull = tl.load(out + slot, mask=live, other=0.0) * inverse_pull
        tl.store(out + slot, tl.where(norm == norm, pull, float("nan")), mask=live)
