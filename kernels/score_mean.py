"""Scores against a mean of the row: KeyDiff, on cached keys or with RoPE undone, and the centred value norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, interpreted
from nitro.kernels._score import (
    cache_variant,
    check_moved,
    check_paged,
    dense_positions,
    dense_rows,
    layers_constants,
    norms_ref,
    part_constants,
    parts_of,
    power_of_two,
    register_limit,
    tile_shape,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch

_MIN_NORM = 1e-12  # a shorter vector has no direction worth the name
_WARPS = 4
_HEADS = 4  # that share what is fetched of RoPE's table
_TILE_BYTES = 4096  # the sum over a row takes as many registers as a tile does, in float32


def keydiff(layers: PagedLayers, batch: RaggedBatch, *, out: Tensor | None = None) -> Tensor:
    """Score each slot by ``-cos(k, a)``, ``a`` the mean of the row's unit keys (https://arxiv.org/abs/2504.15364).

    Args:
        layers: the caches; float16, bfloat16, float32 or FP8.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at: all slots are in the mean.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``, higher stays; NaN where the key is not finite, which then counts nowhere.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = check_paged(layers, batch, out, "keydiff_ref")
    if out.numel():
        from nitro.kernels._triton.score_mean import keydiff_kernel

        _launch(keydiff_kernel, (layers.base,), layers, batch, out, 0)
    return out


def keydiff_ref(layers: PagedLayers, batch: RaggedBatch) -> Tensor:
    """Score as ``keydiff`` does, from gathered keys."""
    out = check_paged(layers, batch, None, "")
    for _, columns, keys, _ in dense_rows(layers, batch):
        out[..., columns] = _keydiff(keys)
    return out


