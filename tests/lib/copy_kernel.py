"""A copy by plain loads and stores: what a kernel that only moves memory can reach."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    """Copy BLOCK words a program, past the cache."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(source + index, eviction_policy="evict_first")
    tl.store(target + index, word, eviction_policy="evict_first")
