"""The layout that ``probe`` learns, against vLLM's own CPU attention backend writing random K and V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import cpu_attn

from nitro.config import Settings
from nitro.errors import UnsupportedError
from nitro.integration.vllm.caches import _compactor
from nitro.integration.vllm.fp8 import FP8_KV, as_numbers, scales_of
from nitro.integration.vllm.kv_layout import BackendCache, probe, side_by_side
from nitro.kernels.paged import PagedLayers
from nitro.policies.rotary import Rotations


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
    cache = BackendCache(kv, *probe(layer, kv, kv.dtype))
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
        probe(SimpleNamespace(impl=Lossy()), torch.zeros(4, 2, 16, 64), torch.float32)


class Fp8(SideBySide):
    """Like vLLM's backends with an FP8 cache: bytes, of K and V divided by their scales."""

    def __init__(self, stored: torch.dtype) -> None:
        self.stored = stored

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert cache.dtype == torch.uint8
        pair = (key, layer._k_scale), (value, layer._v_scale)
        bytes_of = [(x.float() / scale.view(-1, 1)).to(self.stored).view(torch.uint8) for x, scale in pair]
        super().do_kv_cache_update(layer, *bytes_of, cache, slots)


def fp8_layer(name: str, stored: torch.dtype, k_scale: Tensor, v_scale: Tensor) -> Any:
    return SimpleNamespace(impl=Fp8(stored), kv_cache_dtype=name, _k_scale=k_scale, _v_scale=v_scale)


def fp8_cache(heads_first: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (8, 3, 16, 128) if heads_first else (8, 16, 3, 128)
    kv = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return kv if heads_first else kv.transpose(1, 2)


FP8_SCALES = (
    (torch.tensor(1.0), torch.tensor(1.0)),
    (torch.tensor([0.0123]), torch.tensor([17.3])),
    (torch.tensor([0.3, 2.9, 0.011]), torch.tensor([1.0, 7.7, 0.19])),
)


@pytest.mark.parametrize("scales", FP8_SCALES, ids=["one", "layer", "heads"])
@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FP8_KV)
def test_fp8(name: str, model_dtype: torch.dtype, heads_first: bool, scales: tuple[Tensor, Tensor]) -> None:
    layer, kv = fp8_layer(name, FP8_KV[name], *scales), fp8_cache(heads_first)
    numbers = as_numbers(layer, kv)
    assert numbers.dtype == FP8_KV[name]
    assert side_by_side(*probe(layer, kv, model_dtype), 64)
    # What the scales say is what was written.
    rows = torch.rand(16, 3, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    rows = rows * torch.stack([scale.expand(3) for scale in scales])[:, None, :, None]  # [2, slots, heads, dim]
    layer.impl.do_kv_cache_update(layer, rows[0], rows[1], kv, torch.arange(16) + 5 * 16)
    paged = PagedLayers.of([numbers], scales_of([layer], numbers))
    got = paged.numbers(0, torch.tensor([5]), 16).transpose(0, 1)
    assert torch.allclose(got, torch.cat([rows[0], rows[1]], -1), rtol=0.13)


def test_vllm_has_fp8_caches_of_these_names() -> None:
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    assert set(FP8_KV) <= set(get_args(CacheDType))
    assert {STR_DTYPE_TO_TORCH_DTYPE[name] for name in FP8_KV} == {torch.uint8}
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    scales = scales_of([layer, layer], torch.zeros(4, 3, 16, 64).to(torch.float8_e4m3fn))
    assert torch.equal(scales, torch.ones(2, 2, 3))


def test_fp8_of_another_encoding_is_refused() -> None:
    layer = fp8_layer("fp8_e5m2", torch.float8_e4m3fn, *FP8_SCALES[0])
    with pytest.raises(UnsupportedError, match=r"Fp8 does not store K and V of dtype torch\.float8_e5m2 as they are"):
        probe(layer, fp8_cache(True), torch.bfloat16)


def test_bytes_of_unknown_meaning_are_refused() -> None:
    layer = SimpleNamespace(kv_cache_dtype="fp8_per_token_head")
    with pytest.raises(UnsupportedError, match=r"torch\.uint8 for kv_cache_dtype='fp8_per_token_head'"):
        as_numbers(layer, fp8_cache(True))


def test_fp8_without_kernels_is_refused() -> None:
    layer, kv = fp8_layer("fp8", torch.float8_e4m3fn, *FP8_SCALES[0]), torch.zeros(4, 2, 16, 64, dtype=torch.uint8)
    numbers = as_numbers(layer, kv)
    with pytest.raises(UnsupportedError, match=r"no kernels for this FP8 cache \(on cpu, head dimension 32"):
        _compactor(
            [numbers],
            [probe(layer, kv, torch.bfloat16)],
            layers=[0],
            heads=[0, 1],
            settings=Settings.parse({"budget": 64}),
            longest=100,
            usual=0,
            scales=scales_of([layer], numbers),
            rotations=Rotations(),
        )
