"""Arithmetic on ragged arrays of scores: logical order, ranks, z-scores, means over neighbours."""

import triton
import triton.language as tl

from .score_tile import position_of, ragged_row, row_of, slot_of

_EXCLUDED = tl.constexpr(0x7FFFFFFF)  # above every key: larger than +inf's, and no position
_NOISE = tl.constexpr(1e-12)


@triton.jit
def _ordered_key(score):
    """Return int32 keys that compare as the floats do; -0.0 equals 0.0, and a NaN is excluded."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, ~magnitude, magnitude)
    key = tl.where(magnitude == 0, 0, key)
    return tl.where(magnitude > 0x7F800000, _EXCLUDED, key)


@triton.jit
def _score_key(scores, order, index, low, high):
    """Return the keys of the scores at these logical indices; excluded unless ``low <= index < high``."""
    live = (index >= low) & (index < high)
    slot = slot_of(order, index, live, order is not None)
    return _ordered_key(tl.load(scores + slot, mask=live, other=float("nan")))


@triton.jit
def _below(tile, count, key, STEPS: tl.constexpr):
    """Return how many of a sorted tile's ``count`` keys are below each key, by binary search."""
    low = tl.zeros(key.shape, tl.int32)
    high = low + count
    for _ in range(STEPS):  # not unrolled: each step waits for the one before
        middle = (low + high) // 2
        searching = low < high
        less = tl.load(tile + middle, mask=searching, other=0) < key
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & ~less, middle, high)
    return low


@triton.jit(do_not_specialize=["total", "window", "splits", "L", "H"])
def sort_kernel(
    a,  # float32 [L, H, total]
    b,  # likewise
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    lengths,
    protect,
    offsets,
    out,  # int32 [2, L, H, total], written: each tile's keys in ascending order
    total,
    window,
    splits,  # programs that share a row, tile by tile
    L,
    H,
    EVICTABLE: tl.constexpr,  # keys of forced slots are excluded
    SORT: tl.constexpr,
):
    """Sort the ordered keys of one of both arrays, tile by tile of SORT tokens in logical order."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    low, high = 0, length
    if EVICTABLE:
        low, high = tl.load(protect + request), length - window
    if order is not None:
        order += first
    scores = a
    if tl.program_id(1) == 1:
        scores = b
        out += (L * H).to(tl.int64) * total
    lane = tl.arange(0, SORT)
    for start in range(program % splits * SORT, length, splits * SORT):
        # Lanes beyond the row are excluded: they come last, as do excluded tokens, whose keys are equal.
        keys = tl.sort(_score_key(scores + first, order, start + lane, low, high))
        tl.store(out + first + start + lane, keys, mask=start + lane < length)


@triton.jit
def _midrank(keys, length, key, SORT: tl.constexpr, STEPS: tl.constexpr):
    """Return the ranks in [0, 1] of keys among a row's that are not excluded; ties share the mean of their ranks."""
    less = tl.zeros(key.shape, tl.int32)
    up_to = tl.zeros(key.shape, tl.int32)
    counted = tl.full([1], 0, tl.int32)
    for start in range(0, length, SORT):
        count = tl.minimum(length - start, SORT)
        tile = keys + start
        below = _below(tile, count, key, STEPS)
        equal = tl.load(tile + below, mask=below < count, other=_EXCLUDED) == key
        two = tl.load(tile + below + 1, mask=below + 1 < count, other=_EXCLUDED) == key
        including = below + equal.to(tl.int32)
        # A second search only where there are ties.
        if tl.max((two & (key != _EXCLUDED)).to(tl.int32)) > 0:
            including = _below(tile, count, key + 1, STEPS)
        less += below
        up_to += including
        counted += _below(tile, count, tl.full([1], _EXCLUDED, tl.int32), STEPS)
    twice = (less + up_to - 1).to(tl.float32)  # of the mean rank; exact below 2**24
    return tl.div_rn(twice, 2.0 * tl.maximum(counted - 1, 1).to(tl.float32))


