"""The bridge's speed across two processes: on a quiet machine, with `pytest -m perf tests/perf/test_bridge.py`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from bridge_cases import PYTHON
from pytest_benchmark.fixture import BenchmarkFixture

from nitro.ipc import MESSAGE, Consumer, Producer, new_engine_id

pytestmark = pytest.mark.perf

# Gates far from what a quiet machine measures (docs/benchmarks.md), and far from what would matter to an engine step.
LEAST_MESSAGES_A_SECOND = 2e6
MOST_PUBLISH_SECONDS = 1e-3  # 2,048 messages

# Both read CLOCK_MONOTONIC, which all processes of a machine share.
STREAM = """
import sys, numpy as np
from nitro.ipc import MESSAGE, Producer
batch = np.zeros(int(sys.argv[2]), MESSAGE)
batch["request"] = np.arange(len(batch))
with Producer(sys.argv[1]) as producer:
    while producer.consumer_alive:
        for _ in range(1000):
            producer.publish(batch)
"""
PACED = """
import sys, time, numpy as np
from nitro.ipc import MESSAGE, Producer
batch = np.zeros(int(sys.argv[2]), MESSAGE)
batch["request"] = np.arange(len(batch))
with Producer(sys.argv[1]) as producer:
    while producer.consumer_alive:
        end = time.monotonic_ns() + 500_000
        while time.monotonic_ns() < end:
            pass
        batch["step"] = time.monotonic_ns()
        producer.publish(batch)
"""


@contextmanager
def producing(program: str, batch: int, capacity: int = 4096) -> Iterator[Consumer]:
    with Consumer(new_engine_id(), 0, capacity) as consumer:
        child = subprocess.Popen([*PYTHON, program, consumer.name, str(batch)])
        try:
            while consumer.poll(1).size == 0:
                assert child.poll() is None
            yield consumer
        finally:
            child.kill()
            child.wait()


def take(consumer: Consumer, messages: int) -> None:
    while messages > 0:
        messages -= consumer.poll(messages).size


def test_messages_a_second(benchmark: BenchmarkFixture) -> None:
    messages = 100_000
    with producing(STREAM, batch=256) as consumer:
        benchmark.pedantic(take, (consumer, messages), rounds=100, warmup_rounds=5)
        assert consumer.counters.corrupt == 0
    # The best round: in the others one of the two may have been without a processor for a while.
    rate = messages / benchmark.stats.stats.min
    benchmark.extra_info["messages_per_second"] = round(rate)
    assert rate >= LEAST_MESSAGES_A_SECOND


@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_latency(benchmark: BenchmarkFixture, batch: int) -> None:
    """From before publish() in one process to after poll() in the other, which does nothing but poll."""

    def latencies() -> np.ndarray:
        found = []
        seen = 0
        while seen < 2000 * batch:
            messages = consumer.poll()
            if messages.size:
                now = time.monotonic_ns()
                seen += messages.size
                found += [now - sent for sent in np.unique(messages["step"]).tolist()]
        return np.array(found) / 1000

    with producing(PACED, batch) as consumer:
        micros = benchmark.pedantic(latencies, rounds=3, warmup_rounds=1)
    for name, share in (("p50", 50), ("p99", 99), ("p99.9", 99.9)):
        benchmark.extra_info[f"{name}_us"] = round(float(np.percentile(micros, share)), 1)


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_publishing_a_step_of_2048_requests(benchmark: BenchmarkFixture, full: bool) -> None:
    """What a worker's step pays: with room in the ring, and with none, when all of them wait and are replaced."""
    batch = np.zeros(2048, MESSAGE)
    batch["request"] = np.arange(2048)
    with Consumer(new_engine_id(), 0, 2 if full else 4096) as consumer, Producer(consumer.name) as producer:

        def make_room() -> None:
            if not full:
                consumer.poll()

        benchmark.pedantic(producer.publish, (batch,), setup=make_room, rounds=2000, warmup_rounds=10)
    assert benchmark.stats.stats.median < MOST_PUBLISH_SECONDS
