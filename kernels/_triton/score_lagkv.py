"""LagKV: each token's keys and values in units of the range that the next part of the sequence spans."""

import triton
import triton.language as tl

from .score_tile import finite, head_pointer, load_rows, ragged_row, row_of, slot_of, slot_offset


@triton.jit
def _spread(x, low, high, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sample standard deviation over the D channels of ``(x - low) / (high - low)``.

    A channel in which the next part does not vary has no unit, and counts as zero.
    """
    width = high - low
    # Comparisons of NaN and infinity are false, so that an empty part and an overflow count as no unit, too.
    inverse = tl.where((width > 0.0) & (width < float("inf")), 1.0 / width, 0.0)
    unit = tl.where(inverse[None, :] > 0.0, (x - low[None, :]) * inverse[None, :], 0.0)
    mean = tl.sum(unit, axis=1) / D
    off = unit - mean[:, None]
    if WIDTH > D:
        off = tl.where((tl.arange(0, WIDTH) < D)[None, :], off, 0.0)
    return tl.sqrt_rn(tl.sum(off * off, axis=1) / (D - 1))


@triton.jit
def _softmax(x, good):
    x = tl.where(good, x, float("-inf"))
    high = tl.max(x, axis=0)
    e = tl.where(good, tl.exp(x - tl.where(high > float("-inf"), high, 0.0)), 0.0)
    total = tl.sum(e, axis=0)
    return e / tl.where(total > 0.0, total, 1.0)


@triton.jit(do_not_specialize=["total", "max_blocks", "sinks", "L", "H"])
def lagkv_kernel(
    base,
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    tables,
    lengths,
    offsets,
    scratch,  # float32 [2, L, H, total]
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    sinks,
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    LAG: tl.constexpr,
    PART: tl.constexpr,  # LAG, rounded up to a power of two
    RANKED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program scores one row, from its last part to its first, so that each key and value is read once."""
    row = tl.program_id(0)
    request, layer, head = row_of(row, L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = keys + D * stride_dim
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    key_spreads = scratch + first  # and later the scores, by logical order
    value_spreads = scratch + (L * H).to(tl.int64) * total + first
    out += first
    if order is not None:
        order += first
    length = tl.load(lengths + request)
    parts = tl.maximum(length - sinks, 0) // LAG
    scored = tl.where(parts > 1, sinks + (parts - 1) * LAG, 0)  # end of the last part that has one after it

    low_key = tl.full([WIDTH], float("inf"), tl.float32)
    high_key = tl.full([WIDTH], float("-inf"), tl.float32)
    low_value = tl.full([WIDTH], float("inf"), tl.float32)
    high_value = tl.full([WIDTH], float("-inf"), tl.float32)
    lane = tl.arange(0, PART)
    for back in range(tl.where(parts > 1, parts, 0)):
        part = parts - 1 - back
        begin = sinks + part * LAG
        lows_key = tl.full([TILE, WIDTH], float("inf"), tl.float32)
        highs_key = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
        lows_value = tl.full([TILE, WIDTH], float("inf"), tl.float32)
        highs_value = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
        for start in tl.range(0, LAG, TILE, num_stages=STAGES):
            index = start + tl.arange(0, TILE)
            live = index < LAG
            index += begin
            slot = slot_of(order, index, live, order is not None)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            key = load_rows(keys, offset, live, stride_dim, D, WIDTH)
            value = load_rows(values, offset, live, stride_dim, D, WIDTH)
            good = live & finite(tl.sum(key * key, axis=1)) & finite(tl.sum(value * value, axis=1))
            if back > 0:
                spread = _spread(key, low_key, high_key, D, WIDTH)
                tl.store(key_spreads + index, tl.where(good, spread, float("nan")), mask=live)
                spread = _spread(value, low_value, high_value, D, WIDTH)
                tl.store(value_spreads + index, tl.where(good, spread, float("nan")), mask=live)
            lows_key = tl.minimum(lows_key, tl.where(good[:, None], key, float("inf")))
            highs_key = tl.maximum(highs_key, tl.where(good[:, None], key, float("-inf")))
            lows_value = tl.minimum(lows_value, tl.where(good[:, None], value, float("inf")))
            highs_value = tl.maximum(highs_value, tl.where(good[:, None], value, float("-inf")))
        low_key = tl.min(lows_key, axis=0)
        high_key = tl.max(highs_key, axis=0)
        low_value = tl.min(lows_value, axis=0)
        high_value = tl.max(highs_value, axis=0)
        if back > 0:
            tl.debug_barrier()  # all threads read the spreads that each of them stored
            live = lane < LAG
            key_spread = tl.load(key_spreads + begin + lane, mask=live, other=float("nan"))
            value_spread = tl.load(value_spreads + begin + lane, mask=live, other=float("nan"))
            good = key_spread == key_spread
            score = (_softmax(key_spread, good) + _softmax(value_spread, good)) * 0.5
            score = tl.where(good, score, float("nan"))
            if RANKED:
                tl.debug_barrier()
                tl.store(key_spreads + begin + lane, score, mask=live)
                tl.debug_barrier()
                below = tl.zeros([PART], tl.int32)
                for start in range(0, LAG, 16):
                    other = start + tl.arange(0, 16)
                    other_score = tl.load(key_spreads + begin + other, mask=other < LAG, other=float("nan"))
                    worse = other_score[None, :] < score[:, None]
                    tie = (other_score[None, :] == score[:, None]) & (other[None, :] > lane[:, None])
                    below += tl.sum((worse | tie).to(tl.int32), axis=1)
                score = tl.where(good, below.to(tl.float32) / LAG, float("nan"))
            slot = slot_of(order, begin + lane, live, order is not None)
            tl.store(out + slot, score, mask=live)

    # What has no part after it stays: the sinks and the tail; of a short sequence, the newest.
    for start in range(0, length, PART):
        index = start + lane
        live = (index < length) & ((index < sinks) | (index >= scored))
        age = (index - sinks).to(tl.float32) / tl.maximum(length - sinks, 1).to(tl.float32)
        slot = slot_of(order, index, live, order is not None)
        tl.store(out + slot, tl.where((index < sinks) | (parts > 1), 1.0, age), mask=live)
