"""What the tests on vLLM share: tiny models, written once, and environment variables for small machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Tiny models gain nothing from threads, and vLLM's CPU threads spin: one each keeps a 2-core machine usable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model by the name of its architecture (see nitro.testing.matrix)."""
    from nitro.testing import matrix, models

    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        path = folder / name
        if not path.exists():
            arch, heads = matrix.ARCHITECTURES[name]
            models.make_tiny_model(path, arch, num_kv_heads=heads, vocab=512, max_len=1024)
        return path

    return make
