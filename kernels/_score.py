"""What the launchers of scoring kernels share: tile shapes, arguments, outputs, and the dense view of references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nitro.kernels._checks import check_array, check_device, check_positions, check_tables
from nitro.kernels._triton.variants import Variant
from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers, RaggedBatch

REQUESTS = {"tables": "*i32", "lengths": "*i32", "protect": "*i32", "offsets": "*i64"}
"""Triton's types of what a batch consists of."""

DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
"""Caches that can be scored, and Triton's names for them."""

HEAD_DIMS = range(2, 257)
"""Head dimensions that can be scored."""

WHOLE = 4096
"""Slots of the longest row that one program takes as a whole where rows are added up."""
CHUNK = 1024
"""Slots that one program adds up of a longer row, which is shared by several, in further launches."""

_MIN_TILE = 16
_PROGRAMS = 8192  # rows are shared by several programs while there are fewer than this: a few for each processor


def can_score(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether there are kernels for caches of this dtype and head dimension."""
    return dtype in DTYPES and head_dim in HEAD_DIMS


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def splits_of(batch: RaggedBatch, rows: int, tile: int) -> int:
    """Return how many programs share a row in a kernel whose tiles are independent."""
    return max(1, min(cdiv(batch.max_length, tile), cdiv(_PROGRAMS, max(rows, 1))))


class Part(NamedTuple):
    """One launch of a kernel that adds rows up.

    Attributes:
        phase: 0 for the rows of up to ``WHOLE`` slots, one by a program; then 1, 2, ... for all others.
        per_row: programs that share a row.
        rows: of ``partials``.
        partials: float32 ``[L, H, rows, width]``, where partial sums go; None in phase 0.
        constants: constexpr parameters.
    """

    phase: int
    per_row: int
    rows: int
    partials: Tensor | None
    constants: dict[str, int]


def parts_of(layers: PagedLayers, batch: RaggedBatch, width: int, phases: int) -> list[Part]:
    """Return the launches that add up all rows. A row's way depends on its own length alone, and so do its bits.

    Args:
        layers: the caches.
        batch: the requests.
        width: elements of a chunk's partial sums.
        phases: launches that longer rows take.
    """
    parts = [Part(0, 1, 0, None, part_constants(0))]
    if batch.max_length > WHOLE:
        rows = batch.total // CHUNK + batch.num_requests
        shape = (layers.num_layers, layers.num_kv_heads, rows, width)
        partials = torch.empty(shape, dtype=torch.float32, device=batch.device)
        per_row = cdiv(batch.max_length, CHUNK)
        parts += [Part(phase + 1, per_row, rows, partials, part_constants(phase + 1)) for phase in range(phases)]
    return parts


def part_constants(phase: int) -> dict[str, int]:
    """Return the constexpr parameters of a phase."""
    return {"PHASE": phase, "CHUNK": WHOLE if phase == 0 else CHUNK, "WHOLE": WHOLE}


def number_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a number that is computed with: FP8 becomes float16, and takes as many registers."""
    return max(dtype.itemsize, 2)


def tile_shape(dtype: torch.dtype, head_dim: int, tile_bytes: int) -> dict[str, int]:
    """Return WIDTH, ``head_dim`` padded to a power of two, and TILE, the slots whose numbers take so many bytes."""
    width = power_of_two(head_dim)
    return {"WIDTH": width, "TILE": max(tile_bytes // (width * number_bytes(dtype)), _MIN_TILE)}


def cache_constants(dtype: torch.dtype, head_dim: int, block_size: int, aligned: bool) -> dict[str, Any]:
    """Return the constexpr parameters that describe caches."""
    from triton import language as tl

    return {"D": head_dim, "BLOCK_SIZE": block_size, "DTYPE": tl.dtype(DTYPES[dtype]), "ALIGNED": aligned}


def layers_constants(layers: PagedLayers) -> dict[str, Any]:
    """Return the constexpr parameters that describe these caches."""
    return cache_constants(layers.dtype, layers.head_dim, layers.block_size, layers.aligned)


def cache_variant(
    name: str,
    kernel: Any,
    dtype: torch.dtype,
    head_dim: int,
    chosen: dict[str, Any],
    pointers: dict[str, str],
    maxnreg: Mapping[int, int] = MappingProxyType({}),
) -> Variant:
    """Return the variant of a kernel that reads aligned caches in blocks of 16.

    Args:
        name: what to call it; dtype and head_dim are added.
        kernel: the jitted function.
        dtype: of the caches.
        head_dim: of the caches.
        chosen: what the launcher chooses for them: constexpr parameters and ``num_warps``.
        pointers: types of the parameters that not every kernel has.
        maxnreg: see `Variant`.
    """
    constants = {**cache_constants(dtype, head_dim, 16, True), **chosen, "stride_dim": 1}
    num_warps = constants.pop("num_warps")
    if "scales" in kernel.arg_names and dtype not in FP8:
        constants["scales"] = None
    return Variant(
        f"{name}-{DTYPES[dtype]}-{head_dim}",
        kernel,
        {**REQUESTS, "base": "*i64", "scales": "*fp32", "out": "*fp32", **pointers},
        constants,
        num_warps,
        divisible=("stride_block", "stride_head", "stride_slot"),
        maxnreg=maxnreg,
    )


def register_limit(maxnreg: Mapping[int, int], device: torch.device) -> dict[str, int]:
    """Return Triton's launch option for a variant's ``maxnreg`` on a device: none where there is no limit."""
    if device.type != "cuda" or not maxnreg:
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    limit = maxnreg.get(10 * major + minor)
    return {} if limit is None else {"maxnreg": limit}


def check_paged(
    layers: PagedLayers, batch: RaggedBatch, out: Tensor | None, reference: str, *, reads: bool = True
) -> Tensor:
    """Check what all scores of paged caches have in common, and return ``out`` or a new tensor of its shape.

    Args:
        layers: the caches.
        batch: the requests.
        out: where the scores go, float32 ``[L, H, total]`` and contiguous, if not into new memory.
        reference: the name of the launcher's reference, for the message that Triton can't run here; empty in it.
        reads: whether keys or values are read, so that their dtype and size matter.

    Raises:
        TypeError: the caches or ``out`` have the wrong dtype.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    if reads and layers.dtype not in DTYPES:
        raise TypeError(
            f"caches of {layers.dtype} can't be scored: use float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, "
            "or a policy that reads none"
        )
    if reads and layers.head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={layers.head_dim} must be 2 to 256 to be scored")
    check_tables(layers, batch)
    if reference:
        check_device(layers.device, reference)
    return check_out((layers.num_layers, layers.num_kv_heads), batch, out)


def check_out(layers_heads: tuple[int, int], batch: RaggedBatch, out: Tensor | None) -> Tensor:
    """Return ``out``, checked, or a new float32 ``[L, H, total]``."""
    shape = (*layers_heads, batch.total)
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=batch.device)
    check_array("out", out, torch.float32, shape, batch.device)
    return out


def check_order(order: Tensor | None, layers_heads: tuple[int, int], batch: RaggedBatch) -> None:
    """Raise unless ``order`` is None or a contiguous int32 ``[L, H, total]``."""
    if order is None:
        return
    check_array("order", order, torch.int32, (*layers_heads, batch.total), batch.device)


def check_moved(layers: PagedLayers, positions: Tensor | None) -> None:
    """Raise unless ``positions`` is None or fits the caches."""
    if positions is not None:
        check_positions(layers, positions)


def dense_rows(layers: PagedLayers, batch: RaggedBatch) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield of each request its index, its columns, and its keys and values, float32 ``[L, H, length, D]``."""
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        table = batch.block_tables[request]
        rows = torch.stack([layers.numbers(layer, table, length).float() for layer in range(layers.num_layers)])
        keys, values = rows[..., : layers.head_dim], rows[..., layers.head_dim :]
        yield request, slice(first, first + length), keys.contiguous(), values.contiguous()


def dense_positions(layers: PagedLayers, batch: RaggedBatch, positions: Tensor | None, request: int) -> Tensor:
    """Return one request's logical positions, int32 ``[L, H, length]``."""
    slots = torch.arange(int(batch.lengths[request]), dtype=torch.int32, device=batch.device)
    if positions is None:
        return slots.expand(layers.num_layers, layers.num_kv_heads, len(slots))
    blocks = batch.block_tables[request][slots // layers.block_size].long()
    return positions[:, blocks, :, slots.long() % layers.block_size].permute(1, 2, 0)


def in_order(x: Tensor, order: Tensor | None, columns: slice) -> Tensor:
    """Return ``x`` ``[L, H, length, ...]`` with its slots in logical order."""
    if order is None:
        return x
    index = order[..., columns].long()
    return x.gather(2, index.view(*index.shape, *[1] * (x.ndim - 3)).expand_as(x))


def by_slot(x: Tensor, order: Tensor | None, columns: slice) -> Tensor:
    """Return ``x`` ``[L, H, length]``, which is in logical order, by slot."""
    return x if order is None else torch.empty_like(x).scatter_(2, order[..., columns].long(), x)


def norms_ref(rows: Tensor) -> Tensor:
    """Return the L2 norms ``[...]`` of float32 rows ``[..., D]``; NaN where a norm is not finite."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.masked_fill(~norms.isfinite(), torch.nan)
