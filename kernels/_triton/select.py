"""Radix select: the key of the last slot that stays is found digit by digit, from the top, by histograms."""

import triton
import triton.language as tl

_DIGIT_BITS = tl.constexpr(8)
_BINS = tl.constexpr(256)


@triton.jit
def ordered_key(scores):
    """Return uint32 keys that compare as the floats do; -0.0 equals 0.0 and every NaN is lowest.

    Integer operations only, since a comparison of floats may flush subnormal ones to zero.
    """
    bits = scores.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Negative floats run backwards: flipping all bits reverses them and puts them below the positive ones.
    key = tl.where(bits == magnitude, bits | 0x80000000, ~bits)
    key = tl.where(magnitude == 0, tl.full(key.shape, 0x80000000, tl.uint32), key)
    return tl.where(magnitude > 0x7F800000, tl.zeros(key.shape, tl.uint32), key)


@triton.jit
def _load_keys(scores, start, length, protect, first_recent, BLOCK: tl.constexpr):
    """Return a tile's slots, whether each exists, and its key; slots that must stay have a key that no float has."""
    slot = start + tl.arange(0, BLOCK)
    exists = slot < length
    key = ordered_key(tl.load(scores + slot, mask=exists, other=0.0))
    forced = (slot < protect) | (slot >= first_recent)
    return slot, exists, tl.where(forced, tl.full(key.shape, 0xFFFFFFFF, tl.uint32), key)


@triton.jit
def _histogram(key, exists, prefix, SHIFT: tl.constexpr):
    """Count the digits at ``SHIFT`` of the keys whose higher digits are ``prefix``."""
    if SHIFT + _DIGIT_BITS < 32:
        exists = exists & ((key >> (SHIFT + _DIGIT_BITS)) == prefix)
    digit = (key >> SHIFT) & (_BINS - 1)
    return tl.histogram(digit.to(tl.int32), _BINS, mask=exists)


@triton.jit
def _mark(mask, slot, exists, key, theta, need, ties):
    """Store which slots of a tile stay; return how many keys equal ``theta`` up to its end, given those before it."""
    tie = (exists & (key == theta)).to(tl.int32)
    rank = ties + tl.cumsum(tie) - tie
    kept = (key > theta) | ((tie != 0) & (rank < need))
    tl.store(mask + slot, kept.to(tl.uint8), mask=exists)
    return ties + tl.sum(tie)


@triton.jit(do_not_specialize=["scores_layer", "scores_head", "mask_layer", "mask_head", "window"])
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
    kept = tl.load(keep + request.to(tl.int64) * keep_request + layer * keep_layer + head * keep_head)
    kept = tl.minimum(tl.maximum(kept, 0), length)  # counts are exact whatever they were asked to be
    protected = tl.load(protect + request)
    first_recent = length - window
    scores += layer.to(tl.int64) * scores_layer + head.to(tl.int64) * scores_head + first
    mask += layer.to(tl.int64) * mask_layer + head.to(tl.int64) * mask_head + first

    if ONE_TILE:
        slot, exists, key = _load_keys(scores, 0, length, protected, first_recent, BLOCK)
    theta = tl.full((), 0, tl.uint32)  # the key of the last slot that stays, as far as it is known
    need = kept  # how many slots stay among those whose key begins with theta
    bins = tl.arange(0, _BINS)
    for digit in tl.static_range(32 // _DIGIT_BITS):
        if ONE_TILE:
            histogram = _histogram(key, exists, theta, 24 - _DIGIT_BITS * digit)
        else:
            histogram = tl.zeros([_BINS], tl.int32)
            for start in range(0, length, BLOCK):
                _, tile_exists, tile_key = _load_keys(scores, start, length, protected, first_recent, BLOCK)
                histogram += _histogram(tile_key, tile_exists, theta, 24 - _DIGIT_BITS * digit)
        at_least = tl.cumsum(histogram, reverse=True)
        chosen = tl.sum((at_least >= need).to(tl.int32)) - 1
        chosen = tl.maximum(chosen, 0)  # an empty request
        need -= tl.sum(tl.where(bins == chosen + 1, at_least, 0))
        theta = (theta << _DIGIT_BITS) | chosen.to(tl.uint32)

    if ONE_TILE:
        _mark(mask, slot, exists, key, theta, need, 0)
    else:
        ties = tl.full((), 0, tl.int32)
        for start in range(0, length, BLOCK):
            tile_slot, tile_exists, tile_key = _load_keys(scores, start, length, protected, first_recent, BLOCK)
            ties = _mark(mask, tile_slot, tile_exists, tile_key, theta, need, ties)
    tl.store(counts + row, kept)


@triton.jit(do_not_specialize=["scores_layer", "scores_head", "mask_layer", "mask_head", "window"])
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
    bound = ordered_key(tl.load(theta + request.to(tl.int64) * theta_request + layer * theta_layer + head * theta_head))
    # Key 0 is NaN: no score reaches a bound that is not a number, and a NaN reaches none.
    bound = tl.where(bound == 0, tl.full((), 0xFFFFFFFF, tl.uint32), bound)

    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        slot, exists, key = _load_keys(scores, start, length, protected, length - window, BLOCK)
        kept = exists & (key >= bound)
        tl.store(mask + slot, kept.to(tl.uint8), mask=exists)
        count += kept.to(tl.int32)
    tl.store(counts + row, tl.sum(count))
