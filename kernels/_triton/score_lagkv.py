"""LagKV: each token's keys and values in units of the range that the next part of the sequence spans.

A program walks its parts over the keys and then over the values, each from the last to the first, so that it reads them
once: of a part the sums that make variances are taken in the range of the part after it, and its own range for the
part before it. That has no eye for numbers that are not finite, but they show in what comes out. A last walk over the
variances, which are small, makes scores and ranks of them, and repeats with care, token by token, what was not finite
or came before such a part.
"""

import triton
import triton.language as tl

from .score_tile import (
    finite,
    head_pointer,
    load_element_runs,
    load_rows,
    ragged_row,
    reciprocal,
    row_of,
    slot_of,
    slot_offset,
    sum_of_runs,
    values_of,
)

# Of numbers, and of sums of squares in units of ranges, if they are to be trusted: then no square overflows.
_LARGE = tl.constexpr(2.0**40)
_SQUARES = tl.constexpr(2.0**32)
_BF16, _FP16 = tl.constexpr(tl.bfloat16), tl.constexpr(tl.float16)


@triton.jit
def _unit(lows, highs):
    """Return each channel's minimum and the inverse of its range; zeros where it does not vary."""
    low = tl.min(lows, axis=0)
    width = tl.max(highs, axis=0) - low
    # False for NaN and infinity, too: nothing was finite, or the range is not.
    varies = (width > 0.0) & (width < float("inf"))
    return tl.where(varies, low, 0.0), tl.where(varies, 1.0 / tl.where(varies, width, 1.0), 0.0)


