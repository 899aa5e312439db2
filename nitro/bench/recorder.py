"""What each engine step computed and how long it took, seen from inside the process that schedules it.

A step counts from the end of the step before it to its own end, when vLLM has booked its tokens: with asynchronous
scheduling, the next step is scheduled meanwhile. So the steps' times sum up to the time of the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nitro.bench.timers import Timers

SECTIONS = (
    "scheduler",
    "nitro_scheduler",
    "nitro_worker",
    "preparation",
    "forward",
    "attention",
    "sampler",
    "runner",
    "waiting",
    "instrument",
)
COUNTS = (
    "running",
    "waiting_requests",
    "blocks",
    "preempted",
    "evictions",
    "requests",
    "prefills",
    "tokens",
    "pairs",
    "again",
    "pairs_again",
    "kv_tokens",
)
"""Of each step: the queues' lengths, the blocks in use, preemptions, evictions; then what it computes: requests, and
those of them with several tokens; tokens; pairs of a prompt's tokens and those they attend to; of both, what had been
computed before a preemption; and the tokens whose keys and values are read for requests with one token."""


class Recorder:
    """Collects the steps of one run.

    Attributes:
        timers: where the thread's time goes.
        rows: for each finished step its duration, its ``COUNTS`` and the seconds of its ``SECTIONS``.
        index: of the step that was scheduled last.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.timers = Timers(SECTIONS, clock)
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget everything, and begin a run with the next step."""
        self.rows: list[tuple[float, ...]] = []
        self.index = -1
        self._ended: float | None = None  # the step before
        self._taken: tuple[float, ...] = ()
        self._open: dict[int, tuple[int, ...]] = {}
        self._evicted: dict[str, int] = {}
        self._high: dict[str, int] = {}  # tokens that preempted requests had
        self._evictions = 0

    def starts(self) -> None:
        """Note that a step is about to be scheduled."""
        if self._ended is None:
            self._ended, self._taken = self._clock(), self.timers.taken()

    def preempted(self, request: Any) -> None:
        """Note that vLLM is about to preempt a request."""
        name, computed = request.request_id, int(request.num_computed_tokens)
        self._high[name] = max(self._high.get(name, 0), computed)
        self._evicted.pop(name, None)

    def planned(self, plan: Any) -> None:
        """Note a step's evictions (a `nitro.types.StepPlan`, or None)."""
        if plan is not None:
            self._evictions += len(plan)
            lost = (plan.logical_len - plan.keep).tolist()
            self._evicted.update(zip(plan.request_ids, lost, strict=True))

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """Note what a step will compute, right after it was scheduled."""
        for name in output.finished_req_ids:
            self._evicted.pop(name, None)
            self._high.pop(name, None)
        counts = output.num_scheduled_tokens
        if not counts:
            return
        requests = scheduler.requests
        kv = sum([requests[name].num_computed_tokens for name in counts]) - sum(self._evicted.values())
        prefills = pairs = again = pairs_again = 0
        total = int(output.total_num_scheduled_tokens)
        for name, tokens in counts.items() if total > len(counts) else ():
            if tokens == 1:
                continue
            lost, after = self._evicted.get(name, 0), requests[name].num_computed_tokens
            before = after - tokens
            redone = max(min(self._high.get(name, 0), after) - before, 0)
            kv -= after - lost
            prefills += 1
            pairs += attended(before - lost, tokens)
            again += redone
            pairs_again += attended(before - lost, redone)
        pool = scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        state = (len(scheduler.running), len(scheduler.waiting), used, len(output.preempted_req_ids or ()))
        computed = (len(counts), prefills, total, pairs, again, pairs_again, kv)
        self._open[id(output)] = (*state, self._evictions, *computed)
        self._evictions = 0
        self.index += 1

    def ended(self, output: Any) -> None:
        """Note that a step's tokens are booked."""
        counts = self._open.pop(id(output), None)
        if counts is None:  # nothing was scheduled: its time is part of the next step's, or comes before the run
            if not self.rows and not self._open:
                self._ended = None
            return
        assert self._ended is not None
        now, taken = self._clock(), self.timers.taken()
        spent = (after - before for after, before in zip(taken, self._taken, strict=True))
        self.rows.append((now - self._ended, *counts, *spent))
        self._ended, self._taken = now, taken

    def columns(self) -> dict[str, list[float]]:
        """Return the rows as columns: ``seconds``, then ``COUNTS``, then ``SECTIONS`` with ``_s`` after their names."""
        names = ("seconds", *COUNTS, *(f"{section}_s" for section in SECTIONS))
        table = zip(*self.rows, strict=True) if self.rows else [()] * len(names)
        return {
            name: [round(value, 7) for value in column] if name.endswith(("_s", "seconds")) else list(column)
            for name, column in zip(names, table, strict=True)
        }


def attended(before: int, tokens: int) -> int:
    """Return the pairs of ``tokens`` new tokens and those they attend to, of which ``before`` are there already."""
    return tokens * before + tokens * (tokens + 1) // 2
