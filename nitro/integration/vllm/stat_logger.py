"""Nitro's metrics in vLLM's own Prometheus endpoint (entry-point group ``vllm.stat_logger_plugins``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from nitro.integration.vllm import stats
from nitro.integration.vllm.activate import settings_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

    from nitro.integration.vllm.slots import SlotUse

_Metric = TypeVar("_Metric", Counter, Gauge)
LABELS = ("model_name", "engine")
HELP = {
    "evictions": "Evictions applied: one request compacted in one engine step.",
    "tokens_evicted": "Tokens dropped from the KV cache, counted once per request (not per layer or head).",
    "blocks_freed": "KV cache blocks given back to the pool by evictions, less those that they took from it.",
}


GAUGES = {
    "allocated_slots": "Slots of the KV cache blocks that running requests hold, counted about once a second.",
    "live_slots": "Slots of these that hold a token in use.",
    "fragmentation_ratio": "Allocated slots over live slots, of all running requests; NaN if there are none.",
    "request_fragmentation_ratio_max": "The largest such ratio of one evicted request; NaN if there are none.",
}


def _metric(kind: type[_Metric], name: str, text: str, **options: Any) -> _Metric:
    """Return the metric, a new one in place of that of an engine that this process ran before."""
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(f"nitro:{name}")
    if known is not None:
        REGISTRY.unregister(known)
    return kind(f"nitro:{name}", text, LABELS, **options)


def _ratio(allocated: int, live: int) -> float:
    return allocated / live if live else math.nan


class NitroStatLogger(AggregateStatLoggerBase):
    """Counts evictions per engine, and says how its slots are used; does nothing on an engine without Nitro."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """Register the counters, at zero, so that a scrape before the first eviction proves that Nitro is active."""
        self.counters: dict[tuple[str, int], Counter] = {}
        self.gauges: dict[tuple[str, int], Gauge] = {}
        if settings_in(vllm_config.additional_config) is None:
            return
        served = vllm_config.model_config.served_model_name
        model = served[0] if isinstance(served, list) else served
        for name, text in HELP.items():
            family = _metric(Counter, name, text)
            for index in engine_indexes or [0]:
                self.counters[name, index] = family.labels(model, str(index))
        for name, text in GAUGES.items():
            gauge = _metric(Gauge, name, text, multiprocess_mode="mostrecent")
            for index in engine_indexes or [0]:
                self.gauges[name, index] = gauge.labels(model, str(index))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        *args: Any,
        engine_idx: int = 0,
        **kwargs: Any,
    ) -> None:
        """Take Nitro's counts out of the statistics of one engine step."""
        if scheduler_stats is None:
            return
        for name, amount in stats.take(scheduler_stats).items():
            if counter := self.counters.get((name, engine_idx)):
                counter.inc(amount)
        if (use := stats.take_slots(scheduler_stats)) is not None and self.gauges:
            self._show(use, engine_idx)

    def _show(self, use: SlotUse, engine: int) -> None:
        values = (
            use.allocated,
            use.live,
            _ratio(use.allocated, use.live),
            _ratio(use.worst_allocated, use.worst_live),
        )
        for name, value in zip(GAUGES, values, strict=True):
            if gauge := self.gauges.get((name, engine)):
                gauge.set(value)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the scheduler logs that Nitro is active."""

    def record_admission_rejection(self, reason: str) -> None:
        """Not Nitro's concern."""
