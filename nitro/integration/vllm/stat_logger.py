"""Nitro's counters in vLLM's own Prometheus endpoint (entry-point group ``vllm.stat_logger_plugins``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from nitro.integration.vllm import stats
from nitro.integration.vllm.activate import settings_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

LABELS = ("model_name", "engine")
HELP = {
    "evictions": "Evictions applied: one request compacted in one engine step.",
    "tokens_evicted": "Tokens dropped from the KV cache, counted once per request (not per layer or head).",
    "blocks_freed": "KV cache blocks given back to the pool by evictions, less those that they took from it.",
}


def _counter(name: str, text: str) -> Counter:
    """Return the counter, a new one in place of that of an engine that this process ran before."""
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(f"nitro:{name}")
    if known is not None:
        REGISTRY.unregister(known)
    return Counter(f"nitro:{name}", text, LABELS)


class NitroStatLogger(AggregateStatLoggerBase):
    """Counts evictions per engine; does nothing on an engine without Nitro."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """Register the counters, at zero, so that a scrape before the first eviction proves that Nitro is active."""
        self.counters: dict[tuple[str, int], Counter] = {}
        if settings_in(vllm_config.additional_config) is None:
            return
        served = vllm_config.model_config.served_model_name
        model = served[0] if isinstance(served, list) else served
        for name, text in HELP.items():
            family = _counter(name, text)
            for index in engine_indexes or [0]:
                self.counters[name, index] = family.labels(model, str(index))

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

    def log_engine_initialized(self) -> None:
        """Nothing to say: the scheduler logs that Nitro is active."""

    def record_admission_rejection(self, reason: str) -> None:
        """Not Nitro's concern."""
