"""The oracle on a GPU: vLLM's V1 model runner, fp32, Triton attention, asynchronous scheduling on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nitro.testing import matrix, models

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(900)]

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
}


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", matrix.SCENARIOS)
def test_row(tmp_path: Path, name: str, graphs: str) -> None:
    path = models.make_tiny_model(tmp_path / "tiny", "llama", num_kv_heads=2, head_dim=64, vocab=512, max_len=1024)
    scenario, faults, notes = matrix.SCENARIOS[name], {}, {}
    reference = models.load_model(path)
    with matrix.engine(path, scenario, "in-process", attention_backend="TRITON_ATTN", **GRAPHS[graphs]) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        for policy in matrix.POLICIES:
            outcome = matrix.run_cell(llm, reference, scenario, policy)
            notes[policy] = str(outcome.report)
            if found := outcome.faults(scenario):
                faults[policy] = found
    print(f"{name} {graphs}: {notes['keydiff']}")
    assert not faults
