"""The layout that ``probe`` learns, against vLLM's own CPU attention backend writing random K and V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import cpu_attn

from nitro.errors import UnsupportedError
from nitro.integration.vllm.kv_layout import BackendCache, probe


def cpu_layer(dtype: torch.dtype, block: int, dim: int) -> Any:
    impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    isa = impl.isa = cpu_attn._get_attn_isa(dtype, block, dim)  # vLLM 0.28 asks the backend, later ones the layer
    return SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)


class SideBySide:
    """A backend like vLLM's on GPUs: K and V next to each other per slot, for caches of any strides."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        block = cache.shape[2]
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            cache[slot // block, :, slot % block] = torch.cat([k, v], dim=-1)


class Lossy(SideBySide):
    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, (key / 16).round() * 16, value, cache, slots)


def roundtrip(layer: Any, kv: Tensor, blocks: list[int], length: int) -> None:
    heads, block, dim = kv.shape[1], kv.shape[2], kv.shape[3] // 2
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(length, heads, dim, generator=generator).to(kv.dtype)
    values = torch.randn(length, heads, dim, generator=generator).to(kv.dtype)
    slots = torch.tensor([blocks[i // block] * block + i % block for i in range(length)])
    layer.impl.do_kv_cache_update(layer, keys, values, kv, slots)
    cache = BackendCache(kv, *probe(layer, kv))
    read_k, read_v = cache.gather(torch.tensor(blocks), length)
    assert torch.equal(read_k, keys.transpose(0, 1))
    assert torch.equal(read_v, values.transpose(0, 1))
    # What we write must be, bit for bit, what the backend would have written for the same tokens.
    before = kv.clone()
    kept = torch.arange(0, length, 2)
    target = torch.tensor([1, 3, 5][: -(-len(kept) // block)])
    cache.scatter(target, read_k[:, kept], read_v[:, kept])
    expected = before.clone()
    expected[target] = 0
    slots = torch.tensor([int(target[i // block]) * block + i % block for i in range(len(kept))])
    layer.impl.do_kv_cache_update(layer, keys[kept].contiguous(), values[kept].contiguous(), expected, slots)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "dim"), [(32, 32), (32, 64), (64, 80), (128, 128), (32, 256)])
def test_cpu_backend(dtype: torch.dtype, block: int, dim: int) -> None:
    kv = torch.randn(8, 2, block, 2 * dim).to(dtype)
    roundtrip(cpu_layer(dtype, block, dim), kv, [6, 2, 4], 2 * block + 5)


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_side_by_side_with_both_strides(heads_first: bool, dtype: torch.dtype) -> None:
    kv = torch.randn(8, 3, 16, 128).to(dtype) if heads_first else torch.randn(8, 16, 3, 128).to(dtype).transpose(1, 2)
    roundtrip(SimpleNamespace(impl=SideBySide()), kv, [6, 2, 4], 37)


def test_a_cache_that_does_not_store_what_it_is_given_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Lossy does not store K and V of dtype torch\.float32 as they are"):
        probe(SimpleNamespace(impl=Lossy()), torch.zeros(4, 2, 16, 64))
