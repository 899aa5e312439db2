"""Gravity: the pull of a row's newest tokens on each of its tokens."""

import triton
import triton.language as tl

from .score_tile import finite, head_pointer, load_rows, ragged_row, row_of, slot_of, slot_offset

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit(do_not_specialize=["total", "max_blocks", "window", "softening2", "L", "H"])
def gravity_kernel(
    base,
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    tables,
    lengths,
    offsets,
    mass,  # float32 [L, H, total], scratch: value norms
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
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program scores one row in three passes: means, pulls, and the division by the mean pull."""
    row = tl.program_id(0)
    request, layer, head = row_of(row, L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = keys + D * stride_dim
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    mass += first
    out += first
    if order is not None:
        order += first
    length = tl.load(lengths + request)
    window_start = tl.maximum(length - window, 0)

    # Distances do not change when all keys move together, and sums of squares lose less near the mean. The window's
    # mean is near it, and known before the pass.
    index = window_start + tl.arange(0, WINDOW)
    live = index < length
    slot = slot_of(order, index, live, order is not None)
    offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
    near = load_rows(keys, offset, live, stride_dim, D, WIDTH)
    good = live & finite(tl.sum(near * near, axis=1))
    count = tl.maximum(tl.sum(good.to(tl.int32), axis=0), 1).to(tl.float32)
    shift = tl.sum(tl.where(good[:, None], near, 0.0), axis=0) / count

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
    mean += shift
    tl.debug_barrier()  # other threads of this program read the masses

    pulls = tl.zeros([TILE], tl.float32)
    for part in range(window_start, length, WINDOW):
        near_index = part + tl.arange(0, WINDOW)
        near_live = near_index < length
        near_slot = slot_of(order, near_index, near_live, order is not None)
        near_mass = tl.load(mass + near_slot, mask=near_live, other=0.0)
        near_good = near_live & (near_mass == near_mass)
        near_mass = tl.where(near_good, near_mass * inverse_mass, 0.0)
        offset = slot_offset(table, near_slot, near_live, stride_block, stride_slot, BLOCK_SIZE)
        near = load_rows(keys, offset, near_live, stride_dim, D, WIDTH)
        near = tl.where(near_good[:, None], near - mean[None, :], 0.0)
        near_square = tl.sum(near * near, axis=1)
        last = part + WINDOW >= length
        for start in tl.range(0, length, TILE, num_stages=STAGES):
            slot = start + tl.arange(0, TILE)
            live = slot < length
            own_mass = tl.load(mass + slot, mask=live, other=0.0)
            good = live & (own_mass == own_mass)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            key = load_rows(keys, offset, live, stride_dim, D, WIDTH)
            key = tl.where(good[:, None], key - mean[None, :], 0.0)
            product = tl.dot(key, tl.trans(near), input_precision="tf32x3")
            distance = tl.sum(key * key, axis=1)[:, None] + near_square[None, :] - 2.0 * product
            distance = tl.maximum(distance, 0.0) * inverse_scale
            force = near_mass[None, :] / (distance + softening2)
            force = tl.where(slot[:, None] == near_slot[None, :], 0.0, force)
            pull = tl.where(good, tl.sum(force, axis=1) * own_mass * inverse_mass, 0.0)
            if part > window_start:
                pull += tl.load(out + slot, mask=live, other=0.0)
            tl.store(out + slot, pull, mask=live)
            pulls += tl.where(last, pull, 0.0)
        tl.debug_barrier()  # the next part, and the last pass, add to what other threads stored

    inverse_pull = 1.0 / tl.maximum(tl.sum(pulls, axis=0) / count, _TINY)
    for start in range(0, length, TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        norm = tl.load(mass + slot, mask=live, other=0.0)
        pull = tl.load(out + slot, mask=live, other=0.0) * inverse_pull
        tl.store(out + slot, tl.where(norm == norm, pull, float("nan")), mask=live)
