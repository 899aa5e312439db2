"""Arithmetic on ragged arrays of scores: logical order, ranks, z-scores, means over neighbours."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, check_device, check_positions, check_tables
from nitro.kernels._score import (
    REQUESTS,
    by_slot,
    check_order,
    check_out,
    dense_positions,
    in_order,
    power_of_two,
    splits_of,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

Scope = Literal["head", "layer", "model"]

SORTS = (512, 2048)
"""Tokens that are sorted at once: the first that all rows fit. Longer ones are merged by search in the sorted tiles."""
_TILE = 512
_NOISE = 1e-12  # a variance below this part of the squared mean is rounding
_SCOPES: dict[Scope, int] = {"head": 0, "layer": 1, "model": 2}


def logical_order(layers: PagedLayers, batch: RaggedBatch, positions: Tensor) -> Tensor:
    """Return each row's slots in ascending order of their positions: int32 ``[L, H, total]``, two launches.

    Compaction by ``fill`` moves tokens out of order. What follows the sequence (neighbours, parts, a window) takes
    this array then; where slots are in logical order it is not needed.

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests.
        positions: int32 ``[L, num_blocks, H, block_size]``, each slot's logical position; the positions of a row
            differ from each other.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    check_tables(layers, batch)
    check_positions(layers, positions)
    check_device(layers.device, "logical_order_ref")
    shape = (layers.num_layers, layers.num_kv_heads, batch.total)
    tiles = torch.empty(shape, dtype=torch.int32, device=batch.device)
    out = torch.empty_like(tiles)
    if out.numel():
        from nitro.kernels._triton.score_combine import order_kernel, sort_positions_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        requests = (positions, batch.block_tables, batch.lengths, batch.offsets)
        sizes = (batch.total, layers.num_blocks, batch.block_tables.shape[1])
        sort, sort_warps = _sort_shape(batch.max_length)
        splits = splits_of(batch, rows, sort)
        sort_positions_kernel[(rows * splits,)](
            *requests,
            tiles,
            *sizes,
            splits,
            *shape[:2],
            BLOCK_SIZE=layers.block_size,
            SORT=sort,
            num_warps=sort_warps,
        )
        splits = splits_of(batch, rows, _TILE)
        order_kernel[(rows * splits,)](
            *requests,
            tiles,
            out,
            *sizes,
            splits,
            *shape[:2],
            BLOCK_SIZE=layers.block_size,
            SORT=sort,
            STEPS=sort.bit_length(),
            TILE=_TILE,
            num_warps=4,
        )
    return out


def logical_order_ref(layers: PagedLayers, batch: RaggedBatch, positions: Tensor) -> Tensor:
    """Return what ``logical_order`` does, one request at a time."""
    shape = (layers.num_layers, layers.num_kv_heads, batch.total)
    out = torch.empty(shape, dtype=torch.int32, device=batch.device)
    for request, columns in enumerate(_columns(batch)):
        out[..., columns] = dense_positions(layers, batch, positions, request).argsort(dim=-1)
    return out


