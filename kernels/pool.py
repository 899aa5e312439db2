"""Pooling: what an eviction takes away is folded into what stays, before its slots are reused.

``merge_ragged`` folds the value of each evicted token into the survivor with the nearest key. Keys stay. A mass per
slot, int32 ``[L, num_blocks, H, block_size]`` beside the logical positions, says how many tokens it stands for, so that
merging again what was merged before stays weighted. docs/pooling.md says what this does to answers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from nitro.kernels import score_gravity
from nitro.kernels._checks import check_array, check_device, check_ragged, check_row_lengths, check_tables, interpreted
from nitro.kernels._moves import LIST_SHAPES, list_shape
from nitro.kernels._score import (
    HEAD_DIMS,
    cache_variant,
    dense_rows,
    layers_constants,
    norms_ref,
    power_of_two,
    splits_of,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Caches whose values can be merged."""
MOST = 2048
"""The largest mass there is: up to it, sums of float16 or bfloat16 values times masses are exact on tensor cores."""
_MIN_NORM = 1e-12  # a shorter key has no direction worth the name
_WARPS = 4


def merge_ragged(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    masses: Tensor,
    *,
    least: float = 0.9,
    own: float = 1.0,
    most: int = MOST,
    packed: bool = False,
) -> Tensor:
    """Fold the value of each evicted slot into the survivor whose key, as cached, has the largest cosine with its own.

    With masses m, a survivor s and the evicted slots E that go to it,
    ``v_s <- ((own + m_s - 1) v_s + sum_E m_j v_j) / (own + m_s - 1 + sum_E m_j)``, then ``m_s <- min(m_s + sum_E m_j,
    most)``: folding in two events what could be folded in one gives the same, up to rounding. Survivors that get
    nothing keep every bit, and so do keys. Three launches.

    The first ``batch.protect`` slots, where attention sinks are, take nothing. An evicted slot whose cosine with all
    others is below ``least``, or whose key or value is not finite, is dropped; a survivor whose key is not finite takes
    nothing, one whose value is not stays as it is.

    Args:
        layers: the caches, values of survivors written; float16, bfloat16 or float32. In place, blocks that hold
            survivors behind the first ``protect`` slots must belong to one request.
        batch: the requests; ``keep`` and ``window`` are not looked at, ``dst_tables`` only if ``packed``.
        mask: uint8 ``[L, H, total]``, contiguous along the slots; nonzero stays.
        masses: int32 ``[L, num_blocks, H, block_size]``, at least 1 in each slot of the batch, read and written.
        least: cosine from which on a slot is folded; -1 to 1.
        own: what a survivor that stands for itself alone weighs; at least 1.
        most: what masses may grow to, 1 to ``MOST``. From there on a survivor forgets.
        packed: ``pack_ragged`` has already moved survivors and masses to ``dst_tables``, and left the sources alone.
            Otherwise nothing has moved yet: ``fill_ragged`` or ``pack_ragged`` comes afterwards.

    Returns:
        int32 ``[L, H, total]``: of each evicted slot the one that it was folded into, as a slot of ``block_tables``;
        -1 where it was dropped, and for survivors.

    Raises:
        TypeError: a dtype is wrong; FP8 caches cannot be merged.
        ValueError: shapes, strides or devices do not fit, a number is out of bounds, or Triton cannot run here.
    """
    _check(layers, batch, mask, masses, least, own, most, packed)
    check_device(layers.device, "merge_ragged_ref")
    if layers.dtype == torch.bfloat16 and interpreted() and not score_gravity.INTERPRETER_MULTIPLIES_BFLOAT16:
        raise ValueError(
            "the caches are bfloat16, whose matrix products Triton's interpreter gets wrong: convert them to float32, "
            "or call merge_ragged_ref"
        )
    order, targets = (torch.empty(mask.shape, dtype=torch.int32, device=mask.device) for _ in range(2))
    num_kept = torch.empty(batch.num_requests, *mask.shape[:2], dtype=torch.int32, device=mask.device)
    rows = num_kept.numel()
    if not targets.numel():
        return targets
    from nitro.kernels._triton.pool import fold_kernel, list_both_kernel, nearest_kernel

    tile, num_warps = list_shape(batch.max_length)
    sizes = batch.total, layers.num_layers, layers.num_kv_heads
    list_both_kernel[(rows,)](
        mask,
        order,
        num_kept,
        targets,
        batch.lengths,
        batch.offsets,
        *mask.stride()[:2],
        *sizes,
        BLOCK=tile,
        num_warps=num_warps,
    )
    width = batch.block_tables.shape[1]
    chosen = _nearest_choice(layers.dtype, layers.head_dim)
    splits = splits_of(batch, rows, chosen["GONE"])
    nearest_kernel[(rows * splits,)](
        layers.base,
        batch.block_tables,
        batch.lengths,
        batch.protect,
        batch.offsets,
        order,
        num_kept,
        targets,
        float(least),
        batch.total,
        width,
        splits,
        *sizes[1:],
        *layers.strides,
        **layers_constants(layers),
        **chosen,
    )
    chosen = _fold_choice(layers.dtype, layers.head_dim)
    splits = splits_of(batch, rows, chosen["KEPT"])
    fold_kernel[(rows * splits,)](
        layers.base,
        batch.block_tables,
        batch.dst_tables,
        batch.lengths,
        batch.offsets,
        order,
        num_kept,
        targets,
        masses,
        float(own),
        most,
        batch.total,
        width,
        batch.dst_tables.shape[1],
        layers.num_blocks,
        splits,
        *sizes[1:],
        *layers.strides,
        PACKED=packed,
        **layers_constants(layers),
        **chosen,
    )
    return targets


