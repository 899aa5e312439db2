"""Gates on engines and on the host: alone on a quiet machine, with `pytest -m perf tests/perf` (ci/perf.sh).

Ratios are to stock vLLM in the same run. What each card must reach is in targets/, what it reached before in
baselines/. Gates that nobody has seen fail are worth little: the last tests slow Nitro down and want them to.
"""

from __future__ import annotations

from typing import Any

import planted
import pytest
from perf_judge import Judge
from perf_measure import Measurer, from_essay, from_worker, measure

pytestmark = [pytest.mark.perf, pytest.mark.timeout(1800)]

SLOW_PLAN_S = 3e-3
SLOW_ENGINE_S = 0.05


def test_host(perf: Judge) -> None:
    """What Nitro adds to an engine's step on the host, in the scheduler and in a worker."""
    perf.require(measure("host", Measurer()))


@pytest.mark.gpu
def test_essay(perf: Judge) -> None:
    """2,048 requests of 1,000 + 1,000 tokens in an L4's pool: footprint and throughput, stock beside."""
    perf.require(measure("essay", Measurer()))


@pytest.mark.gpu
def test_ample(perf: Judge) -> None:
    """What Nitro costs where there is nothing to gain: the memory suffices, and nothing is evicted."""
    perf.require(measure("ample", Measurer()))


def test_a_slow_plan_trips_the_gate(perf: Judge) -> None:
    """A sleep planted where workers apply plans, by which the gate is missed, and without which it is not."""
    clean, slowed = (
        from_worker(Measurer(variables=variables).script("bench_worker.py", "--steps", "100"))["host.worker_us"][0]
        for variables in ({}, planted.environment(f"apply={SLOW_PLAN_S}"))
    )
    assert slowed - clean >= 1e6 * SLOW_PLAN_S
    # The scheduler's part is left out: zero is the least that it can be.
    assert perf.verdict("host.step_us", [slowed]).passed is False
    assert perf.verdict("host.step_us", [clean]).passed is True


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pack", "fill"])
def test_a_wasteful_copy_trips_the_gate(perf: Judge, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A copy of the caches planted in the wrapper of the kernels, checked and timed as the gate of it is."""
    from gpu_timing import copy_bandwidths, gpu_micros
    from kernel_bench import SHAPES, make_setup, stitch_tasks

    from nitro.kernels import compact

    copy, setup = max(copy_bandwidths().values()), make_setup(SHAPES["medium"])

    def share() -> float:
        task = next(task for task in stitch_tasks(setup) if task.name == f"stitch {name}")
        task.check()
        return task.nbytes / (gpu_micros(task.call) * 1e-6) / copy

    assert perf.verdict(f"kernel.stitch {name}", [share()]).passed is True
    monkeypatch.setattr(compact, f"{name}_ragged", planted.copying(getattr(compact, f"{name}_ragged")))
    assert perf.verdict(f"kernel.stitch {name}", [share()]).passed is False


@pytest.mark.gpu
@pytest.mark.slow
def test_a_slow_engine_trips_the_gate(perf: Judge) -> None:
    """The essay's load with a sleep in each step that evicts, in the engine's own process."""
    slow = Measurer(variables=planted.environment(f"apply={SLOW_ENGINE_S}"))
    found: dict[str, Any] = from_essay(slow.script("bench_engines.py", "--suite", "essay"))
    verdict = perf.verdict("essay.throughput", found["essay.throughput"])
    if verdict.passed is None:
        pytest.skip(f"no gate for {perf.card}: {verdict}")
    assert verdict.passed is False, verdict
    assert found["essay.footprint"][0] == pytest.approx(0.16, abs=0.02), "it evicts as it always does"
