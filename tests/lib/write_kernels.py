"""Jitted code of the write-time experiments (`write_scores`, `write_filter`), which docs/kernels.md judges."""

import triton
import triton.language as tl

from nitro.kernels._triton.score_tile import finite, load_rows, position_of, ragged_row, row_of


@triton.jit
def _slot_score(x, SIGN: tl.constexpr):
    """SIGN times the L2 norm of each row of float32 ``[ROWS, WIDTH]``; NaN where that is not finite."""
    square = tl.sum(x * x, axis=1)
    return tl.where(finite(square), SIGN * tl.sqrt_rn(square), float("nan"))


@triton.jit
def _score_index(slot, head, H: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the int64 index of a slot's score in a contiguous ``[num_blocks, H, BLOCK_SIZE]``."""
    return (slot // BLOCK_SIZE * H + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit(do_not_specialize=["num_rows"])
def norm_write_kernel(
    x,  # keys or values, [num_rows / H, H, D]
    slot_mapping,  # int64 [num_rows / H]
    scores,  # float32 [num_blocks, H, BLOCK_SIZE], written where slot_mapping says
    num_rows,
    stride_token,
    stride_head,
    stride_dim,
    SIGN: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Score the new tokens of one layer, ROWS (token, head) pairs a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    token, head = row // H, row % H
    # Both loads are in flight together: rows that are not written are loaded, too, which is cheaper than to wait.
    slot = tl.load(slot_mapping + token, mask=exists, other=-1)
    offset = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    score = _slot_score(load_rows(x, offset, exists, stride_dim, x.dtype.element_ty, D, WIDTH), SIGN)
    tl.store(scores + _score_index(slot, head, H, BLOCK_SIZE), score, mask=slot >= 0)


@triton.jit(do_not_specialize=["num_rows"])
def cache_write_kernel(
    keys,  # [num_rows / H, H, D]
    values,  # [num_rows / H, H, D]
    cache,  # [num_blocks, H, BLOCK_SIZE, 2 * D], written
    slot_mapping,  # int64 [num_rows / H]
    scores,  # float32 [num_blocks, H, BLOCK_SIZE], written; None: no scores
    num_rows,
    key_token,
    key_head,
    key_dim,
    value_token,
    value_head,
    value_dim,
    cache_block,
    cache_head,
    cache_slot,
    cache_dim,
    PART: tl.constexpr,  # what is scored; 0: keys, 1: values
    SIGN: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the new K and V of one layer to the paged cache, and score them on the way unless ``scores`` is None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    token, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
    slot = tl.load(slot_mapping + row // H, mask=exists, other=-1)
    column = tl.arange(0, WIDTH)
    wanted = exists[:, None] & (column < D)[None, :]
    column = column.to(tl.int64)[None, :]
    key = tl.load(keys + (token * key_token + head * key_head)[:, None] + column * key_dim, mask=wanted, other=0.0)
    value_offset = (token * value_token + head * value_head)[:, None] + column * value_dim
    value = tl.load(values + value_offset, mask=wanted, other=0.0)
    target = slot // BLOCK_SIZE * cache_block + head * cache_head + slot % BLOCK_SIZE * cache_slot
    target = cache + target[:, None] + column * cache_dim
    written = wanted & (slot >= 0)[:, None]
    tl.store(target, key, mask=written)
    tl.store(target + tl.cast(cache_dim, tl.int64) * D, value, mask=written)
    if scores is not None:
        score = _slot_score((key if PART == 0 else value).to(tl.float32), SIGN)
        tl.store(scores + _score_index(slot, head, H, BLOCK_SIZE), score, mask=slot >= 0)


@triton.jit(do_not_specialize=["total", "max_blocks", "num_blocks", "splits", "L", "H"])
def read_scores_kernel(
    scores,  # float32 [L, num_blocks, H, BLOCK_SIZE]
    tables,
    lengths,
    offsets,
    out,  # float32 [L, H, total], written
    total,
    max_blocks,
    num_blocks,
    splits,  # programs that share a row, tile by tile
    L,
    H,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Gather the scores of the slots of all requests, layers and KV heads."""
    program = tl.program_id(0)
    request, layer, head = row_of(program // splits, L, H)
    table = tables + request.to(tl.int64) * max_blocks
    out += ragged_row(offsets, request, layer, head, H, total)
    length = tl.load(lengths + request)
    for start in range(program % splits * TILE, length, splits * TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        # Scores lie as positions do.
        score = position_of(scores, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE)
        tl.store(out + slot, score, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def filter_slots_kernel(
    slot_mapping,  # int64 [num_tokens]
    positions,  # int64 [num_tokens], logical
    query_start_loc,  # int32 [num_requests + 1]
    sinks,  # int32 [num_requests]
    newest,  # int64 [num_requests]
    out,  # int64 [num_tokens], written; may be slot_mapping
    num_tokens,
    num_requests,
    STEPS: tl.constexpr,  # of the binary search: 2**STEPS > num_requests
    TILE: tl.constexpr,
):
    """Replace the slots of tokens that are in neither range of their request by -1."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=live, other=-1)
    position = tl.load(positions + token, mask=live, other=0)
    # The last request that starts at or before the token; requests without tokens start where the next one does.
    low = tl.zeros([TILE], tl.int32)
    high = tl.zeros([TILE], tl.int32) + num_requests
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = live & (low + 1 < high)
        before = tl.load(query_start_loc + middle, mask=searching, other=0) <= token
        low = tl.where(searching & before, middle, low)
        high = tl.where(searching & (before == 0), middle, high)
    kept = position < tl.load(sinks + low, mask=live, other=0)
    kept = kept | (position >= tl.load(newest + low, mask=live, other=0))
    # What lies beyond the last request is padding, whatever its slot says.
    kept = kept & (token < tl.load(query_start_loc + num_requests))
    tl.store(out + token, tl.where(kept, slot, -1), mask=live)
