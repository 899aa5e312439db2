"""Nitro's metrics in vLLM's own Prometheus endpoint (entry-point group ``vllm.stat_logger_plugins``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from nitro.integration.vllm import frontend, stats
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.slots import SlotUse
from nitro.metrics import BUCKETS, METRICS, PREFIX, Metric, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

_Shown = Counter | Gauge | Histogram
BRIDGE_GAUGES = ("bridge_depth", "bridge_questions")


def _family(metric: Metric) -> _Shown:
    """Return the metric, a new one in place of that of an engine that this process ran before."""
    name = PREFIX + metric.name
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(name)
    if known is not None:
        REGISTRY.unregister(known)
    if metric.kind == "counter":
        return Counter(name, metric.text, metric.labels)
    if metric.kind == "histogram":
        return Histogram(name, metric.text, metric.labels, buckets=BUCKETS)
    return Gauge(name, metric.text, metric.labels, multiprocess_mode="mostrecent")


def shown_of(use: SlotUse) -> dict[str, float]:
    """Return the gauges that say what running requests hold, by name."""
    return {
        "active_requests": use.active,
        "evicted_requests": use.evicted,
        "logical_tokens": use.logical,
        "physical_tokens": use.live,
        "retention_ratio": ratio(use.live, use.logical),
        "allocated_slots": use.allocated,
        "fragmentation_ratio": ratio(use.allocated, use.live),
        "request_fragmentation_ratio_max": ratio(use.worst_allocated, use.worst_live),
    }


class NitroStatLogger(AggregateStatLoggerBase):
    """Shows Nitro's figures of each engine; does nothing on an engine without Nitro."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """Register the metrics, at zero, so that a scrape before the first eviction proves that Nitro is active."""
        self._shown: dict[tuple[str, int], Any] = {}  # by name, with its reason, and engine
        if settings_in(vllm_config.additional_config) is None:
            return
        served = vllm_config.model_config.served_model_name
        model = served[0] if isinstance(served, list) else served
        engines = engine_indexes or [0]
        for metric in METRICS:
            family = _family(metric)
            for index in engines:
                own = (model, str(index))
                if metric.reasons:
                    for reason in metric.reasons:
                        self._shown[f"{metric.name}.{reason}", index] = family.labels(*own, reason)
                else:
                    self._shown[metric.name, index] = family.labels(*own)
        # The front-end refuses a request before it has an engine, so that all of them count for its first one.
        frontend.on_refusal = self._shown["requests_refused", engines[0]].inc

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        *args: Any,
        engine_idx: int = 0,
        **kwargs: Any,
    ) -> None:
        """Take Nitro's figures out of the statistics of one engine step."""
        if scheduler_stats is None:
            return
        figures = stats.take(scheduler_stats)
        for name, more in figures.counts.items():
            if counter := self._shown.get((name, engine_idx)):
                counter.inc(more)
        for name, times in figures.times.items():
            if histogram := self._shown.get((name, engine_idx)):
                for taken in times:
                    histogram.observe(taken / 1e9)
        if figures.gauges:
            self._set(figures.gauges, engine_idx)

    def _set(self, gauges: Mapping[str, int], engine: int) -> None:
        use = SlotUse(*(gauges[name] for name in SlotUse._fields))
        of_bridge = {name: gauges[name] for name in BRIDGE_GAUGES if name in gauges}
        for name, value in {**shown_of(use), **of_bridge}.items():
            if gauge := self._shown.get((name, engine)):
                gauge.set(value)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the scheduler logs that Nitro is active."""

    def record_admission_rejection(self, reason: str) -> None:
        """Not Nitro's concern."""
