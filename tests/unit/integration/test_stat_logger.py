"""What workers and the scheduler count ends in ``/metrics``, and nothing of it where vLLM's own loggers look."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from nitro.integration.vllm import frontend, stats
from nitro.integration.vllm.slots import SlotUse
from nitro.integration.vllm.stat_logger import NitroStatLogger
from nitro.metrics import BUCKETS, DROPS, METRICS
from nitro.types import BridgeCounters, WorkReport

from .lives import prompt

Make = Callable[..., Any]
MODEL = SimpleNamespace(served_model_name=["m", "alias"])


def make_logger(engines: list[int] | None = None, settings: object = None) -> NitroStatLogger:
    config: Any = SimpleNamespace(additional_config={"nitro": settings or {"budget": 64}}, model_config=MODEL)
    return NitroStatLogger(config, engines or [0])


def shown(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"nitro:{name}", {"model_name": "m", "engine": str(engine), **labels})


def test_all_metrics_are_there_from_the_beginning() -> None:
    make_logger([0, 1])
    for metric in METRICS:
        for engine in (0, 1):
            for reason in metric.reasons or (None,):
                labels = {} if reason is None else {"reason": reason}
                for sample in metric.samples:
                    extra = {"le": "+Inf"} if sample.endswith("_bucket") else {}
                    assert shown(sample.removeprefix("nitro:"), engine, **labels, **extra) == 0, sample


def test_an_engine_without_nitro_shows_nothing() -> None:
    make_logger()
    before = shown("evictions_total")
    config: Any = SimpleNamespace(additional_config={}, model_config=MODEL)
    logger = NitroStatLogger(config, [0])
    report = SchedulerStats()
    stats.put(report, counts={"evictions": 3}, gauges=SlotUse()._asdict(), times={"plan_seconds": [5]})
    logger.record(report, None)
    assert shown("evictions_total") == before == 0


def test_what_running_requests_hold() -> None:
    logger, report = make_logger(), SchedulerStats()
    use = SlotUse(
        allocated=960, live=800, worst_allocated=96, worst_live=66, logical=1600, active=30, evicted=20
    )._asdict()
    stats.put(report, gauges=use)
    logger.record(report, None)
    assert (shown("allocated_slots"), shown("physical_tokens"), shown("fragmentation_ratio")) == (960, 800, 1.2)
    assert (shown("logical_tokens"), shown("retention_ratio")) == (1600, 0.5)
    assert (shown("active_requests"), shown("evicted_requests")) == (30, 20)
    assert shown("request_fragmentation_ratio_max") == 96 / 66
    assert report.waiting_lora_adapters == {}
    logger.record(SchedulerStats(), None)
    assert shown("fragmentation_ratio") == 1.2, "what was not counted again still stands"
    stats.put(report, gauges=SlotUse()._asdict())
    logger.record(report, None)
    assert shown("allocated_slots") == 0
    for name in ("fragmentation_ratio", "retention_ratio", "request_fragmentation_ratio_max"):
        assert math.isnan(shown(name) or 0)


def test_figures_cross_processes_as_vllm_encodes_them() -> None:
    report = SchedulerStats()
    put = stats.Figures(
        {"evictions": 2, "bridge_drops.stale": 1}, {"live": 2**40}, {"plan_seconds": [7, 9_000_000_000, 7]}
    )
    stats.put(report, counts={**put.counts, "blocks_freed": 0}, gauges=put.gauges, times=put.times)
    report = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(report))
    assert stats.take(report) == put
    assert report.waiting_lora_adapters == {}
    assert stats.take(report) == stats.Figures()


def test_adapters_of_others_are_left_alone() -> None:
    report = SchedulerStats(waiting_lora_adapters={"an-adapter": 3})
    stats.put(report, counts={"evictions": 1})
    assert stats.take(report).counts == {"evictions": 1}
    assert report.waiting_lora_adapters == {"an-adapter": 3}


def test_times_become_histograms() -> None:
    logger, report = make_logger([0, 1]), SchedulerStats()
    stats.put(report, times={"plan_seconds": [15_000, 150_000], "worker_seconds": [3_000_000]})
    logger.record(report, None, engine_idx=1)
    assert shown("plan_seconds_count", 1) == 2
    assert shown("plan_seconds_sum", 1) == pytest.approx(165e-6)
    assert [shown("plan_seconds_bucket", 1, le=str(bound)) for bound in BUCKETS[:5]] == [0, 1, 1, 1, 2]
    assert (shown("worker_seconds_count", 1), shown("device_seconds_count", 1)) == (1, 0)
    assert shown("plan_seconds_count", 0) == 0


@pytest.mark.parametrize("fails", [True, False])
def test_refused_requests_are_counted(fails: bool) -> None:
    make_logger()
    config: Any = SimpleNamespace(
        additional_config={"nitro": {"budget": 64}},
        scheduler_config=SimpleNamespace(scheduler_cls="nitro.integration.vllm.scheduler.NitroScheduler"),
    )
    params = SamplingParams(extra_args={"nitro": {"budget": 1 if fails else 48}})
    if fails:
        with pytest.raises(frontend.RequestSettingsError, match="budget=1 is below"):
            frontend.check_request(config, params)
    else:
        frontend.check_request(config, params)
    assert shown("requests_refused_total") == fails


class Told:
    """What a worker reports beside an output."""

    def __init__(self, **report: Any) -> None:
        self.nitro_report = WorkReport(**report)


def test_the_worker_is_heard(simulate: Make) -> None:
    sim = simulate(chunk=256)
    side = sim.scheduler.nitro
    side.reporter.heard(object())
    side.reporter.heard(Told(host_ns=(5, 6)))
    side.reporter.heard(Told(host_ns=(7,), device_ns=(8,)))
    sim.add(prompt(20, 1), 4)
    sim.step()
    times = stats.take(sim.stats[-1]).times
    assert (times["worker_seconds"], times["device_seconds"]) == ([5, 6, 7], [8])
    sim.step()
    assert stats.take(sim.stats[-1]).times.keys() == {"plan_seconds"}, "each is told once"


def test_an_engine_that_logs_no_statistics_keeps_none(simulate: Make) -> None:
    sim = simulate(chunk=256)
    sim.scheduler.log_stats = False
    side = sim.scheduler.nitro
    for number in range(100):
        side.reporter.planned(number)
        side.reporter.heard(Told(host_ns=(number,), device_ns=(number,)))
    report = SchedulerStats()
    side.report(report, [])
    assert {name: len(each) for name, each in stats.take(report).times.items()} == {
        "plan_seconds": 16,
        "worker_seconds": 16,
        "device_seconds": 16,
    }


def test_what_became_of_questions_is_told(simulate: Make) -> None:
    sim = simulate(chunk=256, budget=None, threshold=0.5, min_keep=24, policy="random")
    side, figures = sim.scheduler.nitro, []
    sim.reached = 40
    for number in range(3):
        sim.add(prompt(100, number), 60)
    sim.drain()
    figures = [stats.take(item) for item in sim.stats]
    assert side.asks.answered > 0
    assert sum(found.counts.get("bridge_answers", 0) for found in figures) == side.asks.answered
    side.asks.stale, side.asks.lost = side.asks.stale + 2, side.asks.lost + 1
    side.reporter.heard(Told(replaced=4, silent=3))
    side.reporter.slots._next = 0.0
    side.reporter.slots._idle = False
    report = SchedulerStats()
    side.report(report, [])
    told = stats.take(report)
    assert {name: count for name, count in told.counts.items() if name.startswith("bridge_drops")} == {
        "bridge_drops.stale": 2,
        "bridge_drops.lost": 1,
        "bridge_drops.replaced": 4,
        "bridge_drops.silent": 3,
    }
    assert told.gauges["bridge_questions"] == 0
    assert max(found.gauges.get("bridge_depth", 0) for found in [*figures, told]) >= 1


def test_all_drops_have_a_reason_in_the_metrics() -> None:
    assert set(DROPS) == set(BridgeCounters.__dataclass_fields__) - {"answers"}
