"""The figures of a benchmark, from the runs in a results directory: medians, ratios within a round, Nitro's share."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nitro.bench.machine import BenchError
from nitro.bench.plan import Engine, Plan
from nitro.bench.runner import jobs
from nitro.bench.store import Store
from nitro.config import Settings

Found = Mapping[str, Sequence[dict[str, Any]]]
"""Runs by engine."""
FIGURES = {
    "tokens_per_s": ("output tokens/s", 0),
    "seconds": ("wall, s", 1),
    "steps": ("steps", 0),
    "peak_blocks": ("peak blocks", 0),
    "mean_running": ("running, mean", 0),
    "peak_running": ("running, peak", 0),
    "preemptions": ("preemptions", 0),
    "evictions": ("evictions", 0),
    "ttft_s_p50": ("TTFT P50, s", 2),
    "ttft_s_p95": ("TTFT P95, s", 2),
    "itl_ms_p50": ("ITL P50, ms", 1),
    "itl_ms_p95": ("ITL P95, ms", 1),
}
"""By their keys in a run: name and decimals."""


@dataclass(frozen=True)
class Ratio:
    """What one engine is to another, within each round.

    Attributes:
        engine: its name.
        base: the other's.
        values: engine over base, one for each round that has both.
    """

    engine: str
    base: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        spread = f" ({min(self.values):.3f} to {max(self.values):.3f})" if len(self.values) > 1 else ""
        return f"{self.engine} / {self.base}: {self.median:.3f}{spread}"


def runs(plan: Plan, store: Store, load: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return the runs that are there, of one load, by engine, in the rounds' order."""
    found: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in plan.engines}
    for job in sorted(jobs(plan), key=lambda job: job.number):
        if job.load == load and store.has(load, job.number, job.engine.slug):
            found[job.engine.name].append(store.get(load, job.number, job.engine.slug))
    return found


def median(found: Sequence[dict[str, Any]], key: str) -> float | None:
    """Return the median of a figure over the rounds; None where no run has it."""
    values = [run[key] for run in found if key in run]
    return float(statistics.median(values)) if values else None


def ratios(plan: Plan, found: Found, key: str = "tokens_per_s") -> list[Ratio]:
    """Return what each engine is to each stock one: of the same rounds."""
    by = {name: {run["round"]: run[key] for run in of} for name, of in found.items()}
    made = []
    for base in (engine.name for engine in plan.engines if engine.nitro is None):
        for name in by:
            both = sorted(by[name].keys() & by[base].keys())
            if name != base and both:
                made.append(Ratio(name, base, tuple(by[name][number] / by[base][number] for number in both)))
    return made


def mixed_rounds(found: Found) -> list[int]:
    """Return the rounds whose runs come from several commands, so that their engines did not run side by side."""
    sessions: dict[int, set[int]] = {}
    for run in (run for of in found.values() for run in of):
        sessions.setdefault(run["round"], set()).add(run["session"])
    return sorted(number for number, of in sessions.items() if len(of) > 1)


def require_evictions(plan: Plan, found: Found, tokens: int) -> None:
    """Make sure that Nitro did evict wherever its budget is below a request's length.

    Raises:
        BenchError: it did not, so that the comparison would be of stock with itself.
    """
    for engine in plan.engines:
        budget = None if engine.nitro is None else engine.nitro.get("budget")
        if budget is None or not grows_beyond(engine, budget, tokens):
            continue
        for run in found[engine.name]:
            if run["evictions"] == 0:
                raise BenchError(
                    f"{engine.name!r} evicted nothing in round {run['round']} although its budget of {budget} is below "
                    f"{tokens} tokens: vLLM did not load the plugin; run `nitro check`"
                )


def grows_beyond(engine: Engine, budget: int, tokens: int) -> bool:
    """Return whether an engine with Nitro has to evict from requests of so many tokens that have this budget."""
    return budget + int((engine.nitro or {}).get("slack", Settings.model_fields["slack"].default)) < tokens