def merge_ragged_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    masses: Tensor,
    *,
    least: float = 0.9,
    own: float = 1.0,
    most: int = MOST,
    packed: bool = False,
) -> Tensor:
    """Merge as ``merge_ragged`` does, one request at a time."""
    _check(layers, batch, mask, masses, least, own, most, packed)
    targets = torch.full(mask.shape, -1, dtype=torch.int32, device=mask.device)
    for request, columns, keys, values in dense_rows(layers, batch):
        protect = int(batch.protect[request])
        targets[..., columns] = nearest_ref(keys, values, mask[..., columns] != 0, protect=protect, least=least)
    fold_ref(layers, batch, mask, targets, masses, own=own, most=most, packed=packed)
    return targets


def nearest_ref(keys: Tensor, values: Tensor, kept: Tensor, *, protect: int = 0, least: float = 0.9) -> Tensor:
    """Return which survivor each evicted slot of one request is folded into, int32 ``[..., N]``; -1: none.

    Args:
        keys: float32 ``[..., N, D]``.
        values: float32 ``[..., N, D]``.
        kept: bool ``[..., N]``, slots that stay.
        protect: first slots, which take nothing.
        least: see ``merge_ragged``.
    """
    unit, bad = _units(keys)
    cosines = unit @ unit.transpose(-1, -2)
    takes = kept & ~bad
    takes[..., :protect] = False
    cosines = cosines.masked_fill(~takes.unsqueeze(-2), -math.inf)
    if not cosines.shape[-1]:
        return torch.empty(kept.shape, dtype=torch.int32, device=keys.device)
    top, slot = cosines.max(dim=-1)
    found = ~kept & ~bad & ~norms_ref(values).isnan() & (top >= least) & (top > -math.inf)
    return torch.where(found, slot, -1).to(torch.int32)


