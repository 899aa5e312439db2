"""The write filter that docs/kernels.md judges: tokens that a policy rejects get slot -1. Not part of the package."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, check_device
from nitro.kernels._triton.variants import Variant

_TILE = 256
_WARPS = 4


def filter_slots(
    slot_mapping: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor,
    newest: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Replace the slot of each token that its request does not keep by -1, in one launch.

    A request keeps positions below ``sinks`` and from ``newest`` on, as `streaming` does. Where this leaves the outputs
    of attention as they would be with all tokens written is what docs/kernels.md lists: hardly anywhere.

    Args:
        slot_mapping: int64 ``[T]``, contiguous; negative: not written anyway.
        positions: int64 ``[T]``, contiguous, logical positions.
        query_start_loc: int32 ``[R + 1]``, contiguous, ascending, from 0; tokens from its last entry on are padding.
        sinks: int32 ``[R]``.
        newest: int64 ``[R]``.
        out: int64 ``[T]``, contiguous; may be ``slot_mapping``; default: new memory.

    Returns:
        int64 ``[T]``: the slot, or -1.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = _check(slot_mapping, positions, query_start_loc, sinks, newest, out)
    check_device(slot_mapping.device, "filter_slots_ref")
    if out.numel():
        from write_kernels import filter_slots_kernel

        filter_slots_kernel[(-(-out.numel() // _TILE),)](
            slot_mapping,
            positions,
            query_start_loc,
            sinks,
            newest,
            out,
            out.numel(),
            sinks.numel(),
            STEPS=sinks.numel().bit_length(),
            TILE=_TILE,
            num_warps=_WARPS,
        )
    return out


def filter_slots_ref(
    slot_mapping: Tensor, positions: Tensor, query_start_loc: Tensor, sinks: Tensor, newest: Tensor
) -> Tensor:
    """Filter as ``filter_slots`` does, one request at a time."""
    out = _check(slot_mapping, positions, query_start_loc, sinks, newest, None).fill_(-1)
    starts = query_start_loc.tolist()
    for request in range(sinks.numel()):
        tokens = slice(starts[request], starts[request + 1])
        kept = (positions[tokens] < sinks[request]) | (positions[tokens] >= newest[request])
        out[tokens] = slot_mapping[tokens].masked_fill(~kept, -1)
    return out


def _check(
    slot_mapping: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor,
    newest: Tensor,
    out: Tensor | None,
) -> Tensor:
    device, tokens, requests = slot_mapping.device, slot_mapping.numel(), sinks.numel()
    check_array("slot_mapping", slot_mapping, torch.int64, (-1,), device)
    check_array("positions", positions, torch.int64, (tokens,), device)
    check_array("sinks", sinks, torch.int32, (-1,), device)
    check_array("newest", newest, torch.int64, (requests,), device)
    check_array("query_start_loc", query_start_loc, torch.int32, (requests + 1,), device)
    if tokens and not requests:
        raise ValueError(f"slot_mapping has {tokens} tokens, but sinks no request: pass the requests of the step")
    if out is None:
        return torch.empty_like(slot_mapping)
    check_array("out", out, torch.int64, (tokens,), device)
    return out


def variants() -> list[Variant]:
    """Return what ``filter_slots`` may launch: one request, and 2,048."""
    from write_kernels import filter_slots_kernel

    pointers = dict.fromkeys(("slot_mapping", "positions", "newest", "out"), "*i64")
    pointers |= {"query_start_loc": "*i32", "sinks": "*i32"}
    return [
        Variant(f"filter-slots-{n}", filter_slots_kernel, pointers, {"STEPS": n.bit_length(), "TILE": _TILE}, _WARPS)
        for n in (1, 2048)
    ]
