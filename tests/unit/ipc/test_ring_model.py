"""Random lives of a ring beside lists and dicts: what the ring holds, what waits, and what the scheduler has got."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from bridge_cases import RECORD_SIZE, Key, keys_of, memory_of, messages, read_word, record_at, write_word
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from nitro.ipc import Consumer, Producer, new_engine_id

REQUESTS = st.integers(0, 5)


class Ring(RuleBasedStateMachine):
    """One ring with both its ends in this process.

    The worker knows a request's run and epoch late, so that some of its counts are too old when they arrive. ``held``
    is what the ring has, oldest first, None for a damaged record.
    """

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.now: dict[int, tuple[int, int]] = {}  # (run, epoch) of each request, as the scheduler has it
        self.known: dict[int, tuple[int, int]] = {}  # as the worker has it
        self.start_engine(capacity=4)

    def start_engine(self, capacity: int) -> None:
        self.capacity = capacity
        self.consumer = Consumer(new_engine_id(), 0, capacity)
        self.held: list[Key | None] = []
        self.taken = self.received = self.corrupt = 0
        self.published: dict[int, Key] = {}  # the newest of each request, if nothing that the ring may lose has it
        self.got: dict[int, Key] = {}
        self.start_producer()

    def start_producer(self) -> None:
        self.producer = Producer(self.consumer.name)
        self.waiting: dict[int, Key] = {}  # in the order of waiting
        self.sent = self.replaced = self.withdrawn = 0

    def wait(self, keys: list[Key]) -> None:
        for key in keys:
            self.replaced += key[0] in self.waiting
            self.waiting[key[0]] = key  # a dict keeps the place of a key that it has

    @rule(requests=st.lists(REQUESTS, max_size=9))
    def publish(self, requests: list[int]) -> None:
        keys = []
        for request in requests:
            self.step += 1
            keys.append((request, self.step, *self.known.get(request, (0, 0))))
        left = list(keys)
        if self.waiting:
            self.wait(left)
            left = []
        room = self.capacity - len(self.held)
        flushed = list(self.waiting)[:room]
        direct = left[: room - len(flushed)]
        self.held += [self.waiting.pop(request) for request in flushed] + direct
        self.sent += len(flushed) + len(direct)
        self.wait(left[len(direct) :])
        assert self.producer.publish(messages(keys)) == len(self.waiting)
        self.published |= {key[0]: key for key in keys}

    @rule(most=st.none() | st.integers(0, 5))
    def poll(self, most: int | None) -> None:
        expected: list[Key] = []
        while self.held and len(expected) != most:
            key = self.held.pop(0)
            self.taken += 1
            if key is None:
                self.corrupt += 1
            else:
                expected.append(key)
        found = keys_of(self.consumer.poll(most))
        assert found == expected
        self.received += len(found)
        for key in found:
            # Late it may be, ahead of the scheduler never; and those of one request come in the order of their steps.
            assert key[2:] <= self.now.get(key[0], (0, 0))
            assert key[1] > self.got.get(key[0], (0, 0, 0, 0))[1]
            self.got[key[0]] = key

    @rule()
    def settle(self) -> None:
        """A consumer that catches up has the newest message of each request, damaged ones apart."""
        while self.held or self.waiting:
            self.poll(None)
            self.publish([])
        assert {request: self.got.get(request) for request in self.published} == self.published

    @rule(request=REQUESTS, again=st.booleans())
    def evict_or_preempt(self, request: int, again: bool) -> None:
        run, epoch = self.now.get(request, (0, 0))
        self.now[request] = (run + 1, 0) if again else (run, epoch + 1)

    @rule(request=REQUESTS)
    def tell_the_worker(self, request: int) -> None:
        if request in self.now:
            self.known[request] = self.now[request]

    @rule(gone=st.lists(REQUESTS, max_size=3))
    def withdraw(self, gone: list[int]) -> None:
        for request in gone:
            if self.waiting.pop(request, None) is not None:
                self.withdrawn += 1
                self.published.pop(request, None)
        self.producer.withdraw(np.array(gone, np.uint64))

    def lose(self, index: int) -> None:
        key = self.held[index]
        self.held[index] = None
        if key is not None and self.published.get(key[0]) == key:
            del self.published[key[0]]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), byte=st.integers(0, RECORD_SIZE - 1), bit=st.integers(0, 7))
    def flip_a_bit(self, data: st.DataObject, byte: int, bit: int) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        if self.held[index] is None:
            return  # a second time might mend it
        with memory_of(self.consumer.name) as memory:
            memory[record_at(memory, self.taken + index).start + byte] ^= 1 << bit
        self.lose(index)

    @precondition(lambda self: len(self.held) > 1 and None not in self.held)
    @rule(data=st.data(), swapped=st.booleans())
    def duplicate_or_swap(self, data: st.DataObject, swapped: bool) -> None:
        source, target = data.draw(st.permutations(range(len(self.held))))[:2]
        with memory_of(self.consumer.name) as memory:
            first, second = record_at(memory, self.taken + source), record_at(memory, self.taken + target)
            kept = memory[second]
            memory[second] = memory[first]
            if swapped:
                memory[first] = kept
        self.lose(target)
        if swapped:
            self.lose(source)

    @rule(killed=st.booleans())
    def replace_the_producer(self, killed: bool) -> None:
        """What waits in a producer is lost with it, as the worker's whole state is."""
        for request in self.waiting:
            self.published.pop(request, None)
        self.producer.close()
        assert self.consumer.producer_alive is None
        if killed:  # a process of this id that started one tick before it is not there any more
            with memory_of(self.consumer.name) as memory:
                write_word(memory, "producer", read_word(memory, "owner") - (1 << 22))
            assert self.consumer.producer_alive is False
        self.start_producer()

    @rule(where=st.sampled_from(["head", "tail"]), offset=st.sampled_from([1, 5, 2**63]), back=st.booleans())
    def break_the_counters(self, where: str, offset: int, back: bool) -> None:
        self.settle()
        self.publish([])  # the producer has seen the tail; a step back to what it saw last would not be wrong to it
        with memory_of(self.consumer.name) as memory:
            ours = read_word(memory, where)
            if back and ours == 0:
                return
            # One beyond is what the other side may write by itself; -1 is a step back.
            write_word(memory, where, ours - 1 if back else ours + self.capacity + offset)
        assert keys_of(self.consumer.poll()) == []
        self.producer.publish()
        assert (self.consumer.broken, self.producer.broken) == (where == "head", where == "tail")
        self.restart_the_engine(4)

    @rule(capacity=st.sampled_from([2, 4, 16]))
    def restart_the_engine(self, capacity: int) -> None:
        old = self.producer
        self.consumer.close()
        old.publish(messages([(1, 1, 0, 0)]))  # nobody reads it, and nothing blocks
        old.close()
        self.start_engine(capacity)

    @invariant()
    def counters_agree(self) -> None:
        type(self).steps += 1
        assert self.consumer.counters == (self.received, self.corrupt)
        assert self.producer.counters == (self.sent, self.replaced, self.withdrawn)
        assert self.producer.waiting == len(self.waiting)
        assert not self.consumer.broken
        assert self.consumer.producer_alive is True

    def teardown(self) -> None:
        self.producer.close()
        self.consumer.close()


@pytest.mark.parametrize(
    ("examples", "length", "least"),
    [pytest.param(250, 100, 10_000), pytest.param(3000, 200, 300_000, marks=pytest.mark.slow)],
)
def test_random_lives_agree_with_the_model(examples: int, length: int, least: int) -> None:
    Ring.steps = 0
    run_state_machine_as_test(Ring, settings=settings(max_examples=examples, stateful_step_count=length))
    assert Ring.steps >= least  # not all lives are of full length
