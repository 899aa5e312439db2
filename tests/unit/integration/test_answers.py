"""The worker's end of the questions: when it falls silent, requests are served all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nitro import _native
from nitro.integration.vllm import answers as answers_module
from nitro.integration.vllm.answers import Answers
from nitro.ipc import Consumer, new_engine_id
from nitro.types import StepAsks, StepPlan


def question(ring: str, number: int) -> StepAsks:
    """One request with 40 tokens in 3 blocks of 16."""
    counts = np.array([[0], [40], [40], [40], [4]], np.int32)
    slots = StepPlan((f"r{number}",), counts, np.array([1, 2, 3], np.int32), np.empty((2, 0), np.int32), 16)
    return StepAsks(slots, np.array([number], np.uint64), np.array([0], np.uint32), number, 0.5, ring)


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    with Consumer(new_engine_id(), 0, 4) as made:
        yield made


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(answers_module.logger, "warning", lambda text, *rest: said.append(text % rest))
    return said


def make_answers() -> Answers:
    compactor: Any = SimpleNamespace(count=lambda *_: torch.tensor([25], dtype=torch.int32))
    return Answers(compactor, torch.device("cpu"), 8)


def test_an_answer_goes_out_with_the_next_step(consumer: Consumer, warnings: list[str]) -> None:
    answers = make_answers()
    answers.step(question(consumer.name, 1))
    assert consumer.poll().size == 0
    answers.step(None)
    assert [(int(m["request"]), int(m["keep"])) for m in consumer.poll()] == [(1, 25)]
    assert warnings == []


def test_memory_that_was_written_over_ends_the_answers_and_keeps_none(consumer: Consumer, warnings: list[str]) -> None:
    answers = make_answers()
    answers.step(question(consumer.name, 1))
    with (Path(_native.SHARED_MEMORY) / consumer.name).open("r+b") as memory:
        memory.seek(_native.RING_LAYOUT["tail"])
        memory.write(b"\xff" * 8)
    for number in range(2, 40):
        answers.step(question(consumer.name, number))
    assert consumer.producer_alive is None, "the worker has closed its end, and what waited there is gone"
    assert len(warnings) == 1
    assert "start" in warnings[0]
    assert "written over the shared memory" in warnings[0]


def test_a_ring_that_is_gone_is_said_once(consumer: Consumer, warnings: list[str]) -> None:
    consumer.unlink()
    answers = make_answers()
    for number in range(3):
        answers.step(question(consumer.name, number))
    assert len(warnings) == 1
    assert "does not exist" in warnings[0]
