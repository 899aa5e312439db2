"""LagKV: each token's keys and values in units of the range that the next part of the sequence spans.

A program walks its parts over the keys and then over the values, each of them twice: in the range of the next part a
part's variances are measured, of which it takes sums in one pass. That has no eye for numbers that are not finite, but
they show in what comes out. A last walk over the variances, which are small, makes scores and ranks of them, and
repeats with care, token by token, what was not finite or came before such a part.
"""

import triton
import triton.language as tl

from .score_tile import (
    finite,
    head_pointer,
    load_rows,
    load_runs,
    ragged_row,
    row_of,
    slot_of,
    slot_offset,
    values_of,
)

# Of numbers, and of sums of squares in units of ranges, if they are to be trusted: then no square overflows.
_LARGE = tl.constexpr(2.0**40)
_SQUARES = tl.constexpr(2.0**32)


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
    """Return the sample variance over D channels of ``(x - low) * inverse``."""
    unit = (x - low[None, :]) * inverse[None, :]
    off = unit - (tl.sum(unit, axis=1) / D)[:, None]
    if WIDTH > D:
        off = tl.where((tl.arange(0, WIDTH) < D)[None, :], off, 0.0)
    return tl.sum(off * off, axis=1) / (D - 1)


@triton.jit
def _softmax(x, good):
    high = tl.max(tl.where(good, x, float("-inf")), axis=0)
    e = tl.where(good, tl.exp(tl.where(good, x - high, 0.0)), 0.0)
    return e / tl.maximum(tl.sum(e, axis=0), 1.0)  # the highest alone adds 1


