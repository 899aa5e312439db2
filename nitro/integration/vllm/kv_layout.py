"""Find out where a backend stores K and V inside a block, by letting it write known values into a scratch block.

Backends differ: vLLM's GPU cache holds K and V side by side per slot, the CPU one transposes or tiles K depending on
the instruction set. All of them only permute the elements of one (block, KV head), so that permutation is learned from
the backend's own write path instead of being assumed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nitro.errors import UnsupportedError
from nitro.integration.vllm.fp8 import as_numbers, scales_of

_DIGIT = 128  # digits up to 127 are exact in every other float type vLLM caches, bf16 (8 bits of mantissa) included
_FP8_DIGIT = 8  # e5m2 has 3 bits of mantissa


def _encode(count: int, base: int) -> list[Tensor]:
    """Return the numbers 0 .. count-1 as digits, least significant first."""
    numbers = torch.arange(count)
    digits = []
    while True:
        digits.append(numbers % base)
        numbers = numbers // base
        if not numbers.any():
            return digits


def probe(layer: Any, kv_cache: Tensor, model_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return where K and V of one (block, KV head) lie, as int64 ``[block_size * head_dim]`` offsets each.

    Args:
        layer: vLLM's attention layer; its backend's ``do_kv_cache_update`` does the writing.
        kv_cache: the layer's cache, logically ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.
        model_dtype: of K and V before they are cached, if the cache is FP8; otherwise they have the cache's.

    Raises:
        UnsupportedError: the backend does more than permuting, and dividing by the scales of FP8.
    """
    _, heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    scratch = torch.zeros((2, *kv_cache.shape[1:]), dtype=kv_cache.dtype, device=kv_cache.device)
    if kv_cache.stride(1) < kv_cache.stride(2):  # slots before heads in memory: the scratch must look the same
        scratch = scratch.transpose(1, 2).contiguous().transpose(1, 2)
    numbers = as_numbers(layer, scratch)
    scales = scales_of([layer], numbers)
    base, written_dtype = (_DIGIT, kv_cache.dtype) if scales is None else (_FP8_DIGIT, model_dtype)
    slots = torch.arange(block_size, dtype=torch.int64, device=kv_cache.device)  # all of block 0
    offsets = torch.arange(block_size * width, device=kv_cache.device)

    def stored(x: Tensor, which: int) -> Tensor:
        """Write ``x``, which broadcasts to ``[block_size, heads, head_dim]``, as K (0) or V (1); return block 0."""
        filled = x.to(kv_cache.device, torch.float32).expand(block_size, heads, head_dim)
        if scales is not None:
            filled = filled * scales[0, which, :, None]
        filled = filled.to(written_dtype).contiguous()
        pair = [torch.zeros_like(filled), torch.zeros_like(filled)]
        pair[which] = filled
        scratch.zero_()
        layer.impl.do_kv_cache_update(layer, pair[0], pair[1], scratch, slots)
        return numbers[0, 0].float().reshape(-1)

    found = []
    for which in range(2):
        number = torch.zeros(block_size * width, dtype=torch.int64, device=kv_cache.device)
        for power, digit in enumerate(_encode(block_size * head_dim, base)):
            number += stored(digit.view(block_size, 1, head_dim), which).round().to(torch.int64) * base**power
        # Mark every element of K (or V) once more with ones, to tell the element 0 from elements never written.
        written = offsets[stored(torch.ones(1), which) == 1]
        place = torch.full((block_size * head_dim,), -1, dtype=torch.int64, device=kv_cache.device)
        if written.numel() == place.numel():
            place[number[written].clamp(0, place.numel() - 1)] = written
        found.append(place)
    both = torch.cat(found)
    if not torch.equal(both.sort().values, offsets):
        raise UnsupportedError(
            f"the attention backend {type(layer.impl).__name__} does not store K and V of dtype {numbers.dtype} as "
            "they are (or in a layout that Nitro does not understand); use another --attention-backend or an "
            "unquantised cache"
        )
    return found[0], found[1]


def side_by_side(k_place: Tensor, v_place: Tensor, head_dim: int) -> bool:
    """Return whether what ``probe`` found is K and V next to each other per slot, as in vLLM's GPU cache."""
    offsets = torch.arange(2 * k_place.numel(), device=k_place.device).view(-1, 2, head_dim)
    return torch.equal(k_place, offsets[:, 0].flatten()) and torch.equal(v_place, offsets[:, 1].flatten())


class BackendCache:
    """One layer's paged cache, read and written through the permutation that ``probe`` found."""

    def __init__(self, kv_cache: Tensor, k_place: Tensor, v_place: Tensor) -> None:
        """Wrap ``kv_cache`` ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` of any strides."""
        self.kv_cache = kv_cache
        self.num_kv_heads = int(kv_cache.shape[1])
        self.block_size = int(kv_cache.shape[2])
        self.head_dim = int(kv_cache.shape[3]) // 2
        self.device = kv_cache.device
        self._k, self._v = k_place, v_place

    def gather(self, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return K and V, ``[num_kv_heads, length, head_dim]`` each, of the first ``length`` slots of these blocks."""
        blocks = self.kv_cache[block_ids.to(self.kv_cache.device)].flatten(2)
        return self._ordered(blocks, self._k, length), self._ordered(blocks, self._v, length)

    def _ordered(self, blocks: Tensor, place: Tensor, length: int) -> Tensor:
        count, heads, _ = blocks.shape
        tokens = blocks[..., place].view(count, heads, self.block_size, self.head_dim)
        return tokens.transpose(0, 1).reshape(heads, -1, self.head_dim)[:, :length]

    def scatter(self, block_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite these blocks with K and V ``[num_kv_heads, length, head_dim]``; the last one's rest is zeroed."""
        heads, count = self.kv_cache.shape[1], block_ids.numel()
        blocks = self.kv_cache.new_empty(count, heads, self.block_size * 2 * self.head_dim)
        for place, source in ((self._k, keys), (self._v, values)):
            padded = source.new_zeros(heads, count * self.block_size, self.head_dim)
            padded[:, : source.shape[1]] = source
            tokens = padded.view(heads, count, self.block_size * self.head_dim).transpose(0, 1)
            blocks[..., place] = tokens
        self.kv_cache[block_ids.to(self.kv_cache.device)] = blocks.view(count, *self.kv_cache.shape[1:])
