"""What Nitro takes off the memory for the cache on a GPU: room for positions, and for what an eviction needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from nitro.integration.vllm.worker import NitroGPUWorker
from nitro.kernel_compactor import SCRATCH_BYTES, positions_bytes

SPECS = {
    dtype: FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)
    for dtype in (torch.bfloat16, torch.uint8)  # FP8 as vLLM has it
}
LAYERS = 24


def _available(
    monkeypatch: pytest.MonkeyPatch, found: int, asked: int | None, spec: FullAttentionSpec = SPECS[torch.bfloat16]
) -> int:
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: found)
    worker = object.__new__(NitroGPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked)
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: {str(i): spec for i in range(LAYERS)})
    return worker.determine_available_memory()


@pytest.mark.parametrize("spec", SPECS.values(), ids=map(str, SPECS))
@pytest.mark.parametrize("found", [2**28 + 2**20, 2**33, 2**37 + 1])
def test_cache_positions_and_scratch_fit(monkeypatch: pytest.MonkeyPatch, found: int, spec: FullAttentionSpec) -> None:
    cache = _available(monkeypatch, found, None, spec)
    blocks = cache // (LAYERS * spec.page_size_bytes)
    assert blocks > 0
    assert cache + blocks * LAYERS * positions_bytes(2, 16) + SCRATCH_BYTES <= found
    positions = positions_bytes(2, 16) / spec.page_size_bytes
    assert found - SCRATCH_BYTES - cache < (positions + 0.004) * found, "and hardly anything is wasted"


def test_a_small_cache_that_the_user_has_asked_for_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _available(monkeypatch, 2**26, 2**26)
    assert 0.98 * 2**26 < cache < 2**26


def test_no_memory_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _available(monkeypatch, 2**20, None) == 0
