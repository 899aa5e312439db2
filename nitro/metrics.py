"""Nitro's metrics in vLLM's ``/metrics`` endpoint: their names and what they mean. docs/serving.md has this table.

A module without imports of vLLM or Prometheus, since the engine's process, the one that serves ``/metrics``, the
dashboard's test and ``nitro stats`` all go by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PREFIX = "nitro:"
LABELS = ("model_name", "engine")  # vLLM's own
DROPS = ("stale", "lost", "corrupt", "replaced", "silent")
BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)  # seconds

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of samples.

    Attributes:
        name: without the prefix, and without the suffix (``_total``) that Prometheus gives counters.
        kind: what it is to Prometheus.
        text: what it says; in ``/metrics``, and in the table of docs/serving.md.
        reasons: the values of its label ``reason``, if it has that one.
    """

    name: str
    kind: Kind
    text: str
    reasons: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its labels."""
        return (*LABELS, "reason") if self.reasons else LABELS

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names under which its samples stand in ``/metrics``."""
        name = PREFIX + self.name
        if self.kind == "counter":
            return (f"{name}_total",)
        return tuple(f"{name}_{end}" for end in ("bucket", "count", "sum")) if self.kind == "histogram" else (name,)


METRICS = (
    Metric("evictions", "counter", "Evictions applied: one request compacted in one engine step."),
    Metric(
        "tokens_evicted",
        "counter",
        "Tokens dropped from the KV cache, counted once per request (not per layer or head).",
    ),
    Metric(
        "blocks_freed",
        "counter",
        "KV cache blocks given back to the pool by evictions, less those that they took from it.",
    ),
    Metric(
        "requests_refused",
        "counter",
        "Requests that were refused (status 400) since what they say about their own eviction is wrong.",
    ),
    Metric("active_requests", "gauge", "Running requests that have a budget, a ratio or a threshold to keep to."),
    Metric("evicted_requests", "gauge", "Running requests that have lost tokens."),
    Metric("logical_tokens", "gauge", "Tokens of running requests that have been computed, evicted ones included."),
    Metric("physical_tokens", "gauge", "Tokens of running requests that are in the KV cache."),
    Metric("retention_ratio", "gauge", "Physical over logical tokens of all running requests; NaN if there are none."),
    Metric("allocated_slots", "gauge", "Slots of the KV cache blocks that running requests hold."),
    Metric(
        "fragmentation_ratio",
        "gauge",
        "Allocated slots over physical tokens, of all running requests; NaN if there are none.",
    ),
    Metric(
        "request_fragmentation_ratio_max",
        "gauge",
        "The largest such ratio of one evicted request; NaN if there are none.",
    ),
    Metric(
        "plan_seconds",
        "histogram",
        "Host time that Nitro takes in the scheduler for one engine step, whether it evicts or not.",
    ),
    Metric(
        "worker_seconds",
        "histogram",
        "Host time that rank 0's worker takes for one step's evictions and questions: on a CPU all of their work, on a "
        "GPU the launches.",
    ),
    Metric(
        "device_seconds",
        "histogram",
        "Time on rank 0's GPU of one step's evictions and questions, by events on the stream; none on a CPU.",
    ),
    Metric("bridge_answers", "counter", "Workers' answers about a threshold that came in time to be used."),
    Metric(
        "bridge_drops",
        "counter",
        "Answers that were not used: stale (something has happened to the request since), lost (none came, the "
        "question is asked again), corrupt (damaged in memory), replaced (by a newer one while the ring was full), "
        "silent (left out, since the GPU is too far behind).",
        DROPS,
    ),
    Metric("bridge_depth", "gauge", "Most answers found in the ring in one step since the last count."),
    Metric("bridge_questions", "gauge", "Questions that have no answer yet."),
)


def ratio(part: float, whole: float) -> float:
    """Return a share as the gauges show it: NaN of nothing."""
    return part / whole if whole else math.nan
