"""Compaction: survivors become dense."""

from __future__ import annotations

import torch
from torch import Tensor

# A move must keep every bit, also of NaNs, and work for dtypes that have no arithmetic: move integers of equal width.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_ref(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows in the order of ``index``, out of place and bit for bit.

    Args:
        x: ``[..., N, D]``, any dtype of 1, 2, 4 or 8 bytes, any strides.
        index: int32 or int64 ``[..., keep]`` with the leading dimensions of ``x``; ``0 <= index < N``. The bounds are
            checked on the CPU only, since looking at them elsewhere would wait for the device.

    Returns:
        A new tensor ``[..., keep, D]`` of ``x``'s dtype; row r is ``x[..., index[..., r], :]``.

    Raises:
        TypeError: if a dtype is none of the above.
        ValueError: if shapes do not fit, or an index is out of bounds.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"index must be int32 or int64, got {index.dtype}")
    if x.itemsize not in _INTEGERS:
        raise TypeError(f"x must have a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if x.ndim < 2 or x.shape[:-2] != index.shape[:-1] or x.ndim != index.ndim + 1:
        raise ValueError(
            f"x must be [..., N, D] and index [..., keep] with equal leading dimensions, "
            f"got {list(x.shape)} and {list(index.shape)}"
        )
    num_rows, width = x.shape[-2:]
    if index.device.type == "cpu" and index.numel():
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= num_rows:
            raise ValueError(f"index spans {low} to {high}, but must stay within 0 to {num_rows - 1}, the rows of x")
    rows = index.to(torch.int64).unsqueeze(-1).expand(*index.shape, width)
    return x.view(_INTEGERS[x.itemsize]).gather(-2, rows).view(x.dtype)
