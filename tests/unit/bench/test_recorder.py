"""The recorder, on a scheduler that does what it is told: counts of each step, and times that sum up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nitro.bench.recorder import COUNTS, SECTIONS, Recorder, attended


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scheduler:
    """Requests by name, with the tokens that they have computed."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[str] = []
        self.waiting: list[str] = ["later"]
        pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 4)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self, *, finished: frozenset[str] = frozenset(), **tokens: int) -> Any:
        for name, count in tokens.items():
            self.requests.setdefault(name, SimpleNamespace(request_id=name, num_computed_tokens=0))
            self.requests[name].num_computed_tokens += count
        self.running = list(tokens)
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_req_ids=finished,
            preempted_req_ids=None,
        )


class Bench:
    """Drives a recorder as the wrapped methods do."""

    def __init__(self) -> None:
        self.clock, self.scheduler = Clock(), Scheduler()
        self.recorder = Recorder(self.clock)

    def step(self, seconds: float = 1.0, **tokens: int) -> dict[str, float]:
        output = self.schedule(**tokens)
        self.clock.now += seconds
        self.recorder.ended(output)
        return {name: column[-1] for name, column in self.recorder.columns().items()}

    def schedule(self, **tokens: int) -> Any:
        self.recorder.starts()
        output = self.scheduler.schedule(**tokens)
        self.recorder.scheduled(self.scheduler, output)
        return output


def evicts(name: str, logical: int, keep: int) -> Any:
    import numpy as np

    from nitro.types import StepPlan

    counts = np.array([[0], [logical], [logical], [keep], [0]], np.int32)
    nothing = np.zeros(0, np.int32)
    return StepPlan((name,), counts, nothing, nothing.reshape(2, 0), 16)


def test_prefills_and_decodes() -> None:
    bench = Bench()
    first = bench.step(a=100)
    assert {name: first[name] for name in COUNTS} == {
        "running": 1,
        "waiting_requests": 1,
        "blocks": 6,
        "preempted": 0,
        "evictions": 0,
        "requests": 1,
        "prefills": 1,
        "tokens": 100,
        "pairs": 5050,
        "again": 0,
        "pairs_again": 0,
        "kv_tokens": 0,
    }
    mixed = bench.step(a=1, b=10)
    assert (mixed["requests"], mixed["prefills"], mixed["tokens"]) == (2, 1, 11)
    assert (mixed["kv_tokens"], mixed["pairs"]) == (101, 55)
    assert bench.step(a=1, b=1)["kv_tokens"] == 102 + 11
    assert bench.step(b=5)["pairs"] == attended(11, 5) == 5 * 11 + 15


def test_evicted_tokens_are_not_read() -> None:
    bench = Bench()
    bench.step(a=100, b=50)
    bench.recorder.planned(evicts("a", 100, 30))
    bench.recorder.planned(None)
    after = bench.step(a=1, b=1)
    assert (after["kv_tokens"], after["evictions"]) == (31 + 51, 1)
    chunk = bench.step(a=4, b=1)  # the next part of a streamed input, say
    assert (chunk["kv_tokens"], chunk["pairs"], chunk["evictions"]) == (52, attended(31, 4), 0)
    output = bench.scheduler.schedule(finished=frozenset({"a"}), b=1)
    bench.recorder.scheduled(bench.scheduler, output)
    bench.clock.now += 1.0
    bench.recorder.ended(output)
    assert bench.recorder.columns()["kv_tokens"][-1] == 53


def test_what_is_computed_again_after_a_preemption() -> None:
    bench = Bench()
    bench.step(a=60, b=40)
    bench.step(a=1, b=1)
    request = bench.scheduler.requests["b"]
    bench.recorder.preempted(request)
    request.num_computed_tokens = 0
    assert bench.step(a=1)["again"] == 0
    # It had 41, and comes back with the one that it was to compute next, in two chunks; 16 are found in the cache.
    request.num_computed_tokens = 16
    first = bench.step(a=1, b=20)
    assert (first["again"], first["pairs_again"]) == (20, attended(16, 20))
    second = bench.step(a=1, b=6)
    assert (second["again"], second["pairs_again"], second["pairs"]) == (5, attended(36, 5), attended(36, 6))
    assert bench.step(a=1, b=3)["again"] == 0


def test_preemption_forgets_evictions() -> None:
    bench = Bench()
    bench.step(a=100)
    bench.recorder.planned(evicts("a", 100, 30))
    bench.recorder.preempted(bench.scheduler.requests["a"])
    bench.scheduler.requests["a"].num_computed_tokens = 0
    bench.step(a=100)
    assert bench.step(a=1)["kv_tokens"] == 101


def test_steps_in_flight_share_time_without_overlap() -> None:
    """With asynchronous scheduling a step is scheduled while the one before runs: times still sum up."""
    bench, timers = Bench(), None
    timers = bench.recorder.timers
    before = bench.schedule(a=5)
    ends = []
    for _ in range(4):
        timers.enter("scheduler")
        bench.clock.now += 0.5
        timers.leave()
        after = bench.schedule(a=1)
        bench.clock.now += 1.0
        bench.recorder.ended(before)
        ends.append(bench.clock.now)
        before = after
    columns = bench.recorder.columns()
    assert columns["seconds"] == [1.5] * 4
    assert columns["scheduler_s"] == [0.5] * 4
    assert sum(columns["seconds"]) == ends[-1]


def test_empty_steps_count_for_the_next_or_not_at_all() -> None:
    bench = Bench()
    idle = bench.schedule()
    bench.recorder.ended(idle)  # what is left of the load before
    bench.clock.now += 100.0
    assert bench.step(2.0, a=3)["seconds"] == 2.0
    idle = bench.schedule()
    bench.clock.now += 1.0
    bench.recorder.ended(idle)
    assert bench.step(2.0, a=1)["seconds"] == 3.0
    bench.recorder.begin()
    assert bench.recorder.columns()["seconds"] == []
    assert bench.recorder.columns().keys() == {"seconds", *COUNTS, *(f"{section}_s" for section in SECTIONS)}


@pytest.mark.parametrize(("before", "tokens"), [(0, 0), (0, 1), (7, 3)])
def test_pairs(before: int, tokens: int) -> None:
    assert attended(before, tokens) == sum(before + i + 1 for i in range(tokens))
