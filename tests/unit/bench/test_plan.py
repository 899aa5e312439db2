"""What engines are started with: the same for all of them but for what sets them apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nitro.bench import shapes
from nitro.bench.plan import EXTENSION, Engine, Load, Plan
from nitro.device import Device
from nitro.errors import SettingsError

GPU = Device("cuda", "a test's GPU")


def gpu_plan(**changes: Any) -> Plan:
    engines = (
        Engine("stock", 91_750),
        Engine("nitro", 88_994, {"budget": 256}),
        Engine("stock fp8", 183_500, fp8=True),
    )
    return dataclasses.replace(Plan(shapes.find("qwen2.5-0.5b"), engines, (Load(2048, 1000, 1000),), GPU), **changes)


def test_engines_differ_only_in_what_sets_them_apart() -> None:
    plan = gpu_plan()
    stock, nitro, fp8 = (plan.arguments(engine, "/model") for engine in plan.engines)
    assert {key for key in stock if stock[key] != nitro[key]} == {
        "additional_config",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
    }
    assert stock["additional_config"] == {}
    assert nitro["additional_config"] == {"nitro": {"budget": 256}}
    assert stock["max_num_seqs"] == 2048
    assert max(stock["compilation_config"]["cudagraph_capture_sizes"]) == 2048
    assert fp8["kv_cache_dtype"] == "fp8"
    assert fp8["kv_cache_memory_bytes"] == stock["kv_cache_memory_bytes"] == 91_750 * 16 * 12_288
    assert "worker_extension_cls" not in stock
    recorded = gpu_plan(record=True)
    assert recorded.arguments(recorded.engines[0], "/model")["worker_extension_cls"] == EXTENSION


def test_graphs_are_captured_up_to_the_requests_and_not_beyond() -> None:
    plan = gpu_plan(loads=(Load(300, 10, 10),))
    assert plan.arguments(plan.engines[0], "/model")["compilation_config"]["cudagraph_capture_sizes"][-2:] == [128, 256]


def test_the_core_has_its_own_process_on_a_gpu_only(plan: Plan) -> None:
    gpu = gpu_plan()
    assert gpu.environment(gpu.engines[0])["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    on_cpu = plan.environment(plan.engines[0])
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert plan.arguments(plan.engines[0], "/model")["dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "rounds=0 is below 1: raise it"),
        ({"max_batched": 0}, "max_batched_tokens=0 is below 1"),
        ({"engines": (Engine("a b", 1), Engine("a-b", 2))}, "two engines are named alike: a b, a-b: rename one"),
    ],
)
def test_bad_plans(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        gpu_plan(**changes)


@pytest.mark.parametrize(
    ("load", "said"), [((0, 1, 2), "requests=0"), ((1, 0, 2), "prompt=0"), ((1, 1, 1), "answer=1 is below 2")]
)
def test_bad_loads(load: tuple[int, int, int], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Load(*load)