def merge_dense_ref(
    keys: Tensor,
    values: Tensor,
    masses: Tensor,
    index: Tensor,
    *,
    protect: int = 0,
    least: float = 0.9,
    own: float = 1.0,
    most: int = MOST,
) -> tuple[Tensor, Tensor]:
    """Merge as ``merge_ragged`` does, on K and V of one request that are gathered, and pack what survives.

    Args:
        keys: ``[L, H, N, D]``, any floating dtype, as cached.
        values: ``[L, H, N, D]``.
        masses: int32 ``[L, H, N]``, at least 1.
        index: int64 ``[L, H, S]``, slots that stay, ascending.
        protect: first slots, which take nothing.
        least: see ``merge_ragged``, like what follows.
        own: as above.
        most: as above.

    Returns:
        values ``[L, H, S, D]`` in their dtype, masses int32 ``[L, H, S]``.
    """
    kept = torch.zeros(masses.shape, dtype=torch.bool, device=keys.device).scatter_(-1, index, True)
    gone = (~kept).nonzero()[:, -1].view(*index.shape[:-1], -1)
    merged, grown = _rows(values, index), masses.gather(-1, index)
    if not gone.numel() or not index.numel():
        return merged, grown
    units, bad = _units(keys.float())
    cosines = _rows(units, gone) @ _rows(units, index).transpose(-1, -2)
    cosines.masked_fill_((bad.gather(-1, index) | (index < protect)).unsqueeze(-2), -math.inf)
    top, target = cosines.max(dim=-1)
    lost = _rows(values, gone).float()
    taken = ~bad.gather(-1, gone) & ~norms_ref(lost).isnan() & (top >= least) & (top > -math.inf)
    weight = masses.gather(-1, gone).masked_fill(~taken, 0)
    added = torch.zeros_like(grown).scatter_add_(-1, target, weight)
    weighted = lost.masked_fill(~taken.unsqueeze(-1), 0.0) * weight.unsqueeze(-1)
    own_value, own_weight = merged.float(), own + (grown - 1).float()
    sums = torch.zeros_like(own_value).scatter_add_(2, target.unsqueeze(-1).expand(weighted.shape), weighted)
    mean = (own_weight.unsqueeze(-1) * own_value + sums) / (own_weight + added).unsqueeze(-1)
    takes = (added > 0) & ~norms_ref(own_value).isnan()
    merged = torch.where(takes.unsqueeze(-1), mean.to(values.dtype), merged)
    return merged, torch.where(takes, (grown + added).clamp_max(most), grown)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather ``[..., N, D]`` by ``[..., M]``."""
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _units(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 keys ``[..., N, D]`` with length 1, and which are not finite: those are zeros."""
    norms = norms_ref(keys)
    bad = norms.isnan()
    unit = keys.masked_fill(bad.unsqueeze(-1), 0.0) / norms.nan_to_num(1.0).clamp_min(_MIN_NORM).unsqueeze(-1)
    return unit, bad