@triton.jit(do_not_specialize=["total", "window", "splits", "weight_a", "weight_b", "L", "H"])
def rank_sum_kernel(
    a,
    b,
    order,
    lengths,
    protect,
    offsets,
    keys,  # int32 [2, L, H, total], of `sort_kernel`
    out,  # float32 [L, H, total], written
    total,
    window,
    splits,
    weight_a,
    weight_b,
    L,
    H,
    EVICTABLE: tl.constexpr,
    SORT: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The weighted sum of each token's ranks in two arrays."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    low, high = 0, length
    if EVICTABLE:
        low, high = tl.load(protect + request), length - window
    if order is not None:
        order += first
    plane = (L * H).to(tl.int64) * total
    for start in range(program % splits * TILE, length, splits * TILE):
        index = start + tl.arange(0, TILE)
        live = index < length
        key_a = _score_key(a + first, order, index, low, high)
        key_b = _score_key(b + first, order, index, low, high)
        rank_a = _midrank(keys + first, length, key_a, SORT, STEPS)
        rank_b = _midrank(keys + plane + first, length, key_b, SORT, STEPS)
        score = weight_a * rank_a + weight_b * rank_b
        score = tl.where((key_a == _EXCLUDED) | (key_b == _EXCLUDED), float("nan"), score)
        score = tl.where((index < low) | (index >= high), float("inf"), score)
        tl.store(out + first + slot_of(order, index, live, order is not None), score, mask=live)


@triton.jit(do_not_specialize=["total", "num_blocks", "max_blocks", "splits", "L", "H"])
def sort_positions_kernel(
    positions,  # int32 [L, num_blocks, H, BLOCK_SIZE]
    tables,
    lengths,
    offsets,
    out,  # int32 [L, H, total], written: each tile's positions in ascending order
    total,
    num_blocks,
    max_blocks,
    splits,
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    SORT: tl.constexpr,
):
    """Sort the positions of each row, tile by tile of SORT slots."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    lane = tl.arange(0, SORT)
    for start in range(program % splits * SORT, length, splits * SORT):
        slot = start + lane
        key = position_of(positions, table, slot, slot < length, layer, head, num_blocks, H, BLOCK_SIZE)
        key = tl.sort(tl.where(slot < length, key, _EXCLUDED))
        tl.store(out + slot, key, mask=slot < length)


@triton.jit(do_not_specialize=["total", "num_blocks", "max_blocks", "splits", "L", "H"])
def order_kernel(
    positions,
    tables,
    lengths,
    offsets,
    sorted_tiles,  # int32 [L, H, total], of `sort_positions_kernel`
    out,  # int32 [L, H, total], written
    total,
    num_blocks,
    max_blocks,
    splits,
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    SORT: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Put each slot where its position ranks."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    first = ragged_row(offsets, request, layer, head, H, total)
    sorted_tiles += first
    out += first
    length = tl.load(lengths + request)
    for start in range(program % splits * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        key = position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
        rank = tl.zeros([TILE], tl.int32)
        for tile in range(0, length, SORT):
            rank += _below(sorted_tiles + tile, tl.minimum(length - tile, SORT), key, STEPS)
        tl.store(out + rank, slot, mask=live)


@triton.jit(do_not_specialize=["total", "radius", "splits", "L", "H"])
def neighbour_kernel(
    scores,  # float32 [L, H, total]
    order,  # int32 [L, H, total], slots in logical order, or None: they are
    lengths,
    offsets,
    out,  # float32 [L, H, total], written
    total,
    radius,
    splits,
    L,
    H,
    TILE: tl.constexpr,
):
    """The mean of the scores within radius of each token in logical order, NaNs left out."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    if order is not None:
        order += first
    for start in range(program % splits * TILE, length, splits * TILE):
        index = start + tl.arange(0, TILE)
        live = index < length
        slot = slot_of(order, index, live, order is not None)
        own = tl.load(scores + first + slot, mask=live, other=0.0)
        sums = tl.zeros([TILE], tl.float32)
        counts = tl.zeros([TILE], tl.int32)
        for step in range(-radius, radius + 1):
            near = index + step
            inside = (near >= 0) & (near < length)
            near = slot_of(order, near, inside, order is not None)
            score = tl.load(scores + first + near, mask=inside, other=float("nan"))
            good = score == score
            sums += tl.where(good, score, 0.0)
            counts += good.to(tl.int32)
        mean = sums / tl.maximum(counts, 1).to(tl.float32)
        tl.store(out + first + slot, tl.where(own == own, mean, float("nan")), mask=live)


@triton.jit
def _evictable_score(scores, order, index, low, high):
    """Return the scores at these logical indices, and whether each counts: evictable and finite."""
    live = (index >= low) & (index < high)
    slot = slot_of(order, index, live, order is not None)
    score = tl.load(scores + slot, mask=live, other=0.0)
    return score, live & (tl.abs(score) < float("inf"))


@triton.jit
def _add_tile(score, good, count, mean, square):
    """Merge a tile into the count, mean and sum of squared deviations so far (Chan, Golub and LeVeque, 1979)."""
    tile_count = tl.sum(good.to(tl.float32), axis=0)
    tile_mean = tl.sum(tl.where(good, score, 0.0), axis=0) / tl.maximum(tile_count, 1.0)
    off = tl.where(good, score - tile_mean, 0.0)
    both = count + tile_count
    delta = tile_mean - mean
    share = tile_count / tl.maximum(both, 1.0)
    square += tl.sum(off * off, axis=0) + delta * delta * count * share
    return both, mean + delta * share, square


@triton.jit(do_not_specialize=["total", "window", "L", "H"])
def moments_kernel(
    a,  # float32 [L, H, total]
    b,  # likewise
    order,
    lengths,
    protect,
    offsets,
    moments,  # float32 [2, 3, R, L, H], written: count, mean, sum of squared deviations of a, then of b
    total,
    window,
    L,
    H,
    EVICTABLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The moments of each row of two arrays."""
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    request, layer, head = row_of(row, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    low, high = 0, length
    if EVICTABLE:
        low, high = tl.load(protect + request), length - window
    if order is not None:
        order += first
    count_a = tl.full((), 0, tl.float32)
    mean_a = tl.full((), 0, tl.float32)
    square_a = tl.full((), 0, tl.float32)
    count_b = tl.full((), 0, tl.float32)
    mean_b = tl.full((), 0, tl.float32)
    square_b = tl.full((), 0, tl.float32)
    for start in range(0, length, TILE):
        index = start + tl.arange(0, TILE)
        score, good = _evictable_score(a + first, order, index, low, high)
        count_a, mean_a, square_a = _add_tile(score, good, count_a, mean_a, square_a)
        score, good = _evictable_score(b + first, order, index, low, high)
        count_b, mean_b, square_b = _add_tile(score, good, count_b, mean_b, square_b)
    moments += row
    tl.store(moments, count_a)
    tl.store(moments + rows, mean_a)
    tl.store(moments + 2 * rows, square_a)
    tl.store(moments + 3 * rows, count_b)
    tl.store(moments + 4 * rows, mean_b)
    tl.store(moments + 5 * rows, square_b)


@triton.jit
def _mean_and_unit(moments, first_row, rows, stride, MERGED: tl.constexpr):
    """Return mean and inverse standard deviation over ``rows`` rows, merged in a fixed order; 0 if none varies."""
    lane = tl.arange(0, MERGED)
    moments += first_row + lane
    count = tl.load(moments, mask=lane < rows, other=0.0)
    mean = tl.load(moments + stride, mask=lane < rows, other=0.0)
    square = tl.load(moments + 2 * stride, mask=lane < rows, other=0.0)
    counted = tl.maximum(tl.sum(count, axis=0), 1.0)
    middle = tl.sum(count * mean, axis=0) / counted
    off = mean - middle
    variance = tl.sum(square + count * off * off, axis=0) / counted
    # A spread of no more than the mean's own rounding is none.
    varies = variance > _NOISE * middle * middle
    return middle, tl.where(varies, 1.0 / tl.sqrt_rn(tl.where(varies, variance, 1.0)), 0.0)


@triton.jit(do_not_specialize=["total", "window", "splits", "weight_a", "weight_b", "L", "H"])
def zscore_sum_kernel(
    a,
    b,
    order,
    lengths,
    protect,
    offsets,
    moments,  # float32 [2, 3, R, L, H], of `moments_kernel`
    out,  # float32 [L, H, total], written
    total,
    window,
    splits,
    weight_a,
    weight_b,
    L,
    H,
    SCOPE_A: tl.constexpr,  # 0: a row, 1: all heads of a layer, 2: all layers and heads
    SCOPE_B: tl.constexpr,
    MERGED_A: tl.constexpr,  # rows of the scope, rounded up to a power of two
    MERGED_B: tl.constexpr,
    EVICTABLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The weighted sum of each token's z-scores in two arrays."""
    program = tl.program_id(0)
    row = program // splits
    stride = tl.num_programs(0) // splits
    request, layer, head = row_of(row, L, H)
    first = ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    low, high = 0, length
    if EVICTABLE:
        low, high = tl.load(protect + request), length - window
    if order is not None:
        order += first
    rows_a, first_a = 1, row
    if SCOPE_A == 1:
        rows_a, first_a = H, row - head
    elif SCOPE_A == 2:
        rows_a, first_a = L * H, request * (L * H)
    rows_b, first_b = 1, row
    if SCOPE_B == 1:
        rows_b, first_b = H, row - head
    elif SCOPE_B == 2:
        rows_b, first_b = L * H, request * (L * H)
    mean_a, unit_a = _mean_and_unit(moments, first_a, rows_a, stride, MERGED_A)
    mean_b, unit_b = _mean_and_unit(moments + 3 * stride, first_b, rows_b, stride, MERGED_B)
    for start in range(program % splits * TILE, length, splits * TILE):
        index = start + tl.arange(0, TILE)
        live = index < length
        score_a, good_a = _evictable_score(a + first, order, index, low, high)
        score_b, good_b = _evictable_score(b + first, order, index, low, high)
        score = weight_a * ((score_a - mean_a) * unit_a) + weight_b * ((score_b - mean_b) * unit_b)
        score = tl.where(good_a & good_b, score, float("nan"))
        score = tl.where((index < low) | (index >= high), float("inf"), score)
        tl.store(out + first + slot_of(order, index, live, order is not None), score, mask=live)
