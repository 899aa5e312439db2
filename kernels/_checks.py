"""What launchers check before they launch: an error on the host costs nothing, one on the device costs the process."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels.paged import PagedLayers, RaggedBatch


def interpreted() -> bool:
    """Return whether Triton runs kernels on the CPU in this process."""
    import triton  # here and not above: takes long to import, and references work without it

    return bool(triton.knobs.runtime.interpret)


def check_device(device: torch.device, reference: str) -> None:
    """Raise ValueError unless Triton can run on ``device`` in this process; ``reference`` is what can."""
    if device.type == "cpu" and not interpreted():
        raise ValueError(
            "tensors are on the CPU, where Triton only runs with TRITON_INTERPRET=1: set it before the process imports "
            f"triton, or call {reference}"
        )
    if device.type != "cpu" and interpreted():
        raise ValueError(f"tensors are on {device}, but TRITON_INTERPRET=1 runs kernels on the CPU: unset it")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"tensors are on {device}, but the current device is cuda:{torch.cuda.current_device()}: "
            f"call within torch.cuda.device({device.index})"
        )


def check_tensor(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless ``x`` has this dtype (TypeError), shape and device (ValueError); -1 in ``shape`` fits any size."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of {dtype} on {device}, got {x!r}: pass one")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}: convert it")
    if x.ndim != len(shape) or any(want not in (-1, got) for got, want in zip(x.shape, shape, strict=True)):
        wanted = f"{list(shape)}{' (-1: any size)' if -1 in shape else ''}"
        raise ValueError(f"{name} must be {wanted}, got {list(x.shape)}: pass one of that shape")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, must be on {device}: move it")


def check_array(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise as ``check_tensor`` does, and ValueError unless ``x`` is contiguous."""
    check_tensor(name, x, dtype, shape, device)
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}: make it contiguous")


def check_ragged(name: str, x: Tensor, dtype: torch.dtype, batch: RaggedBatch) -> None:
    """Raise unless ``x`` is a ragged array ``[L, H, total]`` of ``batch`` whose slots are contiguous."""
    check_tensor(name, x, dtype, (-1, -1, batch.total), batch.device)
    if x.stride(2) != 1 and x.shape[2] > 1:
        raise ValueError(f"{name} has stride {x.stride(2)} from slot to slot, must have 1: make it contiguous")
    if batch.keep.ndim == 3 and batch.keep.shape[1:] != x.shape[:2]:
        raise ValueError(
            f"keep is {list(batch.keep.shape)}, which does not fit {x.shape[0]} layers and {x.shape[1]} KV heads "
            f"of {name}: make it [R, L, H] or [R]"
        )


def check_tables(layers: PagedLayers, batch: RaggedBatch) -> None:
    """Raise ValueError unless the block tables can hold ``max_length`` slots and lie on the caches' device."""
    if batch.device != layers.device:
        raise ValueError(f"the batch is on {batch.device}, the caches on {layers.device}: move the batch")
    room = batch.block_tables.shape[1] * layers.block_size
    if batch.num_requests and room < batch.max_length:
        raise ValueError(
            f"block_tables has {batch.block_tables.shape[1]} blocks of {layers.block_size}, room for {room} slots, "
            f"below max_length={batch.max_length}: pass wider tables"
        )
    check_row_lengths(layers, batch)


def check_row_lengths(layers: PagedLayers, batch: RaggedBatch, *, destinations: bool = False) -> None:
    """Raise ValueError where a request has too few blocks, or unknown ones, as far as the host knows."""
    name, least = ("dst_tables", batch.min_dst_block_size) if destinations else ("block_tables", batch.min_block_size)
    if least > layers.block_size:
        raise ValueError(
            f"a request has too few blocks in {name}: its slots would fit into blocks of {least} slots, and those of "
            f"the caches have {layers.block_size}: pass ceil(slots / {layers.block_size}) blocks of each request"
        )
    if batch.max_block >= layers.num_blocks:
        raise ValueError(
            f"the block tables name block {batch.max_block}, and the caches have {layers.num_blocks} blocks, 0 to "
            f"{layers.num_blocks - 1}: pass the tables of these caches"
        )


def check_positions(layers: PagedLayers, positions: Tensor, masses: Tensor | None = None) -> None:
    """Raise unless these, if given, are contiguous int32 ``[L, num_blocks, H, block_size]`` beside the caches."""
    shape = (layers.num_layers, layers.num_blocks, layers.num_kv_heads, layers.block_size)
    check_array("positions", positions, torch.int32, shape, layers.device)
    if masses is not None:
        check_array("masses", masses, torch.int32, shape, layers.device)