def fold_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    targets: Tensor,
    masses: Tensor,
    *,
    own: float = 1.0,
    most: int = MOST,
    packed: bool = False,
) -> None:
    """Write what ``merge_ragged`` writes to values and masses, given the targets that it returns."""
    size, tables = layers.block_size, batch.dst_tables if packed else batch.block_tables
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        source = batch.block_tables[request].long()
        for layer, head in torch.cartesian_prod(*map(torch.arange, mask.shape[:2])).reshape(-1, 2).tolist():
            values = layers.caches[layer][:, head, :, layers.head_dim :]
            mass = masses[layer, :, head]
            survivors = mask[layer, head, first : first + length].nonzero().flatten()
            target = targets[layer, head, first : first + length].long()
            rank = torch.full((length,), -1, device=mask.device)
            rank[survivors] = torch.arange(len(survivors), device=mask.device)
            gone = (target >= 0).nonzero().flatten()
            if packed:  # survivors without room were not moved
                place = torch.arange(len(survivors), device=mask.device)
                room = place < tables.shape[1] * size
                room[room.clone()] = tables[request][place[room] // size] >= 0
            else:
                place, room = survivors, torch.ones(len(survivors), dtype=torch.bool, device=mask.device)
            into = rank[target[gone]]
            gone, into = gone[room[into]], into[room[into]]
            if not len(gone):
                continue
            weight = mass[source[gone // size], gone % size]
            value = values[source[gone // size], gone % size].float()
            added = torch.zeros(len(survivors), dtype=torch.int32, device=mask.device).index_add_(0, into, weight)
            sums = torch.zeros(len(survivors), layers.head_dim, device=mask.device)
            sums.index_add_(0, into, weight.float().unsqueeze(-1) * value)
            takes = (added > 0).nonzero().flatten()
            block, slot = tables[request].long()[place[takes] // size], place[takes] % size
            own_value, own_mass = values[block, slot].float(), mass[block, slot]
            own_weight = own + (own_mass - 1).float()
            mean = own_weight.unsqueeze(-1) * own_value + sums[takes]
            mean = mean / (own_weight + added[takes]).unsqueeze(-1)
            good = ~norms_ref(own_value).isnan()
            values[block[good], slot[good]] = mean[good].to(layers.dtype)
            mass[block[good], slot[good]] = (own_mass + added[takes]).clamp_max(most)[good].to(torch.int32)


def _check(
    layers: PagedLayers,
    batch: RaggedBatch,
    mask: Tensor,
    masses: Tensor,
    least: float,
    own: float,
    most: int,
    packed: bool,
) -> None:
    if layers.dtype not in DTYPES:
        raise TypeError(
            f"caches of {layers.dtype} cannot be merged, since each merge would round to so few bits again: use "
            "float16, bfloat16 or float32, or evict without pooling"
        )
    if layers.head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={layers.head_dim} must be 2 to 256 to be merged")
    check_tables(layers, batch)
    check_ragged("mask", mask, torch.uint8, batch)
    if mask.shape[:2] != (layers.num_layers, layers.num_kv_heads):
        raise ValueError(
            f"mask is of {mask.shape[0]} layers and {mask.shape[1]} KV heads, must be of the caches' "
            f"{layers.num_layers} and {layers.num_kv_heads}"
        )
    shape = (layers.num_layers, layers.num_blocks, layers.num_kv_heads, layers.block_size)
    check_array("masses", masses, torch.int32, shape, layers.device)
    for name, value, low, high in (("least", least, -1.0, 1.0), ("own", own, 1.0, MOST), ("most", most, 1, MOST)):
        if not low <= value <= high:
            raise ValueError(f"{name}={value} must lie within {low} and {high}: change it")
    if packed:
        check_row_lengths(layers, batch, destinations=True)
        if batch.total and batch.dst_tables.data_ptr() == batch.block_tables.data_ptr():
            raise ValueError("packed, but dst_tables is block_tables: survivors are packed to other blocks only")


def _nearest_choice(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    narrow = dtype.itemsize == 2
    return {
        "GONE": 32,
        "KEPT": 64,
        "CHANNELS": min(max(power_of_two(head_dim), 16), 64 if narrow else 32),
        "num_warps": _WARPS,
    }


def _fold_choice(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    width = max(power_of_two(head_dim), 16)
    return {
        "WIDTH": width,
        "GONE": 32,
        "KEPT": 32 if width <= 64 else 16,
        # TF32 holds a mass, and a value of two bytes, as it is; of float32 it would round off half.
        "PRECISION": "tf32" if dtype.itemsize == 2 else "tf32x3",
        "COMPILED": not interpreted(),
        "num_warps": _WARPS,
    }


def variants() -> list[Variant]:
    """Return what the launcher may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.pool import fold_kernel, list_both_kernel, nearest_kernel

    lists = {"order": "*i32", "num_kept": "*i32", "targets": "*i32"}
    listed = {"mask": "*u8", "lengths": "*i32", "offsets": "*i64", **lists}
    found = [
        Variant(f"list_both-{tile}", list_both_kernel, listed, {"BLOCK": tile}, num_warps)
        for _, tile, num_warps in LIST_SHAPES
    ]
    for dtype, head_dim, packed in (
        (torch.float16, 64, True),
        (torch.bfloat16, 80, False),
        (torch.bfloat16, 128, False),
        (torch.float16, 256, False),
        (torch.float32, 128, False),
        (torch.float32, 256, True),
    ):
        chosen = _nearest_choice(dtype, head_dim)
        found.append(cache_variant("nearest", nearest_kernel, dtype, head_dim, chosen, lists))
        chosen = _fold_choice(dtype, head_dim) | {"PACKED": packed}
        pointers = {**lists, "masses": "*i32", "dst_tables": "*i32"}
        name = f"fold{'-packed' if packed else ''}"
        found.append(cache_variant(name, fold_kernel, dtype, head_dim, chosen, pointers))
    return [dataclasses.replace(variant, integers={"least": "fp32", "own": "fp32"}) for variant in found]
