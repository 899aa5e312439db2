"""FP8 caches: 8-bit floating-point numbers, which stand for K and V divided by a scale of their layer or KV head.

Moves carry the bits and need no scale. Of the scores, those that are a length (``knorm``, ``vnorm``, ``vnorm_centred``)
are multiplied with it; the others are ratios of lengths of one head, in which it cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def checked_scales(scales: Tensor | None, cache: Tensor, num_layers: int) -> Tensor | None:
    """Return the scales of caches like this one, ones if there are none; None if they are not FP8.

    Args:
        scales: float32 ``[num_layers, 2, num_kv_heads]``, contiguous, on the cache's device, or None.
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.
        num_layers: how many caches there are.

    Raises:
        TypeError: scales are no float32, or the cache is not FP8.
        ValueError: scales have another shape or device, or are not contiguous.
    """
    if cache.dtype not in FP8:
        if scales is not None:
            raise TypeError(f"scales are of FP8 caches, and these are {cache.dtype}: pass none, or view them as FP8")
        return None
    shape = (num_layers, 2, cache.shape[1])
    if scales is None:
        return torch.ones(shape, dtype=torch.float32, device=cache.device)
    if scales.dtype != torch.float32:
        raise TypeError(f"scales must be float32, got {scales.dtype}: convert them")
    if tuple(scales.shape) != shape or scales.device != cache.device or not scales.is_contiguous():
        raise ValueError(
            f"scales must be [num_layers, 2, num_kv_heads] = {list(shape)}, contiguous and on {cache.device}, got "
            f"{list(scales.shape)} with strides {scales.stride()} on {scales.device}: pass such a tensor"
        )
    return scales


def dequantised(rows: Tensor, scales: Tensor) -> Tensor:
    """Return what FP8 rows stand for, float32.

    Args:
        rows: ``[num_kv_heads, ..., 2 * head_dim]``, K and V side by side.
        scales: float32 ``[2, num_kv_heads]`` of their layer.
    """
    factors = scales.repeat_interleave(rows.shape[-1] // 2, dim=0).T  # [num_kv_heads, 2 * head_dim]
    return rows.float() * factors.view(len(rows), *[1] * (rows.ndim - 2), -1)