def neighbour_mean(
    batch: RaggedBatch, scores: Tensor, radius: int, *, order: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the mean of each token's score and those of up to ``radius`` tokens before and after it.

    Args:
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        scores: float32 ``[L, H, total]``.
        radius: tokens on either side, in logical order; fewer at the ends.
        order: int32 ``[L, H, total]``, `logical_order`; None where slots are in logical order.
        out: where the means go, not ``scores``; default: new memory.

    Returns:
        float32 ``[L, H, total]``; NaN where the score is, which counts in no mean.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = _check(batch, {"scores": scores}, order, out, "neighbour_mean_ref")
    if radius < 0:
        raise ValueError(f"radius={radius} must not be negative")
    if out.numel():
        from nitro.kernels._triton.score_combine import neighbour_kernel

        rows = batch.num_requests * scores.shape[0] * scores.shape[1]
        splits = splits_of(batch, rows, _TILE)
        neighbour_kernel[(rows * splits,)](
            scores,
            order,
            batch.lengths,
            batch.offsets,
            out,
            batch.total,
            radius,
            splits,
            *scores.shape[:2],
            TILE=_TILE,
            num_warps=4,
        )
    return out


def neighbour_mean_ref(batch: RaggedBatch, scores: Tensor, radius: int, *, order: Tensor | None = None) -> Tensor:
    """Return what ``neighbour_mean`` does, one request at a time."""
    out = torch.empty_like(scores)
    for columns in _columns(batch):
        row = in_order(scores[..., columns], order, columns)
        length = row.shape[-1]
        tokens = torch.arange(length, device=row.device)
        near = ((tokens - tokens[:, None]).abs() <= radius) & ~row.isnan().unsqueeze(-2)
        mean = row.unsqueeze(-2).masked_fill(~near, 0.0).sum(-1) / near.sum(-1).clamp_min(1)
        out[..., columns] = by_slot(mean.masked_fill(row.isnan(), torch.nan), order, columns)
    return out


def rank_sum(
    batch: RaggedBatch,
    a: Tensor,
    b: Tensor,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    evictable: bool = True,
    order: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's ranks among its row in two arrays of scores; two launches.

    The lowest score has rank 0, the highest 1, and equal scores share the mean of their ranks.

    Args:
        batch: the requests; ``keep`` is not looked at.
        a: float32 ``[L, H, total]``.
        b: likewise.
        weights: of the ranks in ``a`` and ``b``.
        evictable: rank only the tokens that can be evicted; the first ``protect`` and the last ``window`` ones get
            infinity.
        order: int32 ``[L, H, total]``, `logical_order`; None where slots are in logical order.
        out: where the sums go, not ``a`` or ``b``; default: new memory.

    Returns:
        float32 ``[L, H, total]``; NaN where either score is. A NaN is not ranked.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = _check(batch, {"a": a, "b": b}, order, out, "rank_sum_ref")
    if out.numel():
        from nitro.kernels._triton.score_combine import rank_sum_kernel, sort_kernel

        rows = batch.num_requests * a.shape[0] * a.shape[1]
        inputs = (a, b, order, batch.lengths, batch.protect, batch.offsets)
        keys = torch.empty(2, *a.shape, dtype=torch.int32, device=a.device)
        sort, sort_warps = _sort_shape(batch.max_length)
        splits = splits_of(batch, rows, sort)
        sort_kernel[(rows * splits, 2)](
            *inputs,
            keys,
            batch.total,
            batch.window,
            splits,
            *a.shape[:2],
            EVICTABLE=evictable,
            SORT=sort,
            num_warps=sort_warps,
        )
        splits = splits_of(batch, rows, _TILE)
        rank_sum_kernel[(rows * splits,)](
            *inputs,
            keys,
            out,
            batch.total,
            batch.window,
            splits,
            *weights,
            *a.shape[:2],
            EVICTABLE=evictable,
            SORT=sort,
            STEPS=sort.bit_length(),
            TILE=_TILE,
            num_warps=4,
        )
    return out


def rank_sum_ref(
    batch: RaggedBatch,
    a: Tensor,
    b: Tensor,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    evictable: bool = True,
    order: Tensor | None = None,
) -> Tensor:
    """Return what ``rank_sum`` does, one request at a time."""
    out = torch.empty_like(a)
    for request, columns in enumerate(_columns(batch)):
        forced = _forced(batch, request, evictable)
        sums = torch.zeros((), device=a.device)
        for scores, weight in zip((a, b), weights, strict=True):
            row = in_order(scores[..., columns], order, columns)
            ranked = ~row.isnan() & ~forced
            others = ranked.unsqueeze(-2)
            less = ((row.unsqueeze(-2) < row.unsqueeze(-1)) & others).sum(-1)
            same = ((row.unsqueeze(-2) == row.unsqueeze(-1)) & others).sum(-1)
            twice = 2 * less + same - 1
            ranks = twice.float() / (2.0 * (ranked.sum(-1, keepdim=True) - 1).clamp_min(1))
            sums = sums + weight * ranks.masked_fill(row.isnan(), torch.nan)
        out[..., columns] = by_slot(torch.where(forced, torch.inf, sums), order, columns)
    return out


def zscore_sum(
    batch: RaggedBatch,
    a: Tensor,
    b: Tensor,
    *,
    scopes: tuple[Scope, Scope] = ("head", "head"),
    weights: tuple[float, float] = (1.0, 1.0),
    evictable: bool = True,
    order: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's z-scores in two arrays of scores; two launches.

    A z-score is ``(x - mean) / std`` with mean and standard deviation (of the population) over one KV head, all heads
    of a layer, or all layers and heads of the request; 0 where nothing varies.

    Args:
        batch: the requests; ``keep`` is not looked at.
        a: float32 ``[L, H, total]``.
        b: likewise.
        scopes: over what mean and standard deviation of ``a`` and ``b`` are taken. Only ``head`` is independent of
            which layers and heads this worker has.
        weights: of the z-scores in ``a`` and ``b``.
        evictable: see ``rank_sum``.
        order: int32 ``[L, H, total]``, `logical_order`; None where slots are in logical order.
        out: where the sums go, not ``a`` or ``b``; default: new memory.

    Returns:
        float32 ``[L, H, total]``; NaN where either score is not finite, which then counts nowhere.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = _check(batch, {"a": a, "b": b}, order, out, "zscore_sum_ref")
    if out.numel():
        from nitro.kernels._triton.score_combine import moments_kernel, zscore_sum_kernel

        num_layers, num_heads, _ = a.shape
        rows = batch.num_requests * num_layers * num_heads
        inputs = (a, b, order, batch.lengths, batch.protect, batch.offsets)
        moments = torch.empty(6, rows, dtype=torch.float32, device=a.device)
        moments_kernel[(rows,)](
            *inputs,
            moments,
            batch.total,
            batch.window,
            num_layers,
            num_heads,
            EVICTABLE=evictable,
            TILE=_TILE,
            num_warps=4,
        )
        merged = {"head": 1, "layer": power_of_two(num_heads), "model": power_of_two(num_layers * num_heads)}
        splits = splits_of(batch, rows, _TILE)
        zscore_sum_kernel[(rows * splits,)](
            *inputs,
            moments,
            out,
            batch.total,
            batch.window,
            splits,
            *weights,
            num_layers,
            num_heads,
            SCOPE_A=_SCOPES[scopes[0]],
            SCOPE_B=_SCOPES[scopes[1]],
            MERGED_A=merged[scopes[0]],
            MERGED_B=merged[scopes[1]],
            EVICTABLE=evictable,
            TILE=_TILE,
            num_warps=4,
        )
    return out


def zscore_sum_ref(
    batch: RaggedBatch,
    a: Tensor,
    b: Tensor,
    *,
    scopes: tuple[Scope, Scope] = ("head", "head"),
    weights: tuple[float, float] = (1.0, 1.0),
    evictable: bool = True,
    order: Tensor | None = None,
) -> Tensor:
    """Return what ``zscore_sum`` does, one request at a time."""
    out = torch.empty_like(a)
    for request, columns in enumerate(_columns(batch)):
        forced = _forced(batch, request, evictable)
        sums = torch.zeros((), device=a.device)
        for scores, weight, scope in zip((a, b), weights, scopes, strict=True):
            row = in_order(scores[..., columns], order, columns)
            dims = {"head": (2,), "layer": (1, 2), "model": (0, 1, 2)}[scope]
            counted = row.isfinite() & ~forced
            count = counted.sum(dims, keepdim=True).clamp_min(1)
            mean = row.masked_fill(~counted, 0.0).sum(dims, keepdim=True) / count
            variance = (row - mean).masked_fill(~counted, 0.0).square().sum(dims, keepdim=True) / count
            z = torch.where(variance > _NOISE * mean**2, (row - mean) / variance.sqrt(), 0.0)
            sums = sums + weight * z.masked_fill(~row.isfinite(), torch.nan)
        out[..., columns] = by_slot(torch.where(forced, torch.inf, sums), order, columns)
    return out


def _sort_shape(max_length: int) -> tuple[int, int]:
    """Return the tokens that are sorted at once, and the warps that do it."""
    sort = next((sort for sort in SORTS if sort >= max_length), SORTS[-1])
    return sort, min(max(sort // 256, 1), 16)


def _columns(batch: RaggedBatch) -> list[slice]:
    ends = batch.offsets.tolist()
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def _forced(batch: RaggedBatch, request: int, evictable: bool) -> Tensor:
    """Return bool ``[length]``, which tokens in logical order stay whatever their score; none unless evictable."""
    length = int(batch.lengths[request])
    tokens = torch.arange(length, device=batch.device)
    return ((tokens < batch.protect[request]) | (tokens >= length - batch.window)) & evictable


def _check(
    batch: RaggedBatch, scores: dict[str, Tensor], order: Tensor | None, out: Tensor | None, reference: str
) -> Tensor:
    shape = next(iter(scores.values())).shape
    for name, x in scores.items():
        check_array(name, x, torch.float32, (*shape[:2], batch.total), batch.device)
        if out is not None and out.data_ptr() == x.data_ptr() and x.numel():
            raise ValueError(f"out is {name}, which is read while out is written: pass other memory")
    check_order(order, (shape[0], shape[1]), batch)
    check_device(batch.device, reference)
    return check_out((shape[0], shape[1]), batch, out)


def variants() -> list[Variant]:
    """Return what the launchers may launch; of z-scores, one of many pairs of scopes, of tiles the extremes."""
    from nitro.kernels._triton import score_combine as jitted

    scores = {**REQUESTS, "a": "*fp32", "b": "*fp32", "scores": "*fp32", "out": "*fp32", "order": "*i32"}
    positions = {**REQUESTS, "positions": "*i32", "sorted_tiles": "*i32", "out": "*i32"}
    scopes = {"SCOPE_A": 2, "SCOPE_B": 1, "MERGED_A": 256, "MERGED_B": 8, "EVICTABLE": True, "TILE": _TILE}
    weights = {"weight_a": "fp32", "weight_b": "fp32"}
    rows: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = [
        ("moments", jitted.moments_kernel, scores | {"moments": "*fp32"}, {"EVICTABLE": True, "TILE": _TILE}, 4),
        ("zscore-sum", jitted.zscore_sum_kernel, scores | {"moments": "*fp32"}, scopes, 4),
        ("neighbours", jitted.neighbour_kernel, scores, {"TILE": _TILE}, 4),
    ]
    order: dict[str, Any] = {"BLOCK_SIZE": 16}
    rank: dict[str, Any] = {"EVICTABLE": True}
    for size, warps in map(_sort_shape, SORTS):
        rows.append((f"order-sort-{size}", jitted.sort_positions_kernel, positions, order | {"SORT": size}, warps))
        rows.append((f"rank-sort-{size}", jitted.sort_kernel, scores | {"out": "*i32"}, rank | {"SORT": size}, warps))
    merge = {"SORT": SORTS[-1], "STEPS": SORTS[-1].bit_length(), "TILE": _TILE}
    rows += [
        ("order-merge", jitted.order_kernel, positions, {"BLOCK_SIZE": 16, **merge}, 4),
        ("rank-sum", jitted.rank_sum_kernel, scores | {"keys": "*i32"}, {"EVICTABLE": True, **merge}, 4),
    ]
    return [
        Variant(f"score-{name}", kernel, types, sizes, warps, weights) for name, kernel, types, sizes, warps in rows
    ]
