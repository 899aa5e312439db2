"""Both ends of a ring by themselves: what they take and give, how they close, and that they survive each other."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from bridge_cases import PYTHON, SHARED_MEMORY, keys_of, memory_of, messages, read_word, start_ticks

from nitro import _native
from nitro.errors import BridgeError, NitroError
from nitro.ipc import MESSAGE, Consumer, Producer, new_engine_id


@pytest.fixture
def consumer() -> Consumer:
    return Consumer(new_engine_id(), 0, capacity=4)


def test_messages_cross_in_order(consumer: Consumer) -> None:
    sent = [(1, 1, 0, 0), (2, 1, 3, 1), (1, 2, 0, 1)]
    with Producer(consumer.name) as producer:
        assert producer.publish(messages(sent)) == 0
        assert producer.publish() == 0
        found = consumer.poll(2)
        assert found.dtype == MESSAGE
        assert keys_of(found) + keys_of(consumer.poll()) == sent
        assert consumer.poll().shape == (0,)
        assert consumer.counters == (3, 0)
        assert producer.counters == (3, 0, 0)


def test_a_full_ring_keeps_the_newest_of_each_request_for_later(consumer: Consumer) -> None:
    with Producer(consumer.name) as producer:
        assert producer.publish(messages((request, 1, 0, 0) for request in range(7))) == 3
        assert producer.publish(messages([(5, 2, 0, 0), (9, 2, 0, 0)])) == 4
        producer.withdraw(np.array([6, 1], np.uint64))
        assert producer.waiting == 3
        assert keys_of(consumer.poll()) == [(request, 1, 0, 0) for request in range(4)]
        assert producer.publish() == 0
        assert keys_of(consumer.poll()) == [(4, 1, 0, 0), (5, 2, 0, 0), (9, 2, 0, 0)]
        assert producer.counters == (7, 1, 1)


def test_results_outlive_the_ring(consumer: Consumer) -> None:
    with Producer(consumer.name) as producer:
        producer.publish(messages([(1, 1, 0, 0)]))
    found = consumer.poll()
    consumer.close()
    gc.collect()
    assert keys_of(found) == [(1, 1, 0, 0)]


def test_other_arrays_are_refused(consumer: Consumer) -> None:
    with Producer(consumer.name) as producer:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            producer.publish(np.zeros(2, np.int64))
        with pytest.raises(ValueError, match="messages has 2 dimensions"):
            producer.publish(np.zeros((2, 2), MESSAGE))
        wrong = messages([(1, 1, 0, 0), (8, 1, 0, 0)])
        wrong["keep"][1] = wrong["physical_len"][1] + 1
        with pytest.raises(ValueError, match=r"request 8: keep=266, physical_len=265, .* publish what was scored"):
            producer.publish(wrong)
        with pytest.raises(TypeError):
            producer.withdraw(np.array([-1]))
        every_other = messages([(1, 1, 0, 0), (2, 2, 0, 0), (3, 3, 0, 0)])[::2]
        assert producer.publish(every_other) == 0
    assert keys_of(consumer.poll()) == [(1, 1, 0, 0), (3, 3, 0, 0)]


@pytest.mark.parametrize("capacity", [0, 1, 1000, 2**21])
def test_other_capacities_are_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=rf"capacity={capacity} is not a power of two in \[2, 1048576\]"):
        Consumer(new_engine_id(), 0, capacity)


def test_an_end_closes_once_and_says_so(consumer: Consumer) -> None:
    producer = Producer(consumer.name)
    assert consumer.producer_alive is True
    assert producer.consumer_alive
    producer.close()
    producer.close()
    assert consumer.producer_alive is None
    with pytest.raises(BridgeError, match=f"this end of {consumer.name} is closed"):
        producer.publish()
    consumer.close()
    assert not (SHARED_MEMORY / consumer.name).exists()
    with pytest.raises(NitroError, match="closed"):
        consumer.poll()
    with pytest.raises(BridgeError, match="does not exist"):
        Producer(consumer.name)


def test_the_last_reference_closes() -> None:
    consumer = Consumer(new_engine_id(), 0, capacity=4)
    path = SHARED_MEMORY / consumer.name
    assert path.exists()
    del consumer
    gc.collect()
    assert not path.exists()


def test_the_interpreter_closes_what_is_still_open() -> None:
    code = (
        "from nitro.ipc import *; import sys;"
        "c = Consumer(new_engine_id(), 0); sys.modules['kept'] = c; c.me = c; print(c.name)"
    )
    name = subprocess.run([*PYTHON, code], check=True, capture_output=True, text=True).stdout.strip()
    assert name.startswith("nitro-")
    assert not (SHARED_MEMORY / name).exists()


def test_a_second_producer_is_refused(consumer: Consumer) -> None:
    with Producer(consumer.name), pytest.raises(BridgeError, match=f"is written by process {os.getpid()} already"):
        Producer(consumer.name)


def test_layout_says_where_things_are(consumer: Consumer) -> None:
    with Producer(consumer.name) as producer, memory_of(consumer.name) as memory:
        producer.publish(messages([(1, 1, 0, 0), (2, 1, 0, 0)]))
        consumer.poll(1)
        assert (read_word(memory, "head"), read_word(memory, "tail"), read_word(memory, "capacity")) == (2, 1, 4)
        assert read_word(memory, "producer") == read_word(memory, "owner")
        with open("/proc/self/stat") as file:
            assert start_ticks(read_word(memory, "owner")) == int(file.read().rsplit(")")[-1].split()[19])
        assert len(memory) == _native.RING_LAYOUT["records"] + 4 * 64


WRITER = """
import sys
from bridge_cases import messages
from nitro.ipc import Producer
with Producer(sys.argv[1]) as producer:
    life, step = int(sys.argv[2]), 0
    while True:
        step += 1
        producer.publish(messages((request, step, life, 0) for request in range(10)))
"""


def test_a_consumer_goes_on_after_its_producer_is_killed() -> None:
    """Each producer is killed somewhere in its loop; what it has left behind is whole, and the next one goes on."""
    consumer = Consumer(new_engine_id(), 0, capacity=32)
    seen = 0
    chance = random.Random(1)
    for life in range(12):
        command = [*PYTHON, WRITER, consumer.name, str(life)]
        child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        newest: dict[int, int] = {}

        def look(life: int = life, newest: dict[int, int] = newest) -> int:
            found = keys_of(consumer.poll())
            for request, step, run, _ in found:
                assert run == life
                assert step > newest.get(request, 0)
                newest[request] = step
            return len(found)

        while not newest:
            assert child.poll() is None
            look()
        end = time.monotonic() + chance.random() / 50
        while time.monotonic() < end:
            seen += look()
        assert consumer.producer_alive is True
        child.kill()
        child.wait()
        assert consumer.producer_alive is False
        look()
        assert look() == 0
    assert seen > 100
    assert consumer.counters.corrupt == 0
    assert not consumer.broken
