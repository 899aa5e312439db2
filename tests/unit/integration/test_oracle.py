"""The oracle matrix on real vLLM engines: generated tokens equal those of a model that sees exactly the kept tokens.

`make test` runs every policy, scenario, architecture and mode, but not every combination; ``-m slow`` runs the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_bridge import FaultyProducer

from nitro.testing import matrix, storm
from nitro.testing.models import load_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SCARCE = ("random", "keydiff", "gravity")
"""The policies that `make test` runs where an engine takes a minute to start and its steps are slow."""


IN_PROCESS = {
    "plain": "llama-gqa",
    "prefix": "qwen2-mha",
    "chunked": "llama-mha",
    "tight": "qwen2-gqa",
    "mixed": "llama-gqa",
}
ELSEWHERE = {"multi-process": "llama-mha", "tp2": "qwen2-gqa"}


def is_fast(mode: str, name: str, arch: str) -> bool:
    """Return whether `make test` has the time for a row."""
    if mode == "in-process":
        return arch == IN_PROCESS.get(name, arch)
    return name == "all" and arch == ELSEWHERE[mode]


def rows() -> Iterator[Any]:
    for mode in matrix.MODES:
        for name in matrix.SCENARIOS:
            for arch in matrix.ARCHITECTURES:
                fast = is_fast(mode, name, arch)
                some = fast and mode != "in-process"
                label, marks = f"{mode}-{name}-{arch}", [] if fast else [pytest.mark.slow]
                yield pytest.param(mode, name, arch, SCARCE if some else matrix.POLICIES, marks=marks, id=label)
                if some:
                    rest = tuple(policy for policy in matrix.POLICIES if policy not in SCARCE)
                    yield pytest.param(mode, name, arch, rest, marks=[pytest.mark.slow], id=f"{label}-rest")


@pytest.mark.parametrize(("mode", "name", "arch", "policies"), rows())
def test_row(
    tiny: Callable[[str], Path],
    record_property: Callable[[str, object], None],
    mode: matrix.Mode,
    name: str,
    arch: str,
    policies: tuple[str, ...],
) -> None:
    scenario, path = matrix.SCENARIOS[name], tiny(arch)
    reference = load_model(path)
    faults = {}
    with matrix.engine(path, scenario, mode) as llm:
        for policy in policies:
            outcome = matrix.run_cell(llm, reference, scenario, policy)
            record_property(policy, matrix.summary(outcome))
            if found := outcome.faults(scenario):
                faults[policy] = found
    assert not faults


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.4, "budget": None},
        {"evict_prompt": False, "budget": 40},
        {"slack": 1},
        {"sinks": 0, "window": 1, "budget": 33},
    ],
    ids=["ratio", "spared prompt", "slack of one", "no sinks"],
)
def test_settings(tiny: Callable[[str], Path], changes: dict[str, Any]) -> None:
    scenario, path = matrix.variant(matrix.SCENARIOS["plain"], **changes), tiny("llama-gqa")
    with matrix.engine(path, scenario, "in-process") as llm:
        outcome = matrix.run_cell(llm, load_model(path), scenario, "keydiff")
    assert not outcome.faults(scenario)


@pytest.mark.parametrize("name", ["chunked", "all"])
def test_pooling(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Keys of a random model are hardly alike, so more is folded here than by default; and the oracle has to know."""
    from nitro.pooling import POOLING, Merging

    monkeypatch.setitem(POOLING, "merge", Merging(least=0.3))
    scenario, path = matrix.variant(matrix.SCENARIOS[name], pooling="merge"), tiny("llama-gqa")
    reference = load_model(path)
    with matrix.engine(path, scenario, "in-process") as llm:
        outcome = matrix.run_cell(llm, reference, scenario, "keydiff")
        unaware = matrix.run_cell(llm, reference, matrix.variant(scenario, pooling="none"), "keydiff")
    assert not outcome.faults(scenario)
    assert unaware.report.max_logprob_error > 0.1


@pytest.mark.parametrize(
    ("name", "policy", "faulty"),
    [
        ("plain", "random", False),
        ("prefix", "gravity", True),
        ("chunked", "random", True),
        ("tight", "gravity", False),
        ("all", "random", True),
        ("all", "gravity", True),
        ("mixed", "gravity", True),
    ],
)
def test_threshold(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, policy: str, faulty: bool
) -> None:
    """A bridge that is late, loses messages, or brings them twice, costs memory for a while and nothing else."""
    from nitro.integration.vllm import answers

    path, scenario = tiny("llama-gqa"), matrix.by_threshold(matrix.SCENARIOS[name], policy)
    if faulty:
        monkeypatch.setattr(answers, "Producer", FaultyProducer)
        monkeypatch.setattr(FaultyProducer, "random", random.Random(1))
    with matrix.engine(path, scenario, "in-process") as llm:
        outcome = matrix.run_cell(llm, load_model(path), scenario, policy)
        asks = llm.llm_engine.engine_core.engine_core.scheduler.nitro.asks
        assert asks.answered > (3 if faulty else 10)
        assert not faulty or (FaultyProducer.lost and FaultyProducer.late and asks.stale)
    assert not outcome.faults(scenario)
    kept = {kept for evictions in outcome.kept for _, kept in evictions}
    assert len(kept) > 3, "the data decides"


@pytest.mark.parametrize("mode", ["multi-process", pytest.param("tp2", marks=pytest.mark.slow)])
def test_threshold_across_processes(tiny: Callable[[str], Path], mode: matrix.Mode) -> None:
    path, scenario = tiny("qwen2-gqa"), matrix.by_threshold(matrix.SCENARIOS["all"], "gravity")
    with matrix.engine(path, scenario, mode) as llm:
        outcome = matrix.run_cell(llm, load_model(path), scenario, "gravity")
    assert not outcome.faults(scenario)
    assert len({kept for evictions in outcome.kept for _, kept in evictions}) > 4


@pytest.mark.parametrize("policy", ["keydiff", "random"])
def test_clients_hang_up_in_the_step_of_a_plan(tiny: Callable[[str], Path], policy: str) -> None:
    path, scenario = tiny("llama-gqa"), storm.SCENARIO if policy == "keydiff" else storm.BY_THRESHOLD
    with matrix.engine(path, scenario, "in-process") as llm:
        outcome = storm.run_storm(llm, load_model(path), storm.Load(), policy=policy)
    assert not outcome.faults()
    assert not [m for m in outcome.report.mismatches if m.gap >= matrix.TIE]
    assert outcome.report.max_logprob_error < matrix.LOGPROB_ERROR


def test_stock_engine_after_a_nitro_engine_in_the_same_process(tiny: Callable[[str], Path]) -> None:
    path, scenario = tiny("llama-gqa"), matrix.SCENARIOS["plain"]
    with matrix.engine(path, scenario, "in-process", additional_config={}) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__module__.startswith("vllm.")
        assert type(core.model_executor.driver_worker.worker).__module__.startswith("vllm.")
        assert type(core.model_executor.driver_worker.worker.model_runner).__module__.startswith("vllm.")


def test_bfloat16_engine_runs_and_evicts(tiny: Callable[[str], Path]) -> None:
    # bf16 is no proof of equality (ties), but the path through the bf16 cache layout must not differ wildly.
    path, scenario = tiny("llama-gqa"), matrix.SCENARIOS["chunked"]
    with matrix.engine(path, scenario, "in-process", dtype="bfloat16") as llm:
        outcome = matrix.run_cell(llm, load_model(path), scenario, "keydiff")
    report = outcome.report
    assert report.evictions
    assert outcome.pool_whole
    assert len(report.mismatches) < report.differs_from_full / 2
