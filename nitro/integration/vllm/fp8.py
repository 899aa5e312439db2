"""FP8 KV caches as vLLM has them: bytes, which the attention backend takes for FP8, and scales in attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nitro.errors import UnsupportedError
from nitro.kernels.fp8 import FP8

FP8_KV = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM's names of FP8 caches with scales per layer or KV head, and their encodings on NVIDIA GPUs.

Others (``fp8_per_token_head``, ``fp8_ds_mla``) have scales in the cache, between the numbers.
"""


def as_numbers(layer: Any, kv_cache: Tensor) -> Tensor:
    """Return a layer's cache, viewed as the FP8 numbers that its bytes stand for; other caches as they are.

    Raises:
        UnsupportedError: it is not known what the bytes stand for.
    """
    if kv_cache.is_floating_point():
        return kv_cache
    name = str(getattr(layer, "kv_cache_dtype", None))
    if name not in FP8_KV:
        raise UnsupportedError(
            f"the KV cache has elements of {kv_cache.dtype} for kv_cache_dtype={name!r}, which Nitro can't read; use "
            "--kv-cache-dtype fp8, or auto"
        )
    return kv_cache.view(FP8_KV[name])


def scales_of(layers: Sequence[Any], kv_cache: Tensor) -> Tensor | None:
    """Return the scales of all layers, float32 ``[num_layers, 2, num_kv_heads]``, keys' first; None if not FP8.

    Args:
        layers: vLLM's attention layers, of which each has one scale, or one for each of its KV heads.
        kv_cache: of one of them, ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``, as numbers.
    """
    if kv_cache.dtype not in FP8:
        return None
    pairs = [torch.stack([_per_head(scale, kv_cache) for scale in (x._k_scale, x._v_scale)]) for x in layers]
    return torch.stack(pairs)


def _per_head(scale: Tensor, kv_cache: Tensor) -> Tensor:
    return scale.detach().to(kv_cache.device, torch.float32).reshape(-1).expand(kv_cache.shape[1])
