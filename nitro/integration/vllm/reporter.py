"""What the scheduler tells vLLM's front-end about Nitro, beside a step's outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from nitro.integration.vllm import stats
from nitro.integration.vllm.work import REPORT
from nitro.types import BridgeCounters, Counters, WorkReport
from nitro.work_clock import MOST

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from nitro.integration.vllm.asks import Asks
    from nitro.integration.vllm.slots import SlotWatch

_EVICTIONS = {field.name: field.name for field in fields(Counters)}
_BRIDGE = {
    field.name: "bridge_answers" if field.name == "answers" else f"bridge_drops.{field.name}"
    for field in fields(BridgeCounters)
}


class Reporter:
    """Gathers figures step by step, and puts into each report what is new since the last one.

    Nothing here grows with the requests that run: what needs a look at each of them is counted in parts, by ``slots``.
    """

    def __init__(self, slots: SlotWatch, asks: Asks | None) -> None:
        """Begin with nothing to tell.

        Args:
            slots: counts requests, tokens and slots.
            asks: the questions to workers, where there is a threshold.
        """
        self.slots, self._asks = slots, asks
        self._evictions, self._bridge = Counters(), BridgeCounters()  # as they were last told
        self._work = WorkReport()  # the newest
        # Bounded, since an engine that logs no statistics never takes them.
        self._plan_ns: deque[int] = deque(maxlen=MOST)
        self._host_ns: deque[int] = deque(maxlen=MOST)
        self._device_ns: deque[int] = deque(maxlen=MOST)

    def planned(self, nanoseconds: int) -> None:
        """Note what Nitro took in the scheduler for a step."""
        self._plan_ns.append(nanoseconds)

    def heard(self, output: ModelRunnerOutput) -> None:
        """Take what the worker says about its own work, if it says anything in this step."""
        report: WorkReport | None = getattr(output, REPORT, None)
        if report is not None:
            self._work = report
            self._host_ns += report.host_ns
            self._device_ns += report.device_ns

    def put(self, scheduler_stats: SchedulerStats, counters: Counters, running: Sequence[Request]) -> None:
        """Add what is new to what goes to vLLM's front-end.

        Args:
            scheduler_stats: vLLM's, of this step.
            counters: evictions so far.
            running: vLLM's running requests; a part of them is looked at, about once a second all.
        """
        times = {"plan_seconds": self._plan_ns, "worker_seconds": self._host_ns, "device_seconds": self._device_ns}
        stats.put(scheduler_stats, times=times)
        for told in times.values():
            told.clear()
        if counters is not self._evictions:
            stats.put(scheduler_stats, counts=_more(_EVICTIONS, self._evictions, counters))
            self._evictions = counters
        if (use := self.slots.look(running)) is None:
            return
        stats.put(scheduler_stats, gauges=use._asdict())
        if self._asks is not None:
            now = self._asks.counters(self._work)
            gauges = {"bridge_depth": self._asks.take_depth(), "bridge_questions": self._asks.open}
            stats.put(scheduler_stats, counts=_more(_BRIDGE, self._bridge, now), gauges=gauges)
            self._bridge = now


def _more(names: dict[str, str], before: object, now: object) -> dict[str, int]:
    """Return by how much each total has grown, under the name of its metric."""
    return {metric: getattr(now, name) - getattr(before, name) for name, metric in names.items()}
