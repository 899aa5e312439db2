"""LagKV: each token's keys and values in units of the range that the next part of the sequence spans."""

import triton
import triton.language as tl

from .score_tile import finite, head_pointer, load_rows, ragged_row, row_of, slot_of, slot_offset, values_of


@triton.jit
def _unit(lows, highs):
    """Return each channel's minimum and the inverse of its range; zeros where it does not vary."""
    low = tl.min(lows, axis=0)
    width = tl.max(highs, axis=0) - low
    # False for NaN and infinity, too: nothing was finite, or the range is not.
    varies = (width > 0.0) & (width < float("inf"))
    return tl.where(varies, low, 0.0), tl.where(varies, 1.0 / tl.where(varies, width, 1.0), 0.0)


@triton.jit
def _spread(x, low, inverse, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sample standard deviation over D channels of ``(x - low) * inverse``."""
    unit = (x - low[None, :]) * inverse[None, :]
    off = unit - (tl.sum(unit, axis=1) / D)[:, None]
    if WIDTH > D:
        off = tl.where((tl.arange(0, WIDTH) < D)[None, :], off, 0.0)
    return tl.sqrt_rn(tl.sum(off * off, axis=1) / (D - 1))


@triton.jit
def _softmax(x, good):
    high = tl.max(tl.where(good, x, float("-inf")), axis=0)
    e = tl.where(good, tl.exp(tl.where(good, x - high, 0.0)), 0.0)
    return e / tl.maximum(tl.sum(e, axis=0), 1.0)  # the highest alone adds 1


@triton.jit(do_not_specialize=["total", "max_blocks", "sinks", "splits", "L", "H"])
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
    splits,  # programs that share a row, part by part
    L,
    H,
    stride_block,
    stride_head,
    stride_slot,
    stride_dim,
    LAG: tl.constexpr,
    PART: tl.constexpr,  # LAG, rounded up to a power of two
    CHUNK: tl.constexpr,
    RANKED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Ranges of the next part, spreads of a part within them, softmax and ranks; one part after the other."""
    program = tl.program_id(0)
    split = program % splits
    request, layer, head = row_of(program // splits, L, H)
    keys = head_pointer(base, layer, head, stride_head, DTYPE, ALIGNED)
    values = values_of(keys, stride_dim, D)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    key_spreads = scratch + first  # by logical order, as are the next; later the scores
    value_spreads = key_spreads + (L * H).to(tl.int64) * total
    out += first
    if order is not None:
        order += first
    length = tl.load(lengths + request)
    parts = tl.maximum(length - sinks, 0) // LAG
    lane = tl.arange(0, PART)

    for part in range(split, parts - 1, splits):
        begin = sinks + part * LAG
        low_keys = tl.full([TILE, WIDTH], float("inf"), tl.float32)
        high_keys = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
        low_values = tl.full([TILE, WIDTH], float("inf"), tl.float32)
        high_values = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
        for start in tl.range(LAG, 2 * LAG, TILE, num_stages=STAGES):
            index = start + tl.arange(0, TILE)
            live = index < 2 * LAG
            slot = slot_of(order, begin + index, live, order is not None)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            key = load_rows(keys, offset, live, stride_dim, DTYPE, D, WIDTH)
            value = load_rows(values, offset, live, stride_dim, DTYPE, D, WIDTH)
            good = live & finite(tl.sum(key * key, axis=1)) & finite(tl.sum(value * value, axis=1))
            low_keys = tl.where(good[:, None], tl.minimum(low_keys, key), low_keys)
            high_keys = tl.where(good[:, None], tl.maximum(high_keys, key), high_keys)
            low_values = tl.where(good[:, None], tl.minimum(low_values, value), low_values)
            high_values = tl.where(good[:, None], tl.maximum(high_values, value), high_values)
        low_key, key_unit = _unit(low_keys, high_keys)
        low_value, value_unit = _unit(low_values, high_values)
        for start in tl.range(0, LAG, TILE, num_stages=STAGES):
            index = start + tl.arange(0, TILE)
            live = index < LAG
            slot = slot_of(order, begin + index, live, order is not None)
            offset = slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)
            key = load_rows(keys, offset, live, stride_dim, DTYPE, D, WIDTH)
            value = load_rows(values, offset, live, stride_dim, DTYPE, D, WIDTH)
            good = finite(tl.sum(key * key, axis=1)) & finite(tl.sum(value * value, axis=1))
            spread = _spread(key, low_key, key_unit, D, WIDTH)
            tl.store(key_spreads + begin + index, tl.where(good, spread, float("nan")), mask=live)
            spread = _spread(value, low_value, value_unit, D, WIDTH)
            tl.store(value_spreads + begin + index, tl.where(good, spread, float("nan")), mask=live)

        tl.debug_barrier()  # what follows reads what other threads of this program stored
        live = lane < LAG
        key_spread = tl.load(key_spreads + begin + lane, mask=live, other=float("nan"))
        value_spread = tl.load(value_spreads + begin + lane, mask=live, other=float("nan"))
        good = (key_spread == key_spread) & (value_spread == value_spread)
        score = tl.where(good, (_softmax(key_spread, good) + _softmax(value_spread, good)) * 0.5, float("nan"))
        if RANKED:
            tl.debug_barrier()
            tl.store(key_spreads + begin + lane, score, mask=live)
            tl.debug_barrier()
            # Compared with itself a score must be equal, but the compiler may compute it once for each layout, and its
            # sums differ in the last bit then: compare what was stored.
            score = tl.load(key_spreads + begin + lane, mask=live, other=float("nan"))
            below = tl.zeros([PART], tl.int32)
            for start in range(0, LAG, CHUNK):
                other = start + tl.arange(0, CHUNK)
                other_score = tl.load(key_spreads + begin + other, mask=other < LAG, other=float("nan"))
                tie = (other_score[None, :] == score[:, None]) & (other[None, :] > lane[:, None])
                below += tl.sum(((other_score[None, :] < score[:, None]) | tie).to(tl.int32), axis=1)
            score = tl.where(good, tl.div_rn(below.to(tl.float32), tl.full([PART], LAG, tl.float32)), float("nan"))
        slot = slot_of(order, begin + lane, live, order is not None)
        tl.store(out + slot, score, mask=live)

    # What has no part after it stays: the sinks and the tail; of a short sequence, the newest.
    scored = tl.where(parts > 1, sinks + (parts - 1) * LAG, 0)
    for start in range(split * PART, length, splits * PART):
        index = start + lane
        live = (index < length) & ((index < sinks) | (index >= scored))
        # Rounded as everywhere else: a plain division is approximate on GPUs.
        rest = tl.maximum(length - sinks, 1).to(tl.float32)
        recency = tl.div_rn((index - sinks).to(tl.float32), tl.zeros([PART], tl.float32) + rest)
        slot = slot_of(order, index, live, order is not None)
        tl.store(out + slot, tl.where((index < sinks) | (parts > 1), 1.0, recency), mask=live)