@triton.jit
def _offset(order, table, index, live, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Return where in the cache the tokens are that come at these places in the sequence."""
    slot = slot_of(order, index, live, order is not None)
    return slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE)


@triton.jit
def _store_spreads(
    pointer,
    order,
    table,
    spreads,
    sinks,
    first,
    end,
    stride_block,
    stride_slot,
    stride_dim,
    LAG: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    RUNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store the squared spreads of the parts [first, end) of keys or values.

    If something is not finite in one of these parts or the next one, or so large that its square may not be, then some
    squared spread is NaN of that part or the one before it.
    """
    inside = tl.arange(0, WIDTH) < D
    for part in range(first, end):
        begin = sinks + part * LAG
        lows = tl.full([TILE, WIDTH], float("inf"), tl.float32)
        highs = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
        for start in tl.range(LAG, 2 * LAG, TILE, num_stages=STAGES):
            index = start + tl.arange(0, TILE)
            live = index < 2 * LAG
            offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
            x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
            if LAG % TILE > 0:
                lows = tl.minimum(lows, tl.where(live[:, None], x, float("inf")))
                highs = tl.maximum(highs, tl.where(live[:, None], x, float("-inf")))
            else:
                lows = tl.minimum(lows, x)
                highs = tl.maximum(highs, x)
        low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
        width = high - low
        inverse = tl.where(width > 0.0, 1.0 / tl.where(width > 0.0, width, 1.0), 0.0)
        # In units of the range, from its middle: sums and sums of squares lose nothing where all are near 0.
        shift = tl.where(width > 0.0, -(low + 0.5 * width) * inverse, tl.where(inside, -0.5, 0.0))
        # Not so large that squares could overflow, nor all NaN.
        shift = tl.where((low > -_LARGE) & (high < _LARGE), shift, float("nan"))
        # In runs of channels of which a thread has several: fewer threads have to add up what they have of a slot.
        inverse = tl.reshape(inverse, [1, RUNS, WIDTH // RUNS])
        shift = tl.reshape(shift, [1, RUNS, WIDTH // RUNS])
        for start in tl.range(0, LAG, TILE, num_stages=STAGES):
            index = start + tl.arange(0, TILE)
            live = index < LAG
            offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
            x = load_runs(pointer, offset, live, stride_dim, DTYPE, D, WIDTH, RUNS)
            unit = x * inverse + shift
            total = tl.sum(tl.sum(unit, axis=2), axis=1)
            squares = tl.sum(tl.sum(unit * unit, axis=2), axis=1)
            spread = tl.where(squares < _SQUARES, squares - total * total * (1.0 / D), float("nan"))
            spread = tl.maximum(spread * (1.0 / (D - 1)), 0.0, tl.PropagateNan.ALL)
            tl.store(spreads + begin + index, spread, mask=live)
    # Of the first part no range was taken here, and of what follows the last one nothing else.
    if first < end:
        square = tl.zeros([TILE], tl.float32)
        for begin in range(sinks + first * LAG, sinks + (end + 1) * LAG, (end - first) * LAG):
            for start in tl.range(0, LAG, TILE, num_stages=STAGES):
                index = start + tl.arange(0, TILE)
                live = index < LAG
                offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
                x = load_rows(pointer, offset, live, stride_dim, DTYPE, D, WIDTH)
                square += tl.sum(x * x, axis=1)
        if not finite(tl.sum(square, axis=0)):
            tl.debug_barrier()  # other threads may have stored what is replaced
            tl.store(spreads + sinks + first * LAG, float("nan"))
            tl.store(spreads + sinks + (end - 1) * LAG, float("nan"))


@triton.jit
def _store_spreads_of_part(
    keys,
    values,
    order,
    table,
    key_spreads,
    value_spreads,
    begin,
    stride_block,
    stride_slot,
    stride_dim,
    LAG: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store the squared spreads of the part that begins there, whatever is in it and after it: NaN where not finite."""
    low_keys = tl.full([TILE, WIDTH], float("inf"), tl.float32)
    high_keys = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
    low_values = tl.full([TILE, WIDTH], float("inf"), tl.float32)
    high_values = tl.full([TILE, WIDTH], float("-inf"), tl.float32)
    for start in tl.range(LAG, 2 * LAG, TILE, num_stages=STAGES):
        index = start + tl.arange(0, TILE)
        live = index < 2 * LAG
        offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
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
        offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
        key = load_rows(keys, offset, live, stride_dim, DTYPE, D, WIDTH)
        value = load_rows(values, offset, live, stride_dim, DTYPE, D, WIDTH)
        good = finite(tl.sum(key * key, axis=1)) & finite(tl.sum(value * value, axis=1))
        spread = _spread(key, low_key, key_unit, D, WIDTH)
        tl.store(key_spreads + begin + index, tl.where(good, spread, float("nan")), mask=live)
        spread = _spread(value, low_value, value_unit, D, WIDTH)
        tl.store(value_spreads + begin + index, tl.where(good, spread, float("nan")), mask=live)


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
    RUNS: tl.constexpr,
    STAGES: tl.constexpr,
    CAREFUL: tl.constexpr,  # slots at a time where a part is read with care
    CAREFUL_STAGES: tl.constexpr,
):
    """Spreads of each part within the ranges of the next one, their softmax, and ranks."""
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

    per_split = (tl.maximum(parts - 1, 0) + splits - 1) // splits
    first_part = tl.minimum(split * per_split, tl.maximum(parts - 1, 0))
    end_part = tl.minimum(first_part + per_split, tl.maximum(parts - 1, 0))
    live = lane < LAG

    for which in tl.static_range(2):
        _store_spreads(
            keys if which == 0 else values, order, table, key_spreads if which == 0 else value_spreads, sinks,
            first_part, end_part, stride_block, stride_slot, stride_dim, LAG, D, WIDTH, BLOCK_SIZE, DTYPE, TILE, RUNS,
            STAGES,
        )  # fmt: skip
    tl.debug_barrier()  # what follows reads what other threads of this program stored

    unsure_before = 0
    for part in range(first_part, end_part):
        begin = sinks + part * LAG
        here = tl.load(key_spreads + begin + lane, mask=live, other=0.0)
        here += tl.load(value_spreads + begin + lane, mask=live, other=0.0)
        wanted = live & (begin + LAG + lane < sinks + end_part * LAG)
        after = tl.load(key_spreads + begin + LAG + lane, mask=wanted, other=0.0)
        after += tl.load(value_spreads + begin + LAG + lane, mask=wanted, other=0.0)
        unsure_here = tl.sum((here != here).to(tl.int32), axis=0)
        unsure_after = tl.sum((after != after).to(tl.int32), axis=0)
        careful = unsure_before + unsure_here + unsure_after > 0
        unsure_before = unsure_here
        if careful:
            _store_spreads_of_part(
                keys, values, order, table, key_spreads, value_spreads, begin,
                stride_block, stride_slot, stride_dim, LAG, D, WIDTH, BLOCK_SIZE, DTYPE, CAREFUL, CAREFUL_STAGES,
            )  # fmt: skip
            tl.debug_barrier()
        key_spread = tl.sqrt_rn(tl.load(key_spreads + begin + lane, mask=live, other=float("nan")))
        value_spread = tl.sqrt_rn(tl.load(value_spreads + begin + lane, mask=live, other=float("nan")))
        good = (key_spread == key_spread) & (value_spread == value_spread)
        score = tl.where(good, (_softmax(key_spread, good) + _softmax(value_spread, good)) * 0.5, float("nan"))
        if RANKED:
            tl.debug_barrier()
            tl.store(key_spreads + begin + lane, score, mask=live)
            tl.debug_barrier()
            # Compared with itself a score must be equal, but the compiler may compute it once for each layout, and its
            # sums differ in the last bit then: compare what was stored.
            score = tl.load(key_spreads + begin + lane, mask=live, other=float("nan"))
            # Others along the first axis: it is not spread over the threads of a warp, and adding up is cheap.
            below = tl.zeros([CHUNK, PART], tl.int32)
            for start in range(0, LAG, CHUNK):
                other = start + tl.arange(0, CHUNK)
                other_score = tl.load(key_spreads + begin + other, mask=other < LAG, other=float("nan"))
                below += (other_score[:, None] < score[None, :]).to(tl.int32)
            rank = tl.sum(below, axis=0)
            count = tl.sum(good.to(tl.int32), axis=0)
            if tl.sum(tl.where(good, rank, 0), axis=0) * 2 != count * (count - 1):  # some are equal
                below = tl.zeros([CHUNK, PART], tl.int32)
                for start in range(0, LAG, CHUNK):
                    other = start + tl.arange(0, CHUNK)
                    other_score = tl.load(key_spreads + begin + other, mask=other < LAG, other=float("nan"))
                    tie = (other_score[:, None] == score[None, :]) & (other[:, None] > lane[None, :])
                    below += tie.to(tl.int32)
                rank += tl.sum(below, axis=0)
            score = tl.where(good, tl.div_rn(rank.to(tl.float32), tl.full([PART], LAG, tl.float32)), float("nan"))
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
