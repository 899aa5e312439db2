"""Scoring when tokens are written: the kernels that ci/bench_write.py measures. Not part of the package.

The scores of a worker are kept per slot, float32 ``[L, num_blocks, H, block_size]``, as logical positions are, and have
to move with the tokens. Only scores that depend on the token alone can be kept: the norm of its key or its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nitro.kernels._checks import check_device, check_tensor
from nitro.kernels._score import DTYPES, check_array, check_paged, norms_ref, power_of_two, splits_of
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

_ROWS_BYTES = 4096  # of keys that one program reads: little, since a decode step has little for each processor
_WARPS = 2
_SLOTS = 1024  # that one program gathers together
SCORES = {"knorm": (0, -1.0), "vnorm": (1, 1.0)}
"""Score -> part of the slot (0: key, 1: value), and sign of its norm."""


def write_knorm(keys: Tensor, slot_mapping: Tensor, scores: Tensor) -> None:
    """Score the new tokens of one layer by minus the L2 norm of their keys, in one launch.

    The bits may differ from those of `nitro.kernels.score.knorm` in the last place, since sums are taken in another
    order; a token's bits depend on nothing but its key.

    Args:
        keys: float16, bfloat16 or float32 ``[>= T, H, D]``, any strides; rows from T on are not looked at.
        slot_mapping: int64 ``[T]``, contiguous, the slot of each token; negative: not written. The others differ.
        scores: float32 ``[num_blocks, H, block_size]``, contiguous, of this layer; written where the mapping says.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    _write(keys, slot_mapping, scores, -1.0, "write_knorm_ref")


def write_vnorm(values: Tensor, slot_mapping: Tensor, scores: Tensor) -> None:
    """Score the new tokens of one layer by the L2 norm of their values; otherwise as ``write_knorm``."""
    _write(values, slot_mapping, scores, 1.0, "write_vnorm_ref")


def write_knorm_ref(keys: Tensor, slot_mapping: Tensor, scores: Tensor) -> None:
    """Score as ``write_knorm`` does."""
    _write_ref(keys, slot_mapping, scores, -1.0)


def write_vnorm_ref(values: Tensor, slot_mapping: Tensor, scores: Tensor) -> None:
    """Score as ``write_vnorm`` does."""
    _write_ref(values, slot_mapping, scores, 1.0)


