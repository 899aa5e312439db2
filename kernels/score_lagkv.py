"""LagKV (https://arxiv.org/abs/2504.04704): a token is measured with the range that the next tokens span."""

from __future__ import annotations

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
    power_of_two,
    register_limit,
    splits_of,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch

_MAX_LAG = 1024
_CAREFUL_BYTES = 1024  # of keys that a warp has at a time, and as many of values, where both are looked at together


def lagkv(
    layers: PagedLayers,
    batch: RaggedBatch,
    *,
    sinks: int,
    lag: int = 128,
    ranked: bool = True,
    order: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Score each slot by how unevenly its channels lie within the range of the next part of the sequence.

    After the sinks, the tokens are cut into parts of ``lag``. With the minimum and maximum of each channel over the
    *next* part, a token's keys become ``(k - min) / (max - min)``; their standard deviation over the channels, passed
    through a softmax over the part, is the score of the key, likewise that of the value, and their mean the token's.
    Ranked, the token's score is the share of its part's tokens that it surpasses, so that every part loses the same
    share. The sinks, the last full part, and what lies beyond it score 1; of fewer than two parts, later tokens
    score higher.

    Ours: a channel in which the next part does not vary counts as 0 (the paper divides by zero), and of equal scores
    the earlier token ranks higher.

    Args:
        layers: the caches; float16, bfloat16, float32 or FP8.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        sinks: tokens before the first part.
        lag: tokens of a part, 2 to 1,024.
        ranked: return ranks within the part, not the scores themselves.
        order: int32 ``[L, H, total]``, `logical_order`; None where slots are in logical order.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]`` in [0, 1], higher stays; NaN where key or value is not finite, which then counts
        nowhere (but among the sinks and the last tokens, which are not looked at).

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, a number is out of bounds, or Triton cannot run on the
            device.
    """
    out = check_paged(layers, batch, out, "lagkv_ref")
    _check(layers, batch, sinks, lag, order)
    if out.numel():
        from nitro.kernels._triton.score_lagkv import lagkv_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, lag)
        chosen = _choice(layers.dtype, layers.head_dim, lag)
        lagkv_kernel[(rows * splits,)](
            layers.base,
            order,
            batch.block_tables,
            batch.lengths,
            batch.offsets,
            out.new_empty(2, *out.shape),
            out,
            batch.total,
            batch.block_tables.shape[1],
            sinks,
            splits,
            layers.num_layers,
            layers.num_kv_heads,
            *layers.strides,
            RANKED=ranked,
            **layers_constants(layers),
            **chosen,
            **register_limit(_maxnreg(layers.dtype, chosen), layers.device),
        )
    return out


def lagkv_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    *,
    sinks: int,
    lag: int = 128,
    ranked: bool = True,
    order: Tensor | None = None,
) -> Tensor:
    """Score as ``lagkv`` does, from gathered keys and values."""
    out = check_paged(layers, batch, None, "")
    _check(layers, batch, sinks, lag, order)
    for _, columns, keys, values in dense_rows(layers, batch):
        keys, values = in_order(keys, order, columns), in_order(values, order, columns)
        length = keys.shape[2]
        parts = max(length - sinks, 0) // lag
        score = torch.ones(keys.shape[:3], device=keys.device)
        if parts < 2:
            score[..., sinks:] = _ratio(
                torch.arange(max(length - sinks, 0), device=keys.device), max(length - sinks, 1)
            )
        else:
            bad = norms_ref(keys).isnan() | norms_ref(values).isnan()
            begin, end = sinks, sinks + parts * lag
            shape = (*keys.shape[:2], parts, lag)
            skip = bad[:, :, begin:end].reshape(shape)
            both = [_part_scores(x[:, :, begin:end].reshape(*shape, -1), skip) for x in (keys, values)]
            part = (both[0] + both[1]) / 2
            if ranked:
                tokens = torch.arange(lag, device=keys.device)
                tie = (part[..., None, :] == part[..., :, None]) & (tokens > tokens[:, None])
                below = (part[..., None, :] < part[..., :, None]) | tie
                part = _ratio(below.sum(dim=-1), lag).masked_fill(part.isnan(), torch.nan)
            score[:, :, begin : end - lag] = part.flatten(2)
        out[..., columns] = by_slot(score, order, columns)
    return out


def _ratio(numbers: Tensor, divisor: int) -> Tensor:
    """Return float32 quotients. On GPUs torch multiplies by a rounded reciprocal if the divisor is a number."""
    return numbers.float() / torch.tensor(float(divisor), device=numbers.device)


def _part_scores(x: Tensor, bad: Tensor) -> Tensor:
    """Return ``[L, H, parts - 1, lag]`` from keys or values ``[L, H, parts, lag, D]``; NaN where bad."""
    low = x.masked_fill(bad.unsqueeze(-1), torch.inf).amin(dim=3)[:, :, 1:, None]
    high = x.masked_fill(bad.unsqueeze(-1), -torch.inf).amax(dim=3)[:, :, 1:, None]
    width = high - low
    unit = (x[:, :, :-1] - low) / width
    spread = unit.masked_fill(~((width > 0) & width.isfinite()), 0.0).std(dim=-1)
    skip = bad[:, :, :-1]
    score = spread.masked_fill(skip, -torch.inf).softmax(dim=-1)
    return score.masked_fill(skip, torch.nan)


def _check(layers: PagedLayers, batch: RaggedBatch, sinks: int, lag: int, order: Tensor | None) -> None:
    if sinks < 0:
        raise ValueError(f"sinks={sinks} must not be negative")
    if not 2 <= lag <= _MAX_LAG:
        raise ValueError(f"lag={lag} must be 2 to {_MAX_LAG}")
    check_order(order, (layers.num_layers, layers.num_kv_heads), batch)


def _choice(dtype: torch.dtype, head_dim: int, lag: int) -> dict[str, int]:
    width = power_of_two(head_dim)
    part = max(power_of_two(lag), 16)
    warps = 1 if part <= 256 else 4
    runs = min(max(width // 64, 1), 2 if dtype in FP8 else 4)
    # One vector of 16 bytes for each thread and run: fewer tokens leave threads over, see `load_element_runs`.
    tile = max(warps * 32 * 16 * runs // (width * dtype.itemsize), 1)
    return {
        "WIDTH": width,
        "LAG": lag,
        "PART": part,
        "CHUNK": max(512 * warps // part, 1),
        "RUNS": runs,
        "TILE": tile,
        "TILES": 2 if dtype in FP8 or width * dtype.itemsize >= 512 else 4,  # that registers suffice for
        "COMPILED": not interpreted(),
        "STAGES": 1,
        "CAREFUL": max(_CAREFUL_BYTES * warps // (width * number_bytes(dtype)), 1),
        "CAREFUL_STAGES": 1,
        "num_warps": warps,
    }


def _maxnreg(dtype: torch.dtype, chosen: dict[str, int]) -> dict[int, int]:
    # Four programs of a warp for each scheduler of a multiprocessor instead of three: on an H200, 7 % faster, where
    # that many registers are enough (Triton 3.9 spills four). Elsewhere it was not measured.
    fits = dtype in (torch.float16, torch.bfloat16) and chosen["WIDTH"] <= 128 and chosen["num_warps"] == 1
    return {90: 128} if fits else {}


def variants() -> list[Variant]:
    """Return what the launcher may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.score_lagkv import lagkv_kernel

    pointers = {"order": "*i32", "scratch": "*fp32"}
    found = []
    for dtype, head_dim, lag, ordered in (
        (torch.float16, 96, 128, False),
        (torch.bfloat16, 64, 100, True),
        (torch.bfloat16, 128, 128, False),
        (torch.float32, 256, 1024, True),
        (torch.float8_e4m3fn, 128, 128, False),
        (torch.float8_e5m2, 256, 128, False),
    ):
        chosen: dict[str, Any] = dict(_choice(dtype, head_dim, lag))
        limit = _maxnreg(dtype, chosen)
        chosen |= {"RANKED": True} | ({} if ordered else {"order": None})
        name = f"score-lagkv-{lag}{'-ordered' if ordered else ''}"
        found.append(cache_variant(name, lagkv_kernel, dtype, head_dim, chosen, pointers, limit))
    return found
