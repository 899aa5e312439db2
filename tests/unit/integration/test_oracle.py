"""The oracle matrix on real vLLM engines: generated tokens equal those of a model that sees exactly the kept tokens.

`make test` runs every policy, scenario and architecture in one process, and the hardest scenario across processes and
with tensor parallelism; ``-m slow`` runs the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nitro.testing import matrix
from nitro.testing.models import load_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FAST = {("multi-process", "all", "llama-gqa"), ("tp2", "all", "qwen2-gqa"), ("tp2", "all", "llama-mha")}


def rows() -> Iterator[Any]:
    for mode in matrix.MODES:
        for name in matrix.SCENARIOS:
            for arch in matrix.ARCHITECTURES:
                slow = mode != "in-process" and (mode, name, arch) not in FAST
                yield pytest.param(
                    mode, name, arch, marks=[pytest.mark.slow] if slow else [], id=f"{mode}-{name}-{arch}"
                )


@pytest.mark.parametrize(("mode", "name", "arch"), rows())
def test_row(
    tiny: Callable[[str], Path], record_property: Callable[[str, object], None], mode: matrix.Mode, name: str, arch: str
) -> None:
    scenario, path = matrix.SCENARIOS[name], tiny(arch)
    reference = load_model(path)
    faults = {}
    with matrix.engine(path, scenario, mode) as llm:
        for policy in matrix.POLICIES:
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
