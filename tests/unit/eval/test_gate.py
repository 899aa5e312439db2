"""The quality gate: a real model finds a needle in noise after the default policy has evicted most of the context.

A policy that is broken on purpose must fail it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from nitro import policies
from nitro.config import Settings
from nitro.errors import ModelFetchError
from nitro.eval import tasks, texts
from nitro.eval.case import Case, Writer
from nitro.eval.plan import Cell
from nitro.eval.serve import Server, engine_arguments
from nitro.eval.settings import EvalSettings, PolicyChoice

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

DEFAULT = str(Settings.model_fields["policy"].default)
BUDGET, LENGTH = 0.165, 512
SETTINGS = EvalSettings(tasks=("needle-noise",), policies=(DEFAULT,), budgets=(BUDGET,), lengths=(LENGTH,), contexts=4)
MARGIN = 0.5
"""Nats a token by which the default's answers must be likelier than random's."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, Server, list[Case]]]:
    from transformers import AutoTokenizer

    from nitro.demo.models import ensure_model
    from nitro.testing import matrix

    try:
        model = ensure_model(print)
    except ModelFetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the gate needs SmolLM2: {error}")
    writer = Writer(AutoTokenizer.from_pretrained(model), texts.sentences(None))
    cases = tasks.cases("needle-noise", LENGTH, SETTINGS, writer)
    longest = max(len(case.context + case.question + case.answer) for case in cases) + 1
    arguments = engine_arguments(SETTINGS, longest) | {"kv_cache_memory_bytes": 2**29, "num_gpu_blocks_override": 300}
    with matrix.engine(model, matrix.SCENARIOS["plain"], "in-process", **arguments) as llm:
        yield llm, Server(llm, writer, SETTINGS, own_seeds=False), cases


def nll(server: Server, cases: list[Case], policy: str) -> float:
    cell = Cell("needle-noise", LENGTH, PolicyChoice.parse(policy), BUDGET)
    rows, _ = server.run(cell, cases, None, lambda done: None)
    return float(sum(row["nll"] for row in rows)) / len(rows)


def passes(server: Server, cases: list[Case]) -> bool:
    found, null = nll(server, cases, DEFAULT), nll(server, cases, "random")
    print(f"NLL {found:.3f}, random {null:.3f}")
    return found < null - MARGIN


def test_the_default_finds_what_random_does_not(served: tuple[Any, Server, list[Case]]) -> None:
    _, server, cases = served
    assert passes(server, cases)


def test_a_broken_default_does_not_pass(
    served: tuple[Any, Server, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server, cases = served
    cls = policies.policy_class(DEFAULT)
    right = cls.score
    monkeypatch.setattr(cls, "score", lambda self, x: -right(self, x))
    assert not passes(server, cases)
