"""Radix select: the key of the last slot that stays is found from its highest bit down, by counting.

Counting is all compares and adds, on keys that stay in registers up to 8k slots. Histograms of wider digits take fewer
rounds, but cost as many instructions, and some Triton versions compile them for ten seconds and more.
"""

import triton
import triton.language as tl


@triton.jit
def ordered_key(scores):
    """Return uint32 keys that compare as the floats do; -0.0 equals 0.0 and every NaN is lowest.

    Integer operations only, since a comparison of floats may flush subnormal ones to zero.
    """
    bits = scores.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Negative floats run backwards: flipping all bits reverses them and puts them below the positive ones.
    key = tl.where(bits == magnitude, bits | 0x80000000, bits ^ 0xFFFFFFFF)
    key = tl.where(magnitude == 0, tl.full(key.shape, 0x80000000, tl.uint32), key)
    return tl.where(magnitude > 0x7F800000, tl.zeros(key.shape, tl.uint32), key)


@triton.jit
def _at(request, layer, head, stride_request, stride_layer, stride_head):
    return request.to(tl.int64) * stride_request + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head


@triton.jit
def _load_keys(scores, start, length, protect, first_recent, BLOCK: tl.constexpr):
    """Return a tile's slots, whether each exists, and its key.

    Slots that must stay have a key above that of every float; those that do not exist have 0, which counts nowhere.
    """
    slot = start + tl.arange(0, BLOCK)
    exists = slot < length
    key = ordered_key(tl.load(scores + slot, mask=exists, other=0.0))
    forced = (slot < protect) | (slot >= first_recent)
    key = tl.where(forced, tl.full(key.shape, 0xFFFFFFFF, tl.uint32), key)
    return slot, exists, tl.where(exists, key, tl.zeros(key.shape, tl.uint32))


@triton.jit
def _mark(mask, slot, exists, key, theta, need, ties):
    """Store which slots of a tile stay; return how many keys equal ``theta`` up to its end, given those before it."""
    tie = (exists & (key == theta)).to(tl.int32)
    rank = ties + tl.cumsum(tie) - tie
    kept = (key > theta) | ((tie != 0) & (rank < need))
    tl.store(mask + slot, kept.to(tl.uint8), mask=exists)
    return ties + tl.sum(tie)


@triton.jit(do_not_specialize=["scores_layer", "scores_head", "mask_layer", "mask_head", "window", "L", "H"])
def topk_kernel(
    scores,  # float32 [L, H, total]
    mask,  # uint8 [L, H, total], written
    counts,  # int32 [R, L, H], written
    lengths,
    keep,
    protect,
    offsets,
    scores_layer,
    scores_head,
    mask_layer,
    mask_head,
    keep_request,
    keep_layer,
    keep_head,
    window,
    L,
    H,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no request has more than BLOCK slots: keys stay in registers
):
    """One program selects the slots of one (request, layer, KV head)."""
    row = tl.program_id(0)
    request, layer, head = row // (L * H), row // H % L, row % H
    length = tl.load(lengths + request)
    first = tl.load(offsets + request)
    kept = tl.load(keep + _at(request, layer, head, keep_request, keep_layer, keep_head))
    kept = tl.minimum(tl.maximum(kept, 0), length)  # counts are exact whatever they were asked to be
    protected = tl.load(protect + request)
    first_recent = length - window
    scores += layer.to(tl.int64) * scores_layer + head.to(tl.int64) * scores_head + first
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + first

    # The largest theta that `kept` keys reach: that of the last slot that stays. Its lower bits are still zero.
    theta = tl.full((), 0, tl.uint32)
    above = tl.full((), 0, tl.int32)  # keys above all that begin as theta does
    bit = tl.full((), 0x80000000, tl.uint32)
    if ONE_TILE:
        slot, exists, key = _load_keys(scores, 0, length, protected, first_recent, BLOCK)
        for _ in range(32):
            bound = theta | bit
            number = tl.sum((key >= bound).to(tl.int32))
            theta = tl.where(number >= kept, bound, theta)
            above = tl.where(number >= kept, above, number)
            bit = bit >> 1
        _mark(mask, slot, exists, key, theta, kept - above, 0)
    else:
        # Two bits a round, since each reads all scores again.
        for _ in range(16):
            low, middle, high = theta | (bit >> 1), theta | bit, theta | bit | (bit >> 1)
            low_count = tl.zeros([BLOCK], tl.int32)
            middle_count = tl.zeros([BLOCK], tl.int32)
            high_count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, length, BLOCK):
                tile_slot, tile_exists, tile_key = _load_keys(scores, start, length, protected, first_recent, BLOCK)
                low_count += (tile_key >= low).to(tl.int32)
                middle_count += (tile_key >= middle).to(tl.int32)
                high_count += (tile_key >= high).to(tl.int32)
            low_number, middle_number, high_number = tl.sum(low_count), tl.sum(middle_count), tl.sum(high_count)
            above = tl.where(high_number >= kept, above, high_number)
            above = tl.where(middle_number >= kept, above, middle_number)
            above = tl.where(low_number >= kept, above, low_number)
            theta = tl.where(low_number >= kept, low, theta)
            theta = tl.where(middle_number >= kept, middle, theta)
            theta = tl.where(high_number >= kept, high, theta)
            bit = bit >> 2
        ties = tl.full((), 0, tl.int32)
        for start in range(0, length, BLOCK):
            tile_slot, tile_exists, tile_key = _load_keys(scores, start, length, protected, first_recent, BLOCK)
            ties = _mark(mask, tile_slot, tile_exists, tile_key, theta, kept - above, ties)
    tl.store(counts + row, kept)


@triton.jit(do_not_specialize=["scores_layer", "scores_head", "mask_layer", "mask_head", "window", "L", "H"])
def threshold_kernel(
    scores,
    mask,
    counts,
    theta,  # float32 [R, L, H], any strides
    lengths,
    protect,
    offsets,
    scores_layer,
    scores_head,
    mask_layer,
    mask_head,
    theta_request,
    theta_layer,
    theta_head,
    window,
    L,
    H,
    BLOCK: tl.constexpr,
):
    """One program marks and counts the slots of one (request, layer, KV head) that score at least theta."""
    row = tl.program_id(0)
    request, layer, head = row // (L * H), row // H % L, row % H
    length = tl.load(lengths + request)
    first = tl.load(offsets + request)
    protected = tl.load(protect + request)
    scores += layer.to(tl.int64) * scores_layer + head.to(tl.int64) * scores_head + first
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + first
    bound = ordered_key(tl.load(theta + _at(request, layer, head, theta_request, theta_layer, theta_head)))
    # Key 0 is NaN: no score reaches a bound that is not a number, and a NaN reaches none.
    bound = tl.where(bound == 0, tl.full((), 0xFFFFFFFF, tl.uint32), bound)

    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        slot, exists, key = _load_keys(scores, start, length, protected, length - window, BLOCK)
        kept = exists & (key >= bound)
        tl.store(mask + slot, kept.to(tl.uint8), mask=exists)
        count += kept.to(tl.int32)
    tl.store(counts + row, tl.sum(count))