def write_cache(
    keys: Tensor, values: Tensor, slot_mapping: Tensor, cache: Tensor, scores: Tensor | None = None, name: str = "knorm"
) -> None:
    """Write the new K and V of one layer to its cache, bit for bit, and score them in the same launch.

    A stand-in for the engine's own kernel, without scores to measure what a launch more costs, and with them to
    measure what scoring would cost if it were part of that kernel.

    Args:
        keys: ``[>= T, H, D]``, any strides, as of ``write_knorm``.
        values: like ``keys``.
        slot_mapping: int64 ``[T]``, as of ``write_knorm``.
        cache: ``[num_blocks, H, block_size, 2 * D]``, any strides, of the keys' dtype.
        scores: float32 ``[num_blocks, H, block_size]``, contiguous; None: not scored.
        name: of the score, one of ``SCORES``.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    _check(keys, slot_mapping, cache[..., 0] if scores is None else scores, scored=scores is not None)
    check_tensor("values", values, keys.dtype, tuple(keys.shape), keys.device)
    shape = (-1, keys.shape[1], -1, 2 * keys.shape[2])
    check_tensor("cache", cache, keys.dtype, shape, keys.device)
    if scores is not None and (cache.shape[0], cache.shape[2]) != (scores.shape[0], scores.shape[2]):
        raise ValueError(f"scores is {list(scores.shape)}, which does not fit cache {list(cache.shape)}")
    check_device(keys.device, "index_put_")
    rows = slot_mapping.numel() * keys.shape[1]
    if rows:
        from write_kernels import cache_write_kernel

        constexprs = _constexprs(keys.dtype, keys.shape[1], keys.shape[2], cache.shape[2])
        part, sign = SCORES[name]
        cache_write_kernel[(-(-rows // constexprs["ROWS"]),)](
            keys,
            values,
            cache,
            slot_mapping,
            scores,
            rows,
            *keys.stride(),
            *values.stride(),
            *cache.stride(),
            PART=part,
            SIGN=sign,
            **constexprs,
            num_warps=_WARPS,
        )


def read_scores(layers: PagedLayers, batch: RaggedBatch, scores: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Collect the scores that were kept per slot, for all requests, layers and KV heads in one launch.

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        scores: float32 ``[L, num_blocks, H, block_size]``, contiguous.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``, bit for bit what was kept.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = check_paged(layers, batch, out, "read_scores_ref", reads=False)
    _check_kept(layers, scores)
    if out.numel():
        from write_kernels import read_scores_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, _SLOTS)
        read_scores_kernel[(rows * splits,)](
            scores,
            batch.block_tables,
            batch.lengths,
            batch.offsets,
            out,
            batch.total,
            batch.block_tables.shape[1],
            layers.num_blocks,
            splits,
            layers.num_layers,
            layers.num_kv_heads,
            BLOCK_SIZE=layers.block_size,
            TILE=_SLOTS,
            num_warps=4,
        )
    return out


def read_scores_ref(layers: PagedLayers, batch: RaggedBatch, scores: Tensor) -> Tensor:
    """Collect as ``read_scores`` does, one request at a time."""
    out = check_paged(layers, batch, None, "", reads=False)
    _check_kept(layers, scores)
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        slots = torch.arange(length, device=batch.device)
        blocks = batch.block_tables[request][slots // layers.block_size].long()
        out[..., first : first + length] = scores[:, blocks, :, slots % layers.block_size].permute(1, 2, 0)
    return out


def _write(x: Tensor, slot_mapping: Tensor, scores: Tensor, sign: float, reference: str) -> None:
    _check(x, slot_mapping, scores)
    check_device(x.device, reference)
    rows = slot_mapping.numel() * x.shape[1]
    if rows:
        from write_kernels import norm_write_kernel

        constexprs = _constexprs(x.dtype, x.shape[1], x.shape[2], scores.shape[2])
        norm_write_kernel[(-(-rows // constexprs["ROWS"]),)](
            x, slot_mapping, scores, rows, *x.stride(), SIGN=sign, **constexprs, num_warps=_WARPS
        )


def _write_ref(x: Tensor, slot_mapping: Tensor, scores: Tensor, sign: float) -> None:
    _check(x, slot_mapping, scores)
    written = (slot_mapping >= 0).nonzero().flatten()
    slots, size = slot_mapping[written], scores.shape[2]
    scores[slots // size, :, slots % size] = sign * norms_ref(x[written].float())


def _check(x: Tensor, slot_mapping: Tensor, scores: Tensor, *, scored: bool = True) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"keys of {x.dtype} can't be scored: use float16, bfloat16 or float32")
    check_tensor("keys", x, x.dtype, (-1, -1, -1), x.device)
    check_array("slot_mapping", slot_mapping, torch.int64, (-1,), x.device)
    if x.shape[0] < slot_mapping.numel():
        raise ValueError(f"slot_mapping has {slot_mapping.numel()} tokens, above the {x.shape[0]} of keys: cut it")
    if not 2 <= x.shape[2] <= 256:
        raise ValueError(f"head_dim={x.shape[2]} must be 2 to 256")
    if slot_mapping.numel() * x.shape[1] > 2**30:
        raise ValueError(
            f"{slot_mapping.numel()} tokens of {x.shape[1]} heads are over 2**30 rows: write fewer at once"
        )
    if scored:
        check_array("scores", scores, torch.float32, (-1, x.shape[1], -1), x.device)


def _check_kept(layers: PagedLayers, scores: Tensor) -> None:
    shape = (layers.num_layers, layers.num_blocks, layers.num_kv_heads, layers.block_size)
    check_array("scores", scores, torch.float32, shape, layers.device)


def _constexprs(dtype: torch.dtype, heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    width = power_of_two(head_dim)
    rows = max(1, _ROWS_BYTES // (width * dtype.itemsize))
    return {"H": heads, "D": head_dim, "WIDTH": width, "BLOCK_SIZE": block_size, "ROWS": rows}


def variants() -> list[Variant]:
    """Return what the launchers may launch, of the kinds of caches those that differ most."""
    from write_kernels import cache_write_kernel, norm_write_kernel, read_scores_kernel

    found = []
    mapping = {"slot_mapping": "*i64", "scores": "*fp32"}
    for dtype, heads, head_dim in (
        (torch.bfloat16, 2, 64),
        (torch.float16, 3, 80),
        (torch.float32, 1, 256),
    ):
        constexprs, kind = _constexprs(dtype, heads, head_dim, 16), f"*{DTYPES[dtype]}"
        name = f"{DTYPES[dtype]}-{heads}x{head_dim}"
        norm = constexprs | {"SIGN": -1.0, "stride_dim": 1}
        rows = ("stride_token", "stride_head")
        found.append(
            Variant(f"write-norm-{name}", norm_write_kernel, {"x": kind, **mapping}, norm, _WARPS, divisible=rows)
        )
        write = constexprs | {"PART": 0, "SIGN": -1.0} | dict.fromkeys(("key_dim", "value_dim", "cache_dim"), 1)
        pointers = {"keys": kind, "values": kind, "cache": kind, **mapping}
        divisible = ("key_token", "key_head", "value_token", "value_head", "cache_block", "cache_head", "cache_slot")
        for scored in (True, False):
            chosen = write if scored else write | {"scores": None}
            label = f"write-cache-{name}{'-scored' if scored else ''}"
            found.append(Variant(label, cache_write_kernel, pointers, chosen, _WARPS, divisible=divisible))
    pointers = {"scores": "*fp32", "tables": "*i32", "lengths": "*i32", "offsets": "*i64", "out": "*fp32"}
    found.append(Variant("read-scores", read_scores_kernel, pointers, {"BLOCK_SIZE": 16, "TILE": _SLOTS}, 4))
    return found
