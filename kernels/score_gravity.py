"""Gravity: tokens are masses in key space, pulled by the newest of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from nitro.kernels._checks import interpreted
from nitro.kernels._score import (
    by_slot,
    cache_variant,
    check_order,
    check_paged,
    dense_rows,
    in_order,
    layers_constants,
    norms_ref,
    number_bytes,
    part_constants,
    parts_of,
    register_limit,
    tile_shape,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

_TINY = torch.finfo(torch.float32).tiny
_TILE_BYTES = 8192  # keys, and as many values, that a program loads at a time
INTERPRETER_MULTIPLIES_BFLOAT16 = False
"""Triton's interpreter (3.6 to 3.9 at least) takes bfloat16 in a matrix product for integers."""
_PULLED = 64  # slots whose pulls a program computes at a time


def gravity(
    layers: PagedLayers,
    batch: RaggedBatch,
    *,
    softening: float = 0.1,
    order: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Score each slot by the pull of the newest ``batch.window`` tokens W on it, in units of the row's mean pull.

    With ``m_i = ||v_i|| / mean ||v||`` and ``s^2 = 2 mean ||k - mean k||^2``, both over the row's slots,
    ``g_i = m_i sum_{j in W, j != i} m_j / (||k_i - k_j||^2 / s^2 + softening^2)`` and the score is ``g_i / mean g``.

    Args:
        layers: the caches; float16, bfloat16, float32 or FP8.
        batch: the requests; ``keep`` and ``protect`` are not looked at. ``window`` is at least 1.
        softening: softening length in units of s, above 0.
        order: int32 ``[L, H, total]``, `logical_order`; None where slots are in logical order.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``, higher stays; NaN where key or value is not finite, which then counts nowhere.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, a number is out of bounds, or Triton cannot run on the
            device.
    """
    out = check_paged(layers, batch, out, "gravity_ref")
    _check(layers, batch, softening, order)
    if out.numel():
        if layers.dtype == torch.bfloat16 and interpreted() and not INTERPRETER_MULTIPLIES_BFLOAT16:
            raise ValueError(
                "the caches are bfloat16, whose matrix products Triton's interpreter gets wrong: convert them to "
                "float32, or call gravity_ref"
            )
        from nitro.kernels._triton.score_gravity import gravity_kernel

        chosen = _choice(layers.dtype, layers.head_dim)
        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        parts = parts_of(layers, batch, chosen["WIDTH"] + 4, 3)
        scratch = out.new_empty(2, *out.shape)
        shifts = out.new_empty(rows * parts[-1].per_row, chosen["WIDTH"]) if chosen["SPLIT"] else None
        limit = register_limit(_maxnreg(chosen), layers.device)
        for part in parts:
            gravity_kernel[(rows * part.per_row,)](
                layers.base,
                order,
                batch.block_tables,
                batch.lengths,
                batch.offsets,
                part.partials,
                scratch,
                shifts,
                out,
                batch.total,
                batch.block_tables.shape[1],
                batch.window,
                softening**2,
                part.per_row,
                part.rows,
                layers.num_layers,
                layers.num_kv_heads,
                *layers.strides,
                **part.constants,
                **layers_constants(layers),
                **chosen,
                **limit,
            )
    return out


def gravity_ref(
    layers: PagedLayers, batch: RaggedBatch, *, softening: float = 0.1, order: Tensor | None = None
) -> Tensor:
    """Score as ``gravity`` does, from gathered keys and values."""
    out = check_paged(layers, batch, None, "")
    _check(layers, batch, softening, order)
    for _, columns, keys, values in dense_rows(layers, batch):
        keys, values = in_order(keys, order, columns), in_order(values, order, columns)
        length = keys.shape[2]
        mass = norms_ref(values)
        bad = norms_ref(keys).isnan() | mass.isnan()
        count = (~bad).sum(dim=-1, keepdim=True).clamp_min(1)
        mass = mass.masked_fill(bad, 0.0)
        mass = mass / (mass.sum(dim=-1, keepdim=True) / count).clamp_min(_TINY)
        keys = keys.masked_fill(bad.unsqueeze(-1), 0.0)
        keys = (keys - keys.sum(dim=2, keepdim=True) / count.unsqueeze(-1)).masked_fill(bad.unsqueeze(-1), 0.0)
        scale = (2 * keys.square().sum(dim=(2, 3), keepdim=True) / count.unsqueeze(-1)).clamp_min(_TINY)
        near = slice(max(0, length - batch.window), length)
        distance = (keys.unsqueeze(3) - keys[:, :, None, near]).square().sum(dim=-1) / scale
        force = mass[:, :, None, near] / (distance + softening**2)
        slots = torch.arange(length, device=batch.device)
        pull = mass * force.masked_fill(slots[:, None] == slots[None, near], 0.0).sum(dim=-1)
        pull = pull / (pull.sum(dim=-1, keepdim=True) / count).clamp_min(_TINY)
        out[..., columns] = by_slot(pull.masked_fill(bad, torch.nan), order, columns)
    return out


def _check(layers: PagedLayers, batch: RaggedBatch, softening: float, order: Tensor | None) -> None:
    if batch.window < 1:
        raise ValueError(f"window={batch.window} must be at least 1, since its tokens are what pulls: raise it")
    if not softening > 0.0:
        raise ValueError(f"softening={softening} must be above 0, or a token pulls its duplicates without bound")
    check_order(order, (layers.num_layers, layers.num_kv_heads), batch)


def _choice(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    split = dtype.itemsize == 4
    warps = 8 if split or head_dim > 128 else 4
    # The widest keys leave neither registers nor, with what Triton 3.6 keeps on sm_90, shared memory for more.
    pulled = _PULLED // 2 if head_dim > 128 else _PULLED
    shape = tile_shape(dtype, head_dim, _TILE_BYTES)
    return {
        **shape,
        "RUNS": max(shape["WIDTH"] // 64, 1),
        "WINDOW": 32,
        "PULLED": _PULLED * 2 if split else pulled,
        "SPLIT": split,
        "CHANNELS": 16,
        # float16 has differences of up to 131,008, and numbers of up to 65,504; FP8 is multiplied as float16, and
        # e5m2 reaches 57,344. The other types have room.
        "SCALE": 0.25 if dtype in (torch.float16, torch.float8_e5m2) else 1.0,
        # Fewer take less shared memory; of the widest keys, they take more registers than there are.
        "STAGES": 3 if head_dim <= 128 else 8 // number_bytes(dtype),
        "num_warps": warps,
    }


def _maxnreg(chosen: dict[str, Any]) -> dict[int, int]:
    # Left to itself the compiler takes so many registers that two programs fit a multiprocessor. On an H200 four are a
    # third faster, although they spill a little; elsewhere it was not measured.
    return {90: 128} if chosen["num_warps"] == 4 else {}


def variants() -> list[Variant]:
    """Return what the launcher may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.score_gravity import gravity_kernel

    pointers = {"order": "*i32", "scratch": "*fp32", "shifts": "*fp32", "partials": "*fp32"}
    found = []
    for dtype, head_dim, ordered, phases in (
        (torch.float16, 80, True, (1, 2, 3)),
        (torch.bfloat16, 128, False, (0,)),
        (torch.bfloat16, 256, False, (0,)),
        (torch.float32, 256, True, (0,)),
        (torch.float8_e4m3fn, 128, False, (0,)),
        (torch.float8_e5m2, 256, False, (0,)),
    ):
        chosen = _choice(dtype, head_dim)
        absent = {"order": not ordered, "shifts": not chosen["SPLIT"], "partials": phases == (0,)}
        chosen |= {name: None for name, missing in absent.items() if missing}
        for phase in phases:
            name = f"score-gravity{'-ordered' if ordered else ''}-{phase}"
            constants = chosen | part_constants(phase)
            limit = _maxnreg(chosen)
            found.append(cache_variant(name, gravity_kernel, dtype, head_dim, constants, pointers, limit))
    return [dataclasses.replace(variant, integers={"softening2": "fp32"}) for variant in found]