@triton.jit
def _off_squares(x, low, inverse, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum over D channels of the squares of ``(x - low) * inverse`` less its mean."""
    unit = (x - low[None, :]) * inverse[None, :]
    off = unit - (tl.sum(unit, axis=1) / D)[:, None]
    if WIDTH > D:
        off = tl.where((tl.arange(0, WIDTH) < D)[None, :], off, 0.0)
    return tl.sum(off * off, axis=1)


@triton.jit
def _words(x):
    """Return 16-bit numbers ``[..., n]`` by twos: int32 ``[..., n / 2]``, the first in the lower half."""
    first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    return tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [first, second], tl.int32, True, 1)


@triton.jit
def _floats(words, NUMBERS: tl.constexpr):
    """Return the numbers that `_words` made words of as float32."""
    if NUMBERS == _BF16:  # the upper half of a float32
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -0x10000).to(tl.float32, bitcast=True)
    else:
        first = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(first, second), [words.shape[0], words.shape[1], 2 * words.shape[2]])


@triton.jit
def _widened(lows, highs, x, NUMBERS: tl.constexpr):
    """Return minima and maxima with ``x`` among them: NaN where it is. Of 16-bit numbers all are words."""
    if NUMBERS == _BF16:
        lows = tl.inline_asm_elementwise("min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [lows, x], tl.int32, True, 1)
        highs = tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [highs, x], tl.int32, True, 1)
    elif NUMBERS == _FP16:
        lows = tl.inline_asm_elementwise("min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [lows, x], tl.int32, True, 1)
        highs = tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [highs, x], tl.int32, True, 1)
    else:
        lows = tl.minimum(lows, x, tl.PropagateNan.ALL)
        highs = tl.maximum(highs, x, tl.PropagateNan.ALL)
    return lows, highs


@triton.jit
def _root(squares, D: tl.constexpr):
    """Return standard deviations from sums of squares, which rounding may have made negative."""
    return tl.sqrt_rn(tl.maximum(squares * (1.0 / (D - 1)), 0.0, tl.PropagateNan.ALL))


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
    TILES: tl.constexpr,
    RUNS: tl.constexpr,
    COMPILED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store the squared spreads of the parts [first, end) of keys or values, D - 1 times as large.

    From the last part to the first, so that each is read once: its spreads are taken in the range of the part after it,
    which is known, while its own range is found. If something is not finite in one of these parts or the next one, or
    so large that its square may not be, then some spread of that part is NaN.
    """
    PACKED: tl.constexpr = COMPILED and DTYPE.primitive_bitwidth < 32
    # What minima and maxima are taken of: FP8 became float16.
    NUMBERS: tl.constexpr = tl.float32 if not PACKED else (tl.float16 if DTYPE.primitive_bitwidth == 8 else DTYPE)
    # Infinity twice, as words have it.
    HIGHEST: tl.constexpr = 0x7F807F80 if NUMBERS == _BF16 else (0x7C007C00 if PACKED else float("inf"))
    LOWEST: tl.constexpr = -0x7F0080 if NUMBERS == _BF16 else (-0x3FF0400 if PACKED else float("-inf"))
    constant = -0.5
    if WIDTH > D:
        column = tl.arange(0, RUNS)[:, None] * (WIDTH // RUNS) + tl.arange(0, WIDTH // RUNS)[None, :]
        constant = tl.where(column < D, -0.5, 0.0)[None, :, :]
    inverse = tl.zeros([1, RUNS, WIDTH // RUNS], tl.float32)
    shift = tl.zeros([1, RUNS, WIDTH // RUNS], tl.float32)
    # After the last of these parts comes one of which only the range is wanted.
    for back in range(tl.where(first < end, end - first + 1, 0)):
        begin = sinks + (end - back) * LAG
        stored = tl.where(back > 0, LAG, 0)
        kind: tl.constexpr = tl.int32 if PACKED else tl.float32
        lows = tl.full([TILE, RUNS, WIDTH // RUNS // (2 if PACKED else 1)], HIGHEST, kind)
        highs = tl.full([TILE, RUNS, WIDTH // RUNS // (2 if PACKED else 1)], LOWEST, kind)
        for start in tl.range(0, LAG, TILE * TILES, num_stages=STAGES):
            loaded = ()
            for i in tl.static_range(TILES):  # all of them first: they come while others are computed with
                index = start + i * TILE + tl.arange(0, TILE)
                live = index < LAG
                offset = _offset(order, table, begin + index, live, stride_block, stride_slot, BLOCK_SIZE)
                x = load_element_runs(pointer, offset, live, stride_dim, DTYPE, D, WIDTH, RUNS)
                loaded += (x,)  # type: ignore[assignment]
            for i in tl.static_range(TILES):
                index = start + i * TILE + tl.arange(0, TILE)
                live = index < LAG
                x = _words(loaded[i]) if PACKED else loaded[i].to(tl.float32)
                if LAG % (TILE * TILES) > 0:
                    some_lows, some_highs = _widened(lows, highs, x, NUMBERS)
                    lows = tl.where(live[:, None, None], some_lows, lows)
                    highs = tl.where(live[:, None, None], some_highs, highs)
                else:
                    lows, highs = _widened(lows, highs, x, NUMBERS)
                unit = (_floats(x, NUMBERS) if PACKED else x) * inverse + shift
                total = sum_of_runs(unit)
                squares = sum_of_runs(unit * unit)
                spread = tl.where(squares < _SQUARES, squares - total * total * (1.0 / D), float("nan"))
                tl.store(spreads + begin + index, spread, mask=index < stored)
        if PACKED:
            lows, highs = _floats(lows, NUMBERS), _floats(highs, NUMBERS)
        # One number that shows whether something is so large that squares could overflow, or NaN.
        largest = tl.maximum(-lows, highs, tl.PropagateNan.ALL)
        doubtful = not tl.sum(sum_of_runs(largest), axis=0) < _LARGE
        low = tl.min(lows, axis=0, keep_dims=True)
        width = tl.max(highs, axis=0, keep_dims=True) - low
        varies = width > 0.0
        inverse = reciprocal(tl.where(varies, width, float("inf")), COMPILED)
        # In units of the range, from its middle: sums and sums of squares lose nothing where all are near 0.
        shift = tl.where(varies, -(low + 0.5 * width) * inverse, constant) + tl.where(doubtful, float("nan"), 0.0)
        if doubtful and back > 0:
            tl.debug_barrier()  # another thread may have stored what is replaced
            tl.store(spreads + begin, float("nan"))


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
    """Store what `_store_spreads` does for the part that begins there, but NaN only where a token is not finite."""
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
        spread = _off_squares(key, low_key, key_unit, D, WIDTH)
        tl.store(key_spreads + begin + index, tl.where(good, spread, float("nan")), mask=live)
        spread = _off_squares(value, low_value, value_unit, D, WIDTH)
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
    TILES: tl.constexpr,  # that are loaded at a time
    RUNS: tl.constexpr,  # of channels, see `load_runs`
    COMPILED: tl.constexpr,  # for a GPU, whose own instructions may be used
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
            first_part, end_part, stride_block, stride_slot, stride_dim, LAG, D, WIDTH, BLOCK_SIZE, DTYPE, TILE, TILES,
            RUNS, COMPILED, STAGES,
        )  # fmt: skip
    tl.debug_barrier()  # what follows reads what other threads of this program stored

    for part in range(first_part, end_part):
        begin = sinks + part * LAG
        key_spread = tl.load(key_spreads + begin + lane, mask=live, other=0.0)
        value_spread = tl.load(value_spreads + begin + lane, mask=live, other=0.0)
        both = key_spread + value_spread
        if tl.max((both != both).to(tl.int32), axis=0) > 0:
            _store_spreads_of_part(
                keys, values, order, table, key_spreads, value_spreads, begin,
                stride_block, stride_slot, stride_dim, LAG, D, WIDTH, BLOCK_SIZE, DTYPE, CAREFUL, CAREFUL_STAGES,
            )  # fmt: skip
            tl.debug_barrier()
            key_spread = tl.load(key_spreads + begin + lane, mask=live, other=0.0)
            value_spread = tl.load(value_spreads + begin + lane, mask=live, other=0.0)
        key_spread = _root(tl.where(live, key_spread, float("nan")), D)
        value_spread = _root(tl.where(live, value_spread, float("nan")), D)
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
            below = tl.zeros([CHUNK, PART], tl.float32)  # in which a comparison and a sum are an instruction each
            for start in range(0, LAG, CHUNK):
                other = start + tl.arange(0, CHUNK)
                inside = other < LAG if LAG % CHUNK > 0 else None
                other_score = tl.load(
                    key_spreads + begin + other, mask=inside, other=float("nan") if LAG % CHUNK > 0 else None
                )
                below += tl.where(other_score[:, None] < score[None, :], 1.0, 0.0)
            rank = tl.sum(below, axis=0).to(tl.int32)
            count = tl.sum(good.to(tl.int32), axis=0)
            if tl.sum(tl.where(good, rank, 0), axis=0) * 2 != count * (count - 1):  # some are equal
                equal = tl.zeros([CHUNK, PART], tl.int32)
                for start in range(0, LAG, CHUNK):
                    other = start + tl.arange(0, CHUNK)
                    inside = other < LAG if LAG % CHUNK > 0 else None
                    other_score = tl.load(
                        key_spreads + begin + other, mask=inside, other=float("nan") if LAG % CHUNK > 0 else None
                    )
                    tie = (other_score[:, None] == score[None, :]) & (other[:, None] > lane[None, :])
                    equal += tie.to(tl.int32)
                rank += tl.sum(equal, axis=0)
            if LAG == PART:  # a power of two, of which the inverse is exact
                share = rank.to(tl.float32) * (1.0 / LAG)
            else:
                share = tl.div_rn(rank.to(tl.float32), tl.full([PART], LAG, tl.float32))
            score = tl.where(good, share, float("nan"))
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
