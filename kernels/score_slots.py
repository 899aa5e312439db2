"""Scores that look at one slot at a time: norms of keys and values, age, a random draw."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_array
from nitro.kernels._score import (
    REQUESTS,
    cache_variant,
    check_moved,
    check_paged,
    dense_positions,
    dense_rows,
    layers_constants,
    norms_ref,
    splits_of,
    tile_shape,
)
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import PagedLayers, RaggedBatch

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195): its increment, and the
# (right shift, multiplier) pairs and last shift of its output function.
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = 2**64 - 1

_TILE_BYTES = 16384  # that a program loads at a time: enough in flight with a few programs on each processor
_SLOTS = 512  # per tile of the kernels that read no keys or values


def knorm(layers: PagedLayers, batch: RaggedBatch, *, out: Tensor | None = None) -> Tensor:
    """Score each slot by minus the L2 norm of its key (Devoto et al., https://arxiv.org/abs/2406.11430).

    Args:
        layers: the caches; float16, bfloat16, float32 or FP8.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``, higher stays; NaN where the norm is not finite.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    return _norm(layers, batch, out, part=0, sign=-1.0, reference="knorm_ref")


def knorm_ref(layers: PagedLayers, batch: RaggedBatch) -> Tensor:
    """Score as ``knorm`` does, from gathered keys."""
    out = check_paged(layers, batch, None, "")
    for _, columns, keys, _ in dense_rows(layers, batch):
        out[..., columns] = -norms_ref(keys)
    return out


def vnorm(layers: PagedLayers, batch: RaggedBatch, *, out: Tensor | None = None) -> Tensor:
    """Score each slot by the L2 norm of its value; arguments, result and errors are those of ``knorm``."""
    return _norm(layers, batch, out, part=1, sign=1.0, reference="vnorm_ref")


def vnorm_ref(layers: PagedLayers, batch: RaggedBatch) -> Tensor:
    """Score as ``vnorm`` does, from gathered values."""
    out = check_paged(layers, batch, None, "")
    for _, columns, _, values in dense_rows(layers, batch):
        out[..., columns] = norms_ref(values)
    return out


def _norm(
    layers: PagedLayers, batch: RaggedBatch, out: Tensor | None, *, part: int, sign: float, reference: str
) -> Tensor:
    out = check_paged(layers, batch, out, reference)
    if out.numel():
        from nitro.kernels._triton.score_slots import norm_kernel

        chosen = _choice(layers.dtype, layers.head_dim)
        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, chosen["TILE"])
        norm_kernel[(rows * splits,)](
            layers.base,
            layers.scales,
            batch.block_tables,
            batch.lengths,
            batch.offsets,
            out,
            batch.total,
            batch.block_tables.shape[1],
            splits,
            layers.num_layers,
            layers.num_kv_heads,
            *layers.strides,
            PART=part,
            SIGN=sign,
            **layers_constants(layers),
            **chosen,
        )
    return out


