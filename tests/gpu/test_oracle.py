"""The oracle on a GPU: both of vLLM's model runners, fp32, Triton attention, asynchronous scheduling on."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import paged_cases
import pytest

from nitro.testing import matrix, models

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(900)]

# Triton attention multiplies fp32 matrices as tf32 (10 bits of mantissa): on the tiny models' wide logits that moves a
# log-probability by up to 0.055, with and without evictions. A wrong keep set moves it by units.
NOISE = 0.2

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
}


@pytest.fixture(params=["V1", "V2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The V2 runner is refused as long as this file has not been run with it."""
    monkeypatch.setenv("NITRO_ALLOW_UNTESTED_VLLM", "1")
    return str(request.param)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", matrix.SCENARIOS)
def test_row(tmp_path: Path, name: str, graphs: str, runner: Any) -> None:
    path = models.make_tiny_model(tmp_path / "tiny", "llama", num_kv_heads=2, head_dim=64, vocab=512, max_len=1024)
    scenario, faults = matrix.SCENARIOS[name], {}
    reference = models.load_model(path)
    with matrix.engine(
        path,
        scenario,
        "in-process",
        runner=runner,
        attention_backend="TRITON_ATTN",
        gpu_memory_utilization=0.2,
        **GRAPHS[graphs],
    ) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert llm.llm_engine.vllm_config.use_v2_model_runner == (runner == "V2")
        for policy in matrix.POLICIES:
            outcome = matrix.run_cell(llm, reference, scenario, policy)
            print(f"CELL {runner} {name} {graphs} {policy}: {outcome.report}; {outcome.preemptions} preemptions")
            if found := outcome.faults(scenario, tie=NOISE, logprob_error=NOISE):
                faults[policy] = found
    assert not faults


def test_noise_floor(tmp_path: Path, runner: Any) -> None:
    path = models.make_tiny_model(tmp_path / "tiny", "llama", num_kv_heads=2, head_dim=64, vocab=512, max_len=1024)
    scenario = matrix.variant(matrix.SCENARIOS["plain"], budget=480)  # no request grows that long
    with matrix.engine(
        path,
        scenario,
        "in-process",
        runner=runner,
        attention_backend="TRITON_ATTN",
        gpu_memory_utilization=0.2,
        **GRAPHS["eager"],
    ) as llm:
        outcome = matrix.run_cell(llm, models.load_model(path), scenario, "keydiff")
    print(f"CELL {runner} without evictions: {outcome.report}")
    assert outcome.report.evictions == 0
    assert outcome.report.max_logprob_error < NOISE


# All that Nitro does in a step, with what of vLLM's runs in between; never the parts that are vLLM's alone.
GUARDED = {
    "V1": ("runner_v1", "NitroRunnerMixin", ("_nitro_apply", "_nitro_shift")),
    "V2": ("runner_v2", "NitroV2ModelRunner", ("add_requests", "update_requests", "prepare_attn")),
}


@pytest.mark.parametrize("policy", ["keydiff", "gravity", "random"])
def test_never_waits_for_the_device(tmp_path: Path, runner: Any, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    module, owner, methods = GUARDED[runner]
    calls: dict[str, int] = dict.fromkeys(methods, 0)

    def guard(original: Any, name: str) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with paged_cases.no_synchronisation():
                return original(*args, **kwargs)

        return guarded

    cls = getattr(importlib.import_module(f"nitro.integration.vllm.{module}"), owner)
    path = models.make_tiny_model(tmp_path / "tiny", "llama", num_kv_heads=2, head_dim=64, vocab=512, max_len=1024)
    scenario = matrix.variant(matrix.SCENARIOS["all"], policy=policy)
    with matrix.engine(
        path, scenario, "in-process", runner=runner, attention_backend="TRITON_ATTN", gpu_memory_utilization=0.2
    ) as llm:
        for name in methods:
            monkeypatch.setattr(cls, name, guard(getattr(cls, name), name))
        prompts = [{"prompt_token_ids": ids} for ids in scenario.tokens(0)]
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
        llm.generate(prompts, sampling, use_tqdm=False)
        evictions = sum(part["evictions"] for part in llm.collective_rpc("nitro_stats"))
    assert evictions >= len(prompts)
    assert all(calls.values()), calls