def keydiff_unrotated(
    layers: PagedLayers,
    batch: RaggedBatch,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Score as ``keydiff`` does, with keys as they were before RoPE; the cache stays as it is.

    Each pair of a key's elements is multiplied by the inverse of the matrix ``[[c, -s], [s, c]]`` that rotated it.

    Args:
        layers: the caches; float16, bfloat16, float32 or FP8.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        cos_sin: ``[max_position, rotary_dim]``, float16, bfloat16 or float32: of each position the cosines, then the
            sines, as in the model's own rotary embedding, so with its scaling. ``rotary_dim`` is even and at most
            ``head_dim``; the elements beyond it are not rotated.
        positions: int32 ``[L, num_blocks, H, block_size]``, each slot's logical position; None where nothing was
            evicted yet, so that slot i holds token i.
        interleaved: pairs are neighbours (GPT-J); otherwise they are half of ``rotary_dim`` apart (GPT-NeoX, Llama).
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``; NaN where the key is not finite or its position is not in the table.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = check_paged(layers, batch, out, "keydiff_unrotated_ref")
    _check_table(layers, cos_sin, positions)
    if out.numel():
        from nitro.kernels._triton.score_mean import keydiff_unrotated_kernel

        chosen = _unrotated_choice(layers.dtype, layers.head_dim, layers.num_kv_heads)
        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        for part in parts_of(layers, batch, 2 * chosen["HALF"], 2):
            heads = chosen["HEADS"] if part.phase == 0 else 1
            keydiff_unrotated_kernel[(rows // heads * part.per_row,)](
                layers.base,
                positions,
                cos_sin,
                batch.block_tables,
                batch.lengths,
                batch.offsets,
                part.partials,
                out,
                batch.total,
                batch.block_tables.shape[1],
                layers.num_blocks,
                cos_sin.shape[0],
                part.per_row,
                part.rows,
                layers.num_layers,
                layers.num_kv_heads,
                *layers.strides,
                ROTARY=cos_sin.shape[1],
                INTERLEAVED=interleaved,
                **part.constants,
                **layers_constants(layers),
                **(chosen | {"HEADS": heads}),
                **register_limit(_unrotated_maxnreg(layers.dtype, chosen), layers.device),
            )
    return out


def keydiff_unrotated_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Score as ``keydiff_unrotated`` does, from gathered keys."""
    out = check_paged(layers, batch, None, "")
    _check_table(layers, cos_sin, positions)
    for request, columns, keys, _ in dense_rows(layers, batch):
        where = dense_positions(layers, batch, positions, request)
        out[..., columns] = _keydiff(unrotate(keys, cos_sin, where, interleaved=interleaved))
    return out


def unrotate(keys: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return keys as they were before RoPE: float32 ``[..., D]``, NaN where a position is not in the table.

    Args:
        keys: float32 ``[..., D]``.
        cos_sin: ``[max_position, rotary_dim]``, see ``keydiff_unrotated``.
        positions: int32 ``[...]``.
        interleaved: see ``keydiff_unrotated``.
    """
    rotary = cos_sin.shape[1]
    inside = (positions >= 0) & (positions < len(cos_sin))
    cos, sin = cos_sin.float()[positions.long().clamp(0, len(cos_sin) - 1)].chunk(2, dim=-1)
    inverse = (cos * cos + sin * sin).reciprocal()
    rotated = keys[..., :rotary]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pairs = ((a * cos + b * sin) * inverse, (b * cos - a * sin) * inverse)
    undone = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([undone, keys[..., rotary:]], dim=-1).masked_fill(~inside.unsqueeze(-1), torch.nan)


def vnorm_centred(layers: PagedLayers, batch: RaggedBatch, *, out: Tensor | None = None) -> Tensor:
    """Score each slot by ``||v - mean v||``, the mean over the row's slots.

    A value that all tokens share adds the same to every output whatever is kept; only what differs from it is lost.
    Arguments, result and errors are those of ``keydiff``, with values for keys.
    """
    out = check_paged(layers, batch, out, "vnorm_centred_ref")
    if out.numel():
        from nitro.kernels._triton.score_mean import centred_kernel

        _launch(centred_kernel, (layers.base, layers.scales), layers, batch, out, 4)
    return out


def vnorm_centred_ref(layers: PagedLayers, batch: RaggedBatch) -> Tensor:
    """Score as ``vnorm_centred`` does, from gathered values."""
    out = check_paged(layers, batch, None, "")
    for _, columns, _, values in dense_rows(layers, batch):
        bad = norms_ref(values).isnan().unsqueeze(-1)
        count = (~bad).sum(dim=2, keepdim=True).clamp_min(1)
        mean = values.masked_fill(bad, 0.0).sum(dim=2, keepdim=True) / count
        out[..., columns] = norms_ref((values - mean).masked_fill(bad, torch.nan))
    return out


def _launch(
    kernel: Any, caches: tuple[Tensor | None, ...], layers: PagedLayers, batch: RaggedBatch, out: Tensor, extra: int
) -> None:
    """Launch ``keydiff_kernel`` or ``centred_kernel``.

    Args:
        kernel: which of them.
        caches: its first arguments.
        layers: the caches.
        batch: the requests.
        out: where the scores go.
        extra: elements that partial sums have beside a row's.
    """
    chosen = _choice(layers.dtype, layers.head_dim)
    rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
    for part in parts_of(layers, batch, chosen["WIDTH"] + extra, 2):
        kernel[(rows * part.per_row,)](
            *caches,
            batch.block_tables,
            batch.lengths,
            batch.offsets,
            part.partials,
            out,
            batch.total,
            batch.block_tables.shape[1],
            part.per_row,
            part.rows,
            layers.num_layers,
            layers.num_kv_heads,
            *layers.strides,
            **part.constants,
            **layers_constants(layers),
            **chosen,
        )


def _keydiff(keys: Tensor) -> Tensor:
    norms = norms_ref(keys)
    bad = norms.isnan()
    unit = keys.masked_fill(bad.unsqueeze(-1), 0.0) / norms.nan_to_num(1.0).clamp_min(_MIN_NORM).unsqueeze(-1)
    anchor: Tensor = unit.sum(dim=-2, keepdim=True)
    anchor = anchor / torch.linalg.vector_norm(anchor, dim=-1, keepdim=True).clamp_min(_MIN_NORM)
    return -(unit * anchor).sum(dim=-1).masked_fill(bad, torch.nan)


def _choice(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    return {**tile_shape(dtype, head_dim, _TILE_BYTES), "STAGES": 3, "num_warps": _WARPS}


def _unrotated_choice(dtype: torch.dtype, head_dim: int, heads: int) -> dict[str, int]:
    half = power_of_two(head_dim) // 2
    runs = max(half // (64 if dtype in FP8 else 32), 1)
    # Short keys leave a single warp waiting, and a step of many small requests has too few programs for one each.
    warps = 1 if half >= 64 else _WARPS
    # One vector of 16 bytes for each thread and run, of both halves of the keys.
    tile = max(warps * 32 * 16 * runs // (half * dtype.itemsize), 1)
    return {
        "HALF": half,
        "RUNS": runs,
        "HEADS": math.gcd(heads, _HEADS) if half >= 64 else 1,
        "TILE": tile,
        "COMPILED": not interpreted(),
        "num_warps": warps,
    }


def _unrotated_maxnreg(dtype: torch.dtype, chosen: dict[str, int]) -> dict[int, int]:
    # Four programs of a warp for each scheduler of a multiprocessor: on an H200, 16 % faster although 32 bytes a thread
    # do not fit the registers. Other types and cards were not measured.
    return {90: 128} if dtype in (torch.float16, torch.bfloat16) and chosen["HALF"] == 64 else {}


def _check_table(layers: PagedLayers, cos_sin: Tensor, positions: Tensor | None) -> None:
    check_moved(layers, positions)
    if cos_sin.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"cos_sin must be float16, bfloat16 or float32, got {cos_sin.dtype}: convert it")
    check_array("cos_sin", cos_sin, cos_sin.dtype, (-1, -1), layers.device)
    rotary = cos_sin.shape[1]
    if rotary % 2 or not 2 <= rotary <= layers.head_dim or layers.head_dim % 2:
        raise ValueError(
            f"cos_sin is of rotary_dim={rotary}, which must be even and 2 to head_dim={layers.head_dim}, also even: "
            "pass the table of these layers' own rotary embedding"
        )


def variants() -> list[Variant]:
    """Return what the launchers may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.score_mean import centred_kernel, keydiff_kernel, keydiff_unrotated_kernel

    partials = {"partials": "*fp32"}
    found = []
    for name, kernel, dtype, head_dim, split in (
        ("keydiff", keydiff_kernel, torch.bfloat16, 64, False),
        ("keydiff", keydiff_kernel, torch.float16, 128, True),
        ("keydiff", keydiff_kernel, torch.float32, 256, False),
        ("keydiff", keydiff_kernel, torch.float8_e4m3fn, 128, True),
        ("keydiff", keydiff_kernel, torch.float8_e5m2, 256, False),
        ("vnorm_centred", centred_kernel, torch.bfloat16, 80, True),
        ("vnorm_centred", centred_kernel, torch.float32, 256, False),
        ("vnorm_centred", centred_kernel, torch.float8_e4m3fn, 128, False),
    ):
        for phase in _phases(split):
            chosen = _choice(dtype, head_dim) | phase[1]
            found.append(cache_variant(f"score-{name}{phase[0]}", kernel, dtype, head_dim, chosen, partials))
    for dtype, head_dim, table, rotary, interleaved, split in (
        (torch.float16, 96, "fp16", 48, False, True),
        (torch.bfloat16, 128, "bf16", 128, False, False),
        (torch.float32, 256, "fp32", 256, True, False),
        (torch.float8_e4m3fn, 128, "fp32", 128, False, False),
    ):
        pointers = {"positions": "*i32", "cos_sin": f"*{table}", **partials}
        for phase in _phases(split):
            chosen = _unrotated_choice(dtype, head_dim, 1 if split else 8) | phase[1]
            chosen |= {"ROTARY": rotary, "INTERLEAVED": interleaved}
            name = f"score-keydiff_unrotated-{rotary}{'-interleaved' if interleaved else ''}{phase[0]}"
            limit = _unrotated_maxnreg(dtype, chosen)
            found.append(cache_variant(name, keydiff_unrotated_kernel, dtype, head_dim, chosen, pointers, limit))
    return found


def _phases(split: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return names and constexpr parameters of the launches."""
    if not split:
        return [("", part_constants(0) | {"partials": None})]
    return [(f"-{phase}", part_constants(phase)) for phase in (1, 2)]
