"""What the demo and the benchmarks do differently on different hardware."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The engine core must run in the process that samples its scheduler at each step.
REQUIRED_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The model is a local folder; nothing needs the network.
_COMMON_ENV = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Device:
    """How to run on this machine.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``; also the torch device on which texts are scored.
        description: what it is, for people.
        engine_args: arguments of ``vllm.LLM``.
        env: environment variables of the engines' processes; the user's own values win, unlike over ``REQUIRED_ENV``.
    """

    kind: str
    description: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def share_the_cores() -> None:
    """Let idle OpenMP threads sleep, here and in child processes, unless the user has decided otherwise.

    They spin by default. Where another process wants one of two cores, spinning made an engine five times slower; on
    idle cores, sleeping costs little. OpenMP reads this once, so call it before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def detect() -> Device:
    """Return the first CUDA device if torch has one, the CPU otherwise."""
    import torch

    if torch.cuda.is_available():
        return Device("cuda", torch.cuda.get_device_name(0), env=_COMMON_ENV)
    return Device(
        kind="cpu",
        description=f"{_cpu_name()}, {os.cpu_count()} cores",
        # float32: without AVX512-BF16 or AMX, bfloat16 is emulated and about four times slower. Blocks of 32: the
        # CPU backend takes multiples of 32 only. Eager: compiling costs more than a run of this size wins.
        engine_args={"dtype": "float32", "block_size": 32, "enforce_eager": True},
        env=_COMMON_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
