"""What the tests on vLLM share: tiny models, written once, and environment variables for small machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .simulation import Simulation

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


@pytest.fixture
def simulate(tiny: Callable[[str], Path]) -> Callable[..., Simulation]:
    """Return a maker of simulated engines; its settings are those of `lives`, unless others are given."""
    from vllm.engine.arg_utils import EngineArgs

    import nitro

    from . import lives, simulation

    def make(
        num_blocks: int = 40, *, seed: int = 0, lag: int = 0, chunk: int = 64, max_model_len: int = 256, **settings: Any
    ) -> Simulation:
        config = EngineArgs(
            model=str(tiny("llama-gqa")),
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=chunk,
            max_num_seqs=16,
            block_size=simulation.BLOCK,
            enable_prefix_caching=True,
            additional_config=nitro.vllm_config(**{**lives.SETTINGS, **settings}),
        ).create_engine_config()
        config.scheduler_config.async_scheduling = lag > 0
        return simulation.Simulation(config, num_blocks, seed=seed, lag=lag)

    return make
