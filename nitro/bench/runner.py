"""Rounds: every engine serves every load, in turn, so that what the machine does meanwhile hits all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nitro.bench.fleet import RunningEngine, alive, fit_together
from nitro.bench.machine import Machine
from nitro.bench.plan import Engine, Plan
from nitro.bench.store import Store

Mode = Literal["auto", "together", "fresh"]
"""Whether all engines are alive at once, or each is started for a run and ended after it; ``auto``: if they fit."""
_WARM_SEED = 1_000_000


@dataclass(frozen=True)
class Job:
    """One run: which engine serves which load in which round."""

    load: int
    number: int
    engine: Engine


def jobs(plan: Plan) -> list[Job]:
    """Return all runs in their order: every other round goes backwards through the engines.

    Loads with budgets of their own are for engines with Nitro only.
    """
    return [
        Job(index, number, engine)
        for index, load in enumerate(plan.loads)
        for number in range(plan.rounds)
        for engine in (plan.engines if number % 2 == 0 else plan.engines[::-1])
        if load.budget is None or engine.nitro is not None
    ]


class Runner:
    """Does what of a plan is not done yet."""

    def __init__(
        self, plan: Plan, store: Store, machine: Machine, console: Console, *, mode: Mode = "auto", limit_s: float = 0
    ) -> None:
        """Prepare.

        Args:
            plan: what to run.
            store: where the results go, and where those of earlier commands are.
            machine: what it runs on.
            console: where to print.
            mode: whether all engines are alive at once.
            limit_s: no run is begun that would end later, going by the longest so far; 0: no limit.

        Raises:
            SettingsError: an engine does not fit the machine's memory.
        """
        self.plan, self.store, self.console = plan, store, console
        self._machine = machine
        self._todo = [job for job in jobs(plan) if not store.has(job.load, job.number, job.engine.slug)]
        needed = [engine for engine in plan.engines if any(job.engine == engine for job in self._todo)]
        fits = fit_together(plan, needed, machine)
        self._together = mode == "together" or (mode == "auto" and fits)
        self._needed = needed
        if self._together and not fits:
            console.print("The engines may not fit the memory together: see --engines fresh", style="yellow")
        self._deadline = time.monotonic() + limit_s if limit_s else None
        self._longest = 0.0

    def run(self) -> bool:
        """Run; return whether everything is there now.

        Raises:
            BenchError: an engine failed.
        """
        if not self._todo:
            return True
        done = len(jobs(self.plan)) - len(self._todo)
        how = "alive together" if self._together else "each run in an engine of its own"
        self.console.print(f"{len(self._todo)} runs to do, {done} done before; {how}")
        with _bars(self.console) as bars, tempfile.TemporaryDirectory(prefix="nitro-bench-") as work:
            logs = self.store.folder / "logs"
            total = bars.add_task("runs", total=len(self._todo) + done, completed=done)
            if self._together:
                with self._starting(bars, self._needed, logs, Path(work)) as engines:
                    return self._serve(bars, total, engines)
            for job in self._todo:
                if self._too_late():
                    return False
                started = time.monotonic()
                with self._starting(bars, [job.engine], logs, Path(work)) as engines:
                    self._warm_up(bars, engines, job.load)
                    self._one(bars, total, engines[job.engine.slug], job)
                self._longest = max(self._longest, time.monotonic() - started)
        return True

    def _serve(self, bars: Progress, total: Any, engines: dict[str, RunningEngine]) -> bool:
        warm = -1
        for job in self._todo:
            if self._too_late():
                return False
            if job.load != warm:
                self._warm_up(bars, engines, job.load)
                warm = job.load
            started = time.monotonic()
            self._one(bars, total, engines[job.engine.slug], job)
            self._longest = max(self._longest, time.monotonic() - started)
        return True

    @contextmanager
    def _starting(
        self, bars: Progress, engines: Sequence[Engine], logs: Path, work: Path
    ) -> Iterator[dict[str, RunningEngine]]:
        names = ", ".join(engine.name for engine in engines)
        task = bars.add_task(f"starting {names}", total=None)
        started = time.monotonic()
        with alive(self.plan, engines, logs, work) as running:
            bars.remove_task(task)
            self._say(f"{names}: ready after {time.monotonic() - started:.0f} s")
            yield running

    def _warm_up(self, bars: Progress, engines: dict[str, RunningEngine], load: int) -> None:
        if self.plan.warm_up:
            for one in engines.values():
                self._follow(bars, one, load, _WARM_SEED, "warm-up")

    def _one(self, bars: Progress, total: Any, engine: RunningEngine, job: Job) -> None:
        found = self._follow(bars, engine, job.load, job.number, f"round {job.number}")
        load = self.plan.loads[job.load]
        run = {"load": str(load), "engine": job.engine.name, "round": job.number}
        run |= {"copy_bytes_per_s": self._machine.copy_bytes_per_s, **found}
        self.store.put(job.load, job.number, job.engine.slug, run)
        bars.advance(total)
        self._say(line(run))

    def _follow(self, bars: Progress, engine: RunningEngine, load: int, seed: int, what: str) -> dict[str, Any]:
        asked = self.plan.loads[load]
        label = f"{what}, {engine.engine.name}"
        task = bars.add_task(label, total=asked.requests * asked.answer)

        def follow(event: dict[str, Any]) -> None:
            text = f"{label}: {event['running']} running, {event['usage']:.0%} of the pool"
            bars.update(task, completed=event["tokens"], description=text)

        try:
            return engine.run(asked, seed, follow)
        finally:
            bars.remove_task(task)

    def _too_late(self) -> bool:
        return self._deadline is not None and time.monotonic() + 1.1 * self._longest > self._deadline

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def line(run: dict[str, Any]) -> str:
    """Return a run's figures in one line."""
    latency = "".join(
        f", {label} {run[f'{key}_p50']:.{digits}f}/{run[f'{key}_p95']:.{digits}f} {unit}"
        for key, label, unit, digits in (("ttft_s", "TTFT", "s", 2), ("itl_ms", "ITL", "ms", 1))
        if f"{key}_p50" in run
    )
    return (
        f"{run['load']:34} {run['engine']:26} {run['tokens_per_s']:9.0f} tokens/s {run['seconds']:7.1f} s "
        f"{run['steps']:6} steps, {run['peak_blocks']:7} blocks, running {run['mean_running']:6.0f} mean "
        f"{run['peak_running']:5} peak, {run['preemptions']:4} preempted, {run['evictions']:6} evictions{latency}"
    )


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
