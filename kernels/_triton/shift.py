"""Positions and lengths of a step's requests in slots instead of tokens."""

import triton
import triton.language as tl


@triton.jit
def shift_kernel(
    evicted,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    positions,  # int64 [T]
    seq_lens,  # int32 [R], read and written
    physical,  # int64 [T], written
    logical,  # int32 [R], written
    BLOCK: tl.constexpr,
):
    """One program shifts one request."""
    request = tl.program_id(0)
    shift = tl.load(evicted + request)
    length = tl.load(seq_lens + request)
    tl.store(logical + request, length)
    tl.store(seq_lens + request, length - shift)
    end = tl.load(query_start_loc + request + 1)
    for start in range(tl.load(query_start_loc + request), end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        position = tl.load(positions + token, mask=token < end)
        tl.store(physical + token, position - shift, mask=token < end)
