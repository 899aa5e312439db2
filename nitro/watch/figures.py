"""What a scrape says, summed over engines; and what two of them say about the time between."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.samples import Sample

from nitro.metrics import METRICS, PREFIX, ratio

COUNTERS = tuple(metric.name for metric in METRICS if metric.kind == "counter")
HISTOGRAMS = tuple(metric.name for metric in METRICS if metric.kind == "histogram")
WORST = "request_fragmentation_ratio_max"
_RATIOS = ("retention_ratio", "fragmentation_ratio", WORST)
_SUMMED = tuple(metric.name for metric in METRICS if metric.kind == "gauge" and metric.name not in _RATIOS)
_VLLM_GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}
_VLLM_COUNTERS = {"num_preemptions": "preemptions", "generation_tokens": "generated", "prompt_tokens": "prompt_tokens"}


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram as Prometheus has it.

    Attributes:
        bounds: upper ends of the buckets in seconds, the last one infinite.
        counts: how many times are in each bucket itself.
        total: seconds, their sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """Return how many times there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Return their mean in seconds; NaN of none."""
        return ratio(self.total, self.count)

    def quantile(self, share: float) -> float:
        """Return the time below which a share of them lies, as Prometheus' ``histogram_quantile``; NaN of none."""
        left, low = share * self.count, 0.0
        if not self.count:
            return math.nan
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and left <= count:
                return low if math.isinf(bound) else low + (bound - low) * left / count
            left -= count
            low = low if math.isinf(bound) else bound
        return low

    def since(self, before: Histogram) -> Histogram:
        """Return what has come since; all of it, if the server has been started anew."""
        if before.bounds != self.bounds or any(a < b for a, b in zip(self.counts, before.counts, strict=True)):
            return self
        more = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, more, max(self.total - before.total, 0.0))


@dataclass(frozen=True, slots=True)
class Pool:
    """The block pool of all engines.

    Attributes:
        blocks: how many there are.
        block_size: slots of one.
        used: blocks that are not free.
    """

    blocks: int
    block_size: int
    used: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape.

    Attributes:
        at: seconds, by a clock that only goes forward.
        models: names of what is served.
        engines: how many engines serve it.
        gauges: by name, Nitro's and some of vLLM's.
        counters: likewise, totals.
        drops: answers that were not used, by reason.
        histograms: by name.
        pool: None if vLLM does not say how large it is.
    """

    at: float
    models: tuple[str, ...]
    engines: int
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    drops: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    pool: Pool | None

    def rates(self, before: Snapshot | None) -> dict[str, float]:
        """Return by how much counters grow in a second; none without an earlier scrape, or if the server is new."""
        if before is None or self.at <= before.at:
            return {}
        more = {name: total - before.counters.get(name, 0.0) for name, total in self.counters.items()}
        return {} if min(more.values()) < 0 else {name: count / (self.at - before.at) for name, count in more.items()}

    def to_dict(self, before: Snapshot | None = None) -> dict[str, Any]:
        """Return it as JSON has it, where NaN is null; with rates, if there is an earlier one."""
        times = {
            name: {
                "count": found.count,
                "seconds": found.total,
                **{label: _plain(found.quantile(share)) for label, share in (("p50", 0.5), ("p99", 0.99))},
            }
            for name, found in self.histograms.items()
        }
        return {
            "models": list(self.models),
            "engines": self.engines,
            **{name: _plain(value) for name, value in self.gauges.items()},
            **self.counters,
            "drops": dict(self.drops),
            "rates": self.rates(before),
            "times": times,
            "pool": None
            if self.pool is None
            else {"blocks": self.pool.blocks, "block_size": self.pool.block_size, "used": self.pool.used},
        }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(slots=True)
class _Sums:
    """Samples of one name, over all engines."""

    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))


def snapshot(samples: Sequence[Sample], at: float) -> Snapshot:
    """Return what a scrape says.

    Args:
        samples: vLLM's and Nitro's.
        at: when it was made, in seconds.
    """
    sums, drops, worst = _Sums(), defaultdict[str, float](float), math.nan
    models, engines = dict[str, None](), set[str]()
    for sample in samples:
        if (bound := sample.labels.get("le")) is not None:
            sums.buckets[sample.name][float(bound)] += sample.value
            continue
        if not math.isnan(sample.value):
            sums.total[sample.name] += sample.value
        if sample.name == f"{PREFIX}evictions_total":
            models[sample.labels.get("model_name", "?")] = None
            engines.add(sample.labels.get("engine", "0"))
        elif sample.name == f"{PREFIX}bridge_drops_total":
            drops[sample.labels.get("reason", "?")] += sample.value
        elif sample.name == PREFIX + WORST:
            worst = sample.value if math.isnan(worst) else max(worst, sample.value)
    total = sums.total
    gauges = {name: total[PREFIX + name] for name in _SUMMED}
    gauges |= {short: total[f"vllm:{name}"] for name, short in _VLLM_GAUGES.items()}
    gauges["retention_ratio"] = ratio(gauges["physical_tokens"], gauges["logical_tokens"])
    gauges["fragmentation_ratio"] = ratio(gauges["allocated_slots"], gauges["physical_tokens"])
    gauges[WORST] = worst
    counters = {name: total[f"{PREFIX}{name}_total"] for name in COUNTERS}
    counters |= {short: total[f"vllm:{name}_total"] for name, short in _VLLM_COUNTERS.items()}
    return Snapshot(
        at=at,
        models=tuple(models),
        engines=max(len(engines), 1),
        gauges=gauges,
        counters=counters,
        drops=dict(drops),
        histograms={name: _histogram(sums, PREFIX + name) for name in HISTOGRAMS},
        pool=_pool(samples),
    )


def _histogram(sums: _Sums, name: str) -> Histogram:
    found = sorted(sums.buckets[f"{name}_bucket"].items())
    totals = [count for _, count in found]
    each = tuple(now - then for now, then in zip(totals, [0.0, *totals], strict=False))
    return Histogram(tuple(bound for bound, _ in found), each, sums.total[f"{name}_sum"])


def _pool(samples: Sequence[Sample]) -> Pool | None:
    """Return the block pool; one block of each engine is vLLM's null block, which nobody uses."""
    usage = {s.labels.get("engine"): s.value for s in samples if s.name == "vllm:kv_cache_usage_perc"}
    blocks, size, used = 0, 0, 0.0
    for sample in samples:
        if sample.name != "vllm:cache_config_info":
            continue
        try:
            own, size = int(sample.labels["num_gpu_blocks"]) - 1, int(sample.labels["block_size"])
        except (KeyError, ValueError):
            return None
        blocks += own
        used += own * usage.get(sample.labels.get("engine"), 0.0)
    return Pool(blocks, size, used) if blocks > 0 and size > 0 else None
