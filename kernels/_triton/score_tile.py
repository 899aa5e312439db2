"""What the scoring kernels share: where a program's row lies, and tiles of keys or values in float32.

A *row* is one (request, layer, KV head). Shapes and meanings of the parameters are documented by the launchers.
"""

import triton
import triton.language as tl

_TOGETHER = tl.constexpr(16)  # partial sums that are loaded at a time
_E4M3, _E5M2 = tl.constexpr(tl.float8e4nv), tl.constexpr(tl.float8e5)


@triton.jit
def row_of(row, L, H):
    """Return (request, layer, head) of a row; the head runs fastest, as a token of an NHD cache holds all heads."""
    return row // (L * H), row // H % L, row % H


@triton.jit
def ragged_row(offsets, request, layer, head, H, total):
    """Return the int64 index of a row's first element in a contiguous ragged array ``[L, H, total]``."""
    return (layer.to(tl.int64) * H + head) * total + tl.load(offsets + request)


@triton.jit
def length_here(lengths, request, PHASE: tl.constexpr, WHOLE: tl.constexpr):
    """Return a request's length if this phase is for rows of that length, otherwise 0."""
    length = tl.load(lengths + request)
    if PHASE == 0:
        return tl.where(length <= WHOLE, length, 0)
    return tl.where(length > WHOLE, length, 0)


@triton.jit
def chunk_of(chunks, length, CHUNK: tl.constexpr):
    """Return which chunk of its row this program has, where it begins, and where it ends: there if it is empty."""
    chunk = tl.program_id(0) % chunks
    begin = tl.minimum(chunk * CHUNK, length)
    return chunk, begin, tl.minimum(begin + CHUNK, length)


@triton.jit
def chunk_index(offsets, request, layer, head, H, partial_rows, CHUNK: tl.constexpr):
    """Return the int64 index of a row's first chunk in a contiguous ``[L, H, partial_rows, ...]``.

    A request begins at ``offset // CHUNK + request``, so that the chunks of all, each request's last one cut short,
    fit into ``total // CHUNK + R`` rows without a prefix sum.
    """
    first = tl.load(offsets + request) // CHUNK + request
    return (layer.to(tl.int64) * H + head) * partial_rows + first


