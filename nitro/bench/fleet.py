"""Engines in processes of their own: alive together where they fit, or started afresh one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nitro.bench.machine import BenchError, Machine
from nitro.bench.plan import Engine, Load, Plan
from nitro.child import Child
from nitro.errors import SettingsError

# -P: a checkout must not shadow what is installed.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "nitro.bench.engine")
_USABLE = 0.95  # of the free memory
_PATIENCE_S = 20.0
Follow = Callable[[dict[str, Any]], None]


class RunningEngine:
    """One engine's process."""

    def __init__(self, plan: Plan, engine: Engine, logs: Path, work: Path) -> None:
        """Start it; it is ready after `ready`.

        Args:
            plan: the benchmark.
            engine: which of its engines.
            logs: folder for what it prints.
            work: folder for what it reads.
        """
        self.engine = engine
        folder = plan.model.write(work / "model", plan.longest)
        spec = work / f"{engine.slug}.json"
        content = {
            "arguments": plan.arguments(engine, str(folder)),
            "blocks": engine.blocks,
            "vocab": plan.model.vocab,
            "record": plan.record,
        }
        spec.write_text(json.dumps(content), encoding="utf-8")
        environment = {**os.environ, **plan.environment(engine)}
        self._child = Child([*COMMAND, str(spec)], logs / f"{engine.slug}.log", environment, talk=True)
        self._idle = False

    def ready(self) -> dict[str, Any]:
        """Wait until it can serve; return ``ready_s`` and ``versions``."""
        return self._await("ready_s", lambda event: None)

    def run(self, load: Load, seed: int, follow: Follow) -> dict[str, Any]:
        """Let it serve one load; return what it measured.

        Args:
            load: what to serve.
            seed: of the prompts.
            follow: called with its progress.
        """
        self._child.send({"load": asdict(load), "seed": seed})
        found: dict[str, Any] = self._await("result", follow)["result"]
        return found

    def close(self) -> None:
        """Let it end by itself if it waits for work, and end it otherwise."""
        if self._idle:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_PATIENCE_S)
        self._child.stop()

    def _await(self, key: str, follow: Follow) -> dict[str, Any]:
        self._idle = False
        for event in self._child.events():
            if key in event:
                self._idle = True
                return event
            if "progress" in event:
                follow(event["progress"])
        raise BenchError(self._child.failure(self.engine.name))


def fit_together(plan: Plan, engines: Sequence[Engine], machine: Machine) -> bool:
    """Return whether all these engines may be alive at once.

    Raises:
        SettingsError: not even one of them fits by itself.
    """
    sizes = [plan.memory(engine) for engine in engines]
    room = _USABLE * machine.free_bytes
    for engine, size in zip(engines, sizes, strict=True):
        if size > room:
            raise SettingsError(
                f"engine {engine.name!r} needs about {size / 1e9:.1f} GB for weights, a pool of {engine.blocks} blocks "
                f"and the rest, but {room / 1e9:.1f} GB are free on {machine.device.description}: give a smaller pool, "
                "fewer or shorter requests, or a smaller model"
            )
    return sum(sizes) <= room


@contextmanager
def alive(plan: Plan, engines: Sequence[Engine], logs: Path, work: Path) -> Iterator[dict[str, RunningEngine]]:
    """Keep these engines running, all started at once; by slug.

    Raises:
        BenchError: one of them failed to start; the message ends with the last lines it printed.
    """
    with ExitStack() as stack:
        running = {}
        for engine in engines:
            running[engine.slug] = RunningEngine(plan, engine, logs, work)
            stack.callback(running[engine.slug].close)
        for one in running.values():
            one.ready()
        yield running
