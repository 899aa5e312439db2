"""Carry Nitro's figures from the engine process to the process that serves ``/metrics``.

vLLM's SchedulerStats has no field for plugins, and its decoder drops unknown ones. ``waiting_lora_adapters`` (name to
count) is always empty when it leaves the engine, since the front-end fills it; so the figures travel there under names
that no adapter has, and are taken out again before any other logger sees them. Counts travel as differences, no totals:
with several API servers each receives a share of the reports, and the sums come out right. Times travel one by one, in
nanoseconds, since a histogram wants each. What is no total travels as it is, in the reports for which it was counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nitro.metrics import PREFIX

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

_COUNT, _GAUGE, _TIME = (f"{PREFIX}{kind}:" for kind in ("count", "gauge", "time"))


@dataclass(slots=True)
class Figures:
    """What one report carries.

    Attributes:
        counts: by a counter's name, and ``name.reason`` where it has one: how much more.
        gauges: by name, the value as it is now.
        times: by a histogram's name, nanoseconds, each of them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[int]] = field(default_factory=dict)


def put(
    stats: SchedulerStats,
    *,
    counts: Mapping[str, int] | None = None,
    gauges: Mapping[str, int] | None = None,
    times: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Add figures to the statistics of a step; counts of 0 are left out. See ``Figures``."""
    carrier = stats.waiting_lora_adapters
    for name, count in (counts or {}).items():
        if count:
            carrier[_COUNT + name] = count
    for name, value in (gauges or {}).items():
        carrier[_GAUGE + name] = value
    for name, each in (times or {}).items():
        for number, taken in enumerate(each):
            carrier[f"{_TIME}{name}:{number}"] = taken


def take(stats: SchedulerStats) -> Figures:
    """Remove Nitro's figures from the statistics and return them."""
    carrier, found = stats.waiting_lora_adapters, Figures()
    for key in [key for key in carrier if key.startswith(PREFIX)]:
        value = carrier.pop(key)
        if key.startswith(_COUNT):
            found.counts[key.removeprefix(_COUNT)] = value
        elif key.startswith(_GAUGE):
            found.gauges[key.removeprefix(_GAUGE)] = value
        else:
            found.times.setdefault(key.removeprefix(_TIME).partition(":")[0], []).append(value)
    return found
