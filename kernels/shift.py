"""What attention must be told of requests that lost tokens: slots instead of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_device, check_tensor
from nitro.kernels._triton.variants import Variant

_BLOCK = 128  # tokens that a program shifts together; most requests of a step have one


def shift_to_slots(
    evicted: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    physical: Tensor,
    logical: Tensor,
) -> None:
    """Subtract the evicted tokens of each request from its positions and its length; one launch, without waiting.

    Args:
        evicted: int32 ``[R]``, tokens that each request has lost, in the order of the step.
        query_start_loc: int32 ``[>= R + 1]``, where each request's tokens of this step begin.
        positions: int64 ``[>= T]``, logical position of each token.
        seq_lens: int32 ``[>= R]``, read and written: tokens of each request after this step, then slots. In place,
            since captured graphs read this memory.
        physical: int64 ``[>= T]``, written: the slot index, within its request, of each token.
        logical: int32 ``[>= R]``, written: ``seq_lens`` as it was.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run here.
    """
    _check(evicted, query_start_loc, positions, seq_lens, physical, logical)
    check_device(evicted.device, "shift_to_slots_ref")
    if evicted.numel():
        from nitro.kernels._triton.shift import shift_kernel

        shift_kernel[(evicted.numel(),)](
            evicted, query_start_loc, positions, seq_lens, physical, logical, BLOCK=_BLOCK, num_warps=1
        )


def shift_to_slots_ref(
    evicted: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    physical: Tensor,
    logical: Tensor,
) -> None:
    """Do what ``shift_to_slots`` does, one request at a time."""
    _check(evicted, query_start_loc, positions, seq_lens, physical, logical)
    count = evicted.numel()
    logical[:count] = seq_lens[:count]
    starts = query_start_loc[: count + 1].tolist()
    for request, shift in enumerate(evicted.tolist()):
        seq_lens[request] -= shift
        tokens = slice(starts[request], starts[request + 1])
        physical[tokens] = positions[tokens] - shift


def _check(
    evicted: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    physical: Tensor,
    logical: Tensor,
) -> None:
    count = evicted.numel()
    for name, x, dtype, least in (
        ("evicted", evicted, torch.int32, 0),
        ("query_start_loc", query_start_loc, torch.int32, count + 1),
        ("positions", positions, torch.int64, 0),
        ("seq_lens", seq_lens, torch.int32, count),
        ("physical", physical, torch.int64, positions.numel()),
        ("logical", logical, torch.int32, count),
    ):
        check_tensor(name, x, dtype, (-1,), evicted.device)
        if x.numel() < least:
            raise ValueError(f"{name} has {x.numel()} elements, must have at least {least} for {count} requests")
        if not x.is_contiguous():
            raise ValueError(f"{name} has stride {x.stride(0)}: make it contiguous")


def variants() -> list[Variant]:
    """Return what the launcher may launch."""
    from nitro.kernels._triton.shift import shift_kernel

    pointers = {
        "evicted": "*i32",
        "query_start_loc": "*i32",
        "positions": "*i64",
        "seq_lens": "*i32",
        "physical": "*i64",
        "logical": "*i32",
    }
    return [Variant("shift", shift_kernel, pointers, {"BLOCK": _BLOCK}, 1)]
