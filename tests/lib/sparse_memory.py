"""Tensors with more than 2**31 elements of which a test touches a few: memory that is not touched is not there."""

from __future__ import annotations

import math
import mmap

import torch

_MAP_NORESERVE = 0x4000  # Linux's; in Python's mmap since 3.13 or so


def sparse(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return a contiguous tensor of zeros; on the CPU its pages come into being when they are written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags), dtype=dtype).view(shape)