@triton.jit
def added_up(partials, length, column, CHUNK: tl.constexpr, PARTIAL: tl.constexpr):
    """Return the sum over a row's chunks of these columns of their partial sums ``[chunks, PARTIAL]``.

    A few chunks at a time: one by one, each would wait for memory.
    """
    sums = tl.zeros([_TOGETHER, column.shape[0]], tl.float32)
    for start in range(0, (length + CHUNK - 1) // CHUNK, _TOGETHER):
        chunk = start + tl.arange(0, _TOGETHER)
        live = chunk * CHUNK < length
        sums += tl.load(partials + chunk[:, None] * PARTIAL + column[None, :], mask=live[:, None], other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def one_added_up(partials, length, column: tl.constexpr, CHUNK: tl.constexpr, PARTIAL: tl.constexpr):
    """Return what `added_up` does for a single column, as a scalar."""
    sums = tl.zeros([_TOGETHER], tl.float32)
    for start in range(0, (length + CHUNK - 1) // CHUNK, _TOGETHER):
        chunk = start + tl.arange(0, _TOGETHER)
        sums += tl.load(partials + chunk * PARTIAL + column, mask=chunk * CHUNK < length, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def as_numbers(x, DTYPE: tl.constexpr):
    """Return elements of a cache in a type with arithmetic: FP8, which comes as int8, as float16, the others as is.

    Every FP8 number is a float16, and there is nothing to round. By integer arithmetic, since neither GPUs before
    sm_89 nor the interpreter have conversions from all kinds.
    """
    if DTYPE == _E4M3:
        # Sign, exponent, mantissa as in float16, with 4 and 3 bits in place of 5 and 10. Moved to where float16 has
        # them, the exponent's bias is short by 8. There are no infinities, and one NaN, which comes out as 480.
        bits = (x.to(tl.int16) << 7) & -0x4001
        x = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where(tl.abs(x) > 448.0, float("nan"), x)
    elif DTYPE == _E5M2:
        # The first half of a float16.
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return x


@triton.jit
def scale_of(scales, layer, head, H, PART: tl.constexpr):
    """Return what one head's keys (PART 0) or values (1) are to be multiplied with, from float32 ``[L, 2, H]``."""
    return tl.load(scales + (layer * 2 + PART) * H + head)


@triton.jit
def head_pointer(base, layer, head, stride_head, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of one head's first key in block 0 of one layer; FP8 is read as the bits that it is."""
    if DTYPE == _E4M3 or DTYPE == _E5M2:  # noqa: SIM109 (Triton has no "in")
        pointer = tl.load(base + layer).to(tl.pointer_type(tl.int8))
    else:
        pointer = tl.load(base + layer).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The compiler knows nothing of an address that was loaded: without this, each element would be a load.
        pointer = tl.multiple_of(pointer, 16)
    return pointer + head.to(tl.int64) * stride_head


@triton.jit
def values_of(keys, stride_dim, D: tl.constexpr):
    """Return the address of a head's values, given that of its keys."""
    return keys + tl.cast(stride_dim, tl.int64) * D


@triton.jit
def slot_of(order, index, live, ORDERED: tl.constexpr):
    """Return the slots of the tokens with these indices in logical order; the index itself unless ORDERED."""
    if ORDERED:
        index = tl.load(order + index, mask=live, other=0)
    return index


@triton.jit
def slot_offset(table, slot, live, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Return the int64 offsets of a request's slots from `head_pointer`."""
    slot = slot.to(tl.uint32)  # never negative, which the compiler can't see, and then a division takes twice as long
    block = tl.load(table + slot // BLOCK_SIZE, mask=live, other=0)
    block = block.to(tl.uint32).to(tl.int64)  # nor is it
    return block * stride_block + (slot % BLOCK_SIZE).to(tl.int64) * stride_slot


@triton.jit
def position_of(positions, table, slot, live, layer, head, num_blocks, H, BLOCK_SIZE: tl.constexpr):
    """Return the int32 logical positions of a request's slots; ``positions`` is ``[L, num_blocks, H, BLOCK_SIZE]``."""
    slot = slot.to(tl.uint32)  # see `slot_offset`
    block = tl.load(table + slot // BLOCK_SIZE, mask=live, other=0)
    index = block.to(tl.uint32).to(tl.int64) * (H * BLOCK_SIZE) + (slot % BLOCK_SIZE).to(tl.int64)
    first = (layer.to(tl.int64) * num_blocks * H + head) * BLOCK_SIZE  # the same for all slots
    return tl.load(positions + first + index, mask=live, other=0)


@triton.jit
def load_elements(pointer, offset, live, stride_dim, DTYPE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return D numbers at each offset, ``[len(offset), WIDTH]``; zero where not live and from D on."""
    column = tl.arange(0, WIDTH)
    wanted = live[:, None]
    if WIDTH > D:
        wanted = wanted & (column < D)[None, :]
    column = column.to(tl.int64) * stride_dim
    return as_numbers(tl.load(pointer + offset[:, None] + column[None, :], mask=wanted, other=0), DTYPE)


@triton.jit
def load_rows(pointer, offset, live, stride_dim, DTYPE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return what `load_elements` does as float32.

    Upcast before any arithmetic: the square of a float16 overflows from 256 on.
    """
    return load_elements(pointer, offset, live, stride_dim, DTYPE, D, WIDTH).to(tl.float32)


@triton.jit
def load_element_runs(
    pointer,
    offset,
    live,
    stride_dim,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Return what `load_elements` does as ``[len(offset), RUNS, WIDTH // RUNS]``.

    Threads are side by side along the last axis alone, so that fewer have a slot, with more of its numbers each: less
    to exchange where they are added up, and fewer addresses.
    """
    # Threads that were left over would go to the second axis. Triton 3.6 numbers them after those of the first one, and
    # then takes other threads for them where it adds up over both axes (`sum_of_runs`).
    tl.static_assert(
        RUNS == 1 or pointer.dtype.element_ty.primitive_bitwidth * offset.shape[0] * (WIDTH // RUNS) >= 32 * 128,
        "too few slots for the threads of a warp",
    )
    column = tl.arange(0, RUNS)[:, None] * (WIDTH // RUNS) + tl.arange(0, WIDTH // RUNS)[None, :]
    wanted = live[:, None, None]
    if WIDTH > D:
        wanted = wanted & (column < D)[None, :, :]
    column = column.to(tl.int64) * stride_dim
    return as_numbers(tl.load(pointer + offset[:, None, None] + column[None, :, :], mask=wanted, other=0), DTYPE)


@triton.jit
def load_runs(
    pointer,
    offset,
    live,
    stride_dim,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Return what `load_element_runs` does as float32."""
    return load_element_runs(pointer, offset, live, stride_dim, DTYPE, D, WIDTH, RUNS).to(tl.float32)


@triton.jit
def sum_of_runs(x):
    """Return sums over the channels of each slot, which are as `load_runs` has them: first over those of one thread."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]), axis=1)


@triton.jit
def finite(square):
    """Return whether a sum of squares is a number: false for infinities and NaNs, and for what overflowed."""
    return square < float("inf")


@triton.jit
def reciprocal(x, COMPILED: tl.constexpr):
    """Return 1 / x to the last bit or two; subnormal x, of float32, count as zero."""
    if COMPILED:  # a division is seven more instructions
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def as_floats(x, COMPILED: tl.constexpr):
    """Return numbers as float32."""
    if COMPILED and x.dtype == tl.bfloat16:  # two at a time: the compiler takes two instructions for every other one
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [x], tl.float32, True, 2
        )
    return x.to(tl.float32)