def streaming(
    layers: PagedLayers,
    batch: RaggedBatch,
    logical_lengths: Tensor,
    positions: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Score each slot by minus its age in tokens (StreamingLLM, https://arxiv.org/abs/2309.17453).

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        logical_lengths: int32 ``[R]``, tokens computed so far, counting evicted ones.
        positions: int32 ``[L, num_blocks, H, block_size]``, each slot's logical position; None where nothing was
            evicted yet, so that slot i holds token i.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``: position - logical length, exact below 2**24.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = check_paged(layers, batch, out, "streaming_ref", reads=False)
    _check_lengths(layers, batch, logical_lengths, positions)
    if out.numel():
        from nitro.kernels._triton.score_slots import streaming_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, _SLOTS)
        streaming_kernel[(rows * splits,)](
            positions,
            logical_lengths,
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


def streaming_ref(
    layers: PagedLayers, batch: RaggedBatch, logical_lengths: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Score as ``streaming`` does, one request at a time."""
    out = check_paged(layers, batch, None, "", reads=False)
    _check_lengths(layers, batch, logical_lengths, positions)
    for request, columns, _, _ in dense_rows(layers, batch):
        where = dense_positions(layers, batch, positions, request)
        out[..., columns] = (where - logical_lengths[request]).float()
    return out


def random(
    layers: PagedLayers,
    batch: RaggedBatch,
    states: Tensor,
    layer_ids: Tensor,
    head_ids: Tensor,
    positions: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw a score for each (request, layer, head, position); the same four give the same bits in every batch.

    Args:
        layers: the caches, of which only the shape is looked at.
        batch: the requests; ``keep``, ``protect`` and ``window`` are not looked at.
        states: int64 ``[R]``, `random_state` of each request.
        layer_ids: int64 ``[L]``, index of each layer in the whole model.
        head_ids: int64 ``[H]``, index of each KV head in the whole model.
        positions: as of ``streaming``.
        out: where the scores go; default: new memory.

    Returns:
        float32 ``[L, H, total]``, multiples of 2**-24 in [0, 1).

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    out = check_paged(layers, batch, out, "random_ref", reads=False)
    _check_ids(layers, batch, states, layer_ids, head_ids, positions)
    if out.numel():
        from nitro.kernels._triton.score_slots import random_kernel

        rows = batch.num_requests * layers.num_layers * layers.num_kv_heads
        splits = splits_of(batch, rows, _SLOTS)
        random_kernel[(rows * splits,)](
            positions,
            states,
            layer_ids,
            head_ids,
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


def random_ref(
    layers: PagedLayers,
    batch: RaggedBatch,
    states: Tensor,
    layer_ids: Tensor,
    head_ids: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Draw as ``random`` does, one request at a time."""
    out = check_paged(layers, batch, None, "", reads=False)
    _check_ids(layers, batch, states, layer_ids, head_ids, positions)
    for request, columns, _, _ in dense_rows(layers, batch):
        where = dense_positions(layers, batch, positions, request).long()
        h = _absorb(_absorb(states[request], layer_ids)[:, None], head_ids)[:, :, None]
        out[..., columns] = _shift_right(_absorb(h, where), 40).float() * 2.0**-24
    return out


def random_state(*counters: int) -> int:
    """Return the generator's state after these unsigned 64-bit numbers (seed, request), as the int64 of equal bits."""
    h = 0
    for counter in counters:
        z = ((h ^ counter) + _GAMMA) & _MASK
        for shift, multiplier in _ROUNDS:
            z = ((z ^ (z >> shift)) * multiplier) & _MASK
        h = z ^ (z >> _LAST_SHIFT)
    return _signed(h)


def _check_lengths(layers: PagedLayers, batch: RaggedBatch, logical_lengths: Tensor, positions: Tensor | None) -> None:
    check_array("logical_lengths", logical_lengths, torch.int32, (batch.num_requests,), batch.device)
    check_moved(layers, positions)


def _check_ids(
    layers: PagedLayers,
    batch: RaggedBatch,
    states: Tensor,
    layer_ids: Tensor,
    head_ids: Tensor,
    positions: Tensor | None,
) -> None:
    check_array("states", states, torch.int64, (batch.num_requests,), batch.device)
    check_array("layer_ids", layer_ids, torch.int64, (layers.num_layers,), batch.device)
    check_array("head_ids", head_ids, torch.int64, (layers.num_kv_heads,), batch.device)
    check_moved(layers, positions)


def _absorb(h: Tensor, counter: Tensor) -> Tensor:
    """Return the next state; int64 tensors that hold unsigned bits, and broadcast."""
    z = (h ^ counter) + _signed(_GAMMA)
    for shift, multiplier in _ROUNDS:
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    return z ^ _shift_right(z, _LAST_SHIFT)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # int64's own shift copies the sign into the top bits; clear them.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def _choice(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    return {**tile_shape(dtype, head_dim, _TILE_BYTES), "STAGES": 3, "num_warps": 4}


def variants() -> list[Variant]:
    """Return what the launchers may launch, of the kinds of caches those that differ most."""
    from nitro.kernels._triton.score_slots import norm_kernel, random_kernel, streaming_kernel

    found = [
        cache_variant(
            f"score-{name}", norm_kernel, dtype, head_dim, _choice(dtype, head_dim) | {"PART": part, "SIGN": sign}, {}
        )
        for name, part, sign, dtype, head_dim in (
            ("knorm", 0, -1.0, torch.float16, 128),
            ("knorm", 0, -1.0, torch.float32, 96),
            ("knorm", 0, -1.0, torch.float8_e4m3fn, 128),
            ("vnorm", 1, 1.0, torch.bfloat16, 64),
        )
    ]
    sizes = {"BLOCK_SIZE": 16, "TILE": _SLOTS}
    pointers = {**REQUESTS, "logical_lengths": "*i32", "states": "*i64", "layers": "*i64", "heads": "*i64"}
    for name, kernel in (("streaming", streaming_kernel), ("random", random_kernel)):
        pointers |= {"positions": "*i32", "out": "*fp32"}
        found.append(Variant(f"score-{name}", kernel, pointers, sizes, 4))
        found.append(Variant(f"score-{name}-unmoved", kernel, pointers, sizes | {"positions": None}, 4))
    return found
