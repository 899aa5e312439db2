"""The scheduler's questions: an answer counts only as long as nothing has happened to its request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nitro import _native
from nitro.errors import BridgeError
from nitro.integration.vllm import asks as asks_module
from nitro.integration.vllm.asks import PATIENCE, Answer, Asks
from nitro.integration.vllm.work import ASKS
from nitro.integration.vllm.worker import NitroWorkerMixin
from nitro.ipc import MESSAGE, Consumer, Messages, Producer
from nitro.types import StepAsks

from .simulation import Simulation

BLOCK = 16


def answers_to(asked: StepAsks, keep: int) -> Messages:
    """Return what a worker sends."""
    messages = np.zeros(len(asked), MESSAGE)
    slots = asked.slots
    messages["request"], messages["run"], messages["step"] = asked.numbers, asked.runs, asked.step
    messages["epoch"], messages["logical_len"] = slots.epoch, slots.logical_len
    messages["physical_len"], messages["keep"] = slots.physical_len, keep
    return messages


@pytest.fixture
def asks() -> Iterator[Asks]:
    made = Asks(0.5, BLOCK, 8)
    yield made
    made.close()


def ask(asks: Asks, name: str, logical: int = 50, evicted: int = 0, epoch: int = 0) -> StepAsks:
    asks.begin_step()
    physical = logical - evicted
    asks.ask(name, epoch, logical, physical, 4, list(range(-(-physical // BLOCK))))
    asked = asks.take()
    assert asked is not None
    return asked


def test_a_question_and_its_answer(asks: Asks) -> None:
    asked = ask(asks, "a", logical=50, evicted=10, epoch=2)
    assert asked.slots.request_ids == ("a",)
    assert asked.slots.counts.tolist() == [[2], [50], [40], [40], [4]]
    assert asked.slots.src_blocks.tolist() == [0, 1, 2]
    assert (asked.threshold, asked.step) == (0.5, 1)
    assert asks.take() is None, "each question travels once"
    assert asks.waits("a")
    Producer(asked.ring).publish(answers_to(asked, 33))
    assert asks.begin_step() == [Answer("a", 50, 33)]
    assert not asks.waits("a")
    assert asks.begin_step() == []


@pytest.mark.parametrize("event", ["finished", "preempted"])
def test_what_happens_to_a_request_makes_the_answer_stale(asks: Asks, event: str) -> None:
    asked = ask(asks, "a")
    getattr(asks, event)("a")
    Producer(asked.ring).publish(answers_to(asked, 33))
    assert asks.begin_step() == []
    assert asks.stale == 1


@pytest.mark.parametrize("event", ["finished", "preempted"])
def test_a_request_of_the_same_name_and_lengths_is_not_answered_by_the_old_answer(asks: Asks, event: str) -> None:
    first = ask(asks, "a")
    getattr(asks, event)("a")
    second = ask(asks, "a")
    assert (first.numbers.tolist(), first.runs.tolist()) != (second.numbers.tolist(), second.runs.tolist())
    producer = Producer(first.ring)
    producer.publish(answers_to(first, 20))
    producer.publish(answers_to(second, 30))
    assert asks.begin_step() == [Answer("a", 50, 30)]


def test_a_lost_question_is_asked_again(asks: Asks) -> None:
    first = ask(asks, "a")
    for _ in range(PATIENCE - 1):
        asks.begin_step()
        assert asks.waits("a")
    asks.begin_step()
    assert not asks.waits("a")
    assert asks.lost == 1
    second = ask(asks, "a", logical=66)
    producer = Producer(first.ring)
    producer.publish(answers_to(first, 20))
    assert asks.begin_step() == []
    producer.publish(answers_to(second, 30))
    assert asks.begin_step() == [Answer("a", 66, 30)]


def test_a_lost_question_is_asked_again_in_the_very_step_in_which_it_counts_as_lost(
    simulate: Callable[..., Simulation],
) -> None:
    """Not a slack of tokens after it, as a question that was answered would be."""

    class Mute(Producer):
        def publish(self, messages: Messages | None = None) -> int:
            return 0

    sim = simulate(budget=None, threshold=0.5, min_keep=8, slack=3 * PATIENCE)
    sim.bridge = Mute
    sim.add(list(range(1, 61)), 3 * PATIENCE + 5)
    asked = [asks.step for _ in range(3 * PATIENCE) if (asks := getattr(sim.step(), ASKS, None)) is not None]
    assert len(asked) == 3
    assert [later - earlier for earlier, later in pairwise(asked)] == [PATIENCE, PATIENCE]


def test_those_who_are_due_together_are_asked_in_parts(
    simulate: Callable[..., Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asks_module, "MOST", 3)
    sim = simulate(num_blocks=200, chunk=512, budget=None, threshold=0.5, min_keep=8, slack=30)
    sim.bridge, sim.reached = Producer, 8
    for number in range(8):
        sim.add([*range(1 + number, 40 + number)], 60)
    asked = []
    while sim.scheduler.requests:
        asked.append(len(getattr(sim.step(), ASKS, ())))
    sim.drain()
    first = next(step for step, count in enumerate(asked) if count)
    assert asked[first : first + 3] == [3, 3, 2]
    assert max(asked) == 3
    assert sim.evictions >= 16, "each of them is evicted again and again, none is forgotten"


def test_shared_memory_is_tried_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir(_native.SHARED_MEMORY))
    asks_module.try_bridge()
    assert set(os.listdir(_native.SHARED_MEMORY)) <= before, "nothing is left of it"

    def full(*_: object) -> Consumer:
        raise BridgeError("cannot allocate /dev/shm/nitro-0")

    monkeypatch.setattr(asks_module, "Consumer", full)
    settings = {"policy": "keydiff", "threshold": 0.5}
    worker = object.__new__(NitroWorkerMixin)
    worker.rank, worker.vllm_config = 0, SimpleNamespace(additional_config={"nitro": settings})
    with pytest.raises(
        BridgeError, match=r"threshold needs shared memory .* set budget or ratio instead: cannot allocate"
    ):
        worker.init_device()


def test_requests_that_were_preempted_while_their_step_was_scheduled_are_not_asked(asks: Asks) -> None:
    asks.begin_step()
    for name in ("a", "b"):
        asks.ask(name, 0, 20, 20, 4, [7, 8])
    asks.preempted("a")
    asked = asks.take()
    assert asked is not None
    assert asked.slots.request_ids == ("b",)
    assert asked.slots.src_blocks.tolist() == [7, 8]


def test_nothing_is_left_in_memory_of_requests_that_finished(asks: Asks) -> None:
    for number in range(50):
        ask(asks, f"r{number}")
        asks.finished(f"r{number}")
    assert [asks._numbers, asks._names, asks._open, asks._new] == [{}, {}, {}, []]


def test_memory_that_was_written_over_ends_the_answers_and_not_the_engine(
    asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(asks_module.logger, "warning_once", said.append)
    asked = ask(asks, "a")
    with (Path(_native.SHARED_MEMORY) / asked.ring).open("r+b") as memory:
        memory.seek(_native.RING_LAYOUT["head"])
        memory.write(b"\xff" * 8)
    assert asks.begin_step() == []
    assert asks.begin_step() == []
    assert len(said) >= 1
    assert "start the engine again" in said[0]


class Bridge(RuleBasedStateMachine):
    """Questions, answers in any order, late, lost or repeated, beside a model that knows what is still true."""

    names = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.asks = Asks(0.5, BLOCK, 4)
        self.producer: Producer | None = None
        self.on_their_way: list[Messages] = []
        self.true: dict[str, tuple[int, int, int]] = {}  # number, step and slots of the question that may be answered
        self.life = dict.fromkeys("abc", 0)
        self.length = 20

    def teardown(self) -> None:
        if self.producer is not None:
            self.producer.close()
        self.asks.close()

    @rule(names=st.sets(names, min_size=1))
    def step(self, names: set[str]) -> None:
        self._begin()
        self.length += 1
        for name in sorted(names):
            if not self.asks.waits(name):
                self.asks.ask(name, 0, self.length, self.length, 4, [1, 2, 3])
        asked = self.asks.take()
        if asked is None:
            return
        if self.producer is None:
            self.producer = Producer(asked.ring)
        messages = answers_to(asked, 10)
        self.on_their_way += [messages[i : i + 1] for i in range(len(messages))]
        for name, number in zip(asked.slots.request_ids, asked.numbers.tolist(), strict=True):
            self.true[name] = (number, asked.step, self.length)

    @rule()
    def idle(self) -> None:
        self._begin()

    @precondition(lambda self: self.on_their_way)
    @rule(which=st.integers(0, 99), again=st.booleans())
    def send(self, which: int, again: bool) -> None:
        assert self.producer is not None
        index = which % len(self.on_their_way)
        message = self.on_their_way[index] if again else self.on_their_way.pop(index)
        self.producer.publish(message)

    @precondition(lambda self: self.on_their_way)
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        self.on_their_way.pop(which % len(self.on_their_way))

    @rule(name=names, how=st.sampled_from(["finished", "preempted"]))
    def happen(self, name: str, how: str) -> None:
        getattr(self.asks, how)(name)
        self.true.pop(name, None)

    def _begin(self) -> None:
        for answer in self.asks.begin_step():
            _, _, length = self.true.pop(answer.request_id)
            assert answer == Answer(answer.request_id, length, 10)
        for name, (_, asked_in, _) in list(self.true.items()):
            waits = self.asks.waits(name)
            assert waits == (self.asks._step - asked_in < PATIENCE)
            if not waits:
                del self.true[name]

    @invariant()
    def knows_what_is_open(self) -> None:
        assert set(self.asks._open) == set(self.true)


TestBridge = Bridge.TestCase
TestBridge.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
