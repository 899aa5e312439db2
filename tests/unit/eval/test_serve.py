"""What is measured is what it says: on a real engine, against a model that sees exactly the kept tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nitro.eval.case import Case, Writer
from nitro.eval.plan import Cell, cells
from nitro.eval.serve import EvalError, Server, engine_arguments
from nitro.eval.settings import CHUNK, EvalSettings

from .conftest import WordTokenizer

for name, value in {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LENGTH, CASES = 256, 5
SETTINGS = EvalSettings(
    tasks=("needle-noise", "perplexity", "stories"),
    policies=("kvdiff", "vdiff:radius=2"),
    budgets=(0.25,),
    lengths=(LENGTH,),
    contexts=CASES,
    answer=160,
    parallel=3,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nitro.testing.models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", num_kv_heads=2)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    from nitro.testing import matrix

    arguments = engine_arguments(SETTINGS, 512)
    with matrix.engine(model, matrix.SCENARIOS["plain"], "in-process", **arguments) as made:
        yield made


@pytest.fixture(scope="module")
def server(llm: Any) -> Server:
    tokenizer = WordTokenizer(words=[f" w{i}" for i in range(512)])
    return Server(llm, Writer(tokenizer, ["Nothing."]), SETTINGS, own_seeds=False)


@pytest.fixture
def cases() -> list[Case]:
    draw = np.random.default_rng(4)
    sizes = [(7, 3), (40, 9), (0, 20), (16, 1), (5, 5)]
    return [
        Case(f"case-{i}", *(tuple(draw.integers(0, 511, size).tolist()) for size in (LENGTH - CHUNK, ask, answer)), 0.5)
        for i, (ask, answer) in enumerate(sizes)
    ]


def cell(task: str, label: str) -> Cell:
    return next(one for one in cells(SETTINGS) if (one.task, one.label) == (task, label))


@pytest.mark.parametrize("label", ["full", "kvdiff", "vdiff:radius=2", "random"])
def test_answers_follow_contexts_that_were_evicted_before_the_question(
    llm: Any, server: Server, cases: list[Case], model: Path, label: str
) -> None:
    """Twice, the second time with contexts from the prefix cache: the likelihoods are those of the masked reference."""
    from nitro.testing.masked import masked_logits
    from nitro.testing.models import load_model
    from nitro.testing.recording import Recording
    from nitro.testing.visibility import Visibility

    reference = load_model(model)
    for _ in range(2):
        llm.collective_rpc("nitro_record", args=(True,))
        rows, likeliest = server.run(cell("needle-noise", label), cases, None, lambda done: None)
        recording = Recording.combine(llm.collective_rpc("nitro_take_recording"))
        llm.collective_rpc("nitro_record", args=(False,))
        assert likeliest is None
        for case, row in zip(cases, rows, strict=True):
            records, _ = recording.of(case.name) if label != "full" else ([], None)
            for of_rank in records:
                assert [(r.logical_len, r.kept.shape[-1]) for r in of_rank] == [(LENGTH - CHUNK, 60)]
            tokens = case.context + case.question + case.answer
            first = len(tokens) - len(case.answer)
            seen = Visibility(records, len(tokens), num_heads=4, num_kv_heads=2)
            logits = masked_logits(reference, tokens, seen, first - 1)[:-1].log_softmax(dim=-1)
            answer = torch.tensor(case.answer)
            want = -logits.gather(1, answer[:, None]).mean()
            assert row["nll"] == pytest.approx(float(want), abs=2e-3)
            assert row["exact"] == bool((logits.argmax(dim=-1) == answer).all())


def test_the_divergence_from_the_full_cache(server: Server, cases: list[Case]) -> None:
    cases = [replace(case, answer=(case.question + case.answer)[:3], question=()) for case in cases]
    _, full = server.run(cell("perplexity", "full"), cases, None, lambda done: None)
    assert full is not None
    assert full[0].shape == (CASES, 3, 20)
    again, _ = server.run(cell("perplexity", "full"), cases, full, lambda done: None)
    rows, _ = server.run(cell("perplexity", "random"), cases, full, lambda done: None)
    assert all(abs(row["kl"]) < 1e-3 for row in again)
    assert min(row["kl"] for row in rows) > -1e-3
    assert sum(row["kl"] for row in rows) / CASES > 0.1


def test_a_cell_is_the_same_again_to_the_bit(server: Server, cases: list[Case]) -> None:
    first, _, again = (
        server.run(cell("needle-noise", label), cases, None, lambda done: None)
        for label in ("random", "kvdiff", "random")
    )
    assert first == again


def test_stories(server: Server) -> None:
    prompts = [Case(f"stories-{i}", tuple(range(i, i + 40)), (), ()) for i in range(CASES)]
    done: list[int] = []
    full, _ = server.run(cell("stories", "full"), prompts, None, done.append)
    assert done[-1] == 2 * CASES
    again, _ = server.run(cell("stories", "full"), prompts, None, done.append)
    assert full == again, "the sampler begins anew"
    evicted, _ = server.run(cell("stories", "kvdiff"), prompts, None, done.append)
    assert [row["text"] for row in evicted] != [row["text"] for row in full]
    assert all(row["tokens"] == SETTINGS.answer for row in evicted)
    # A text of one's own is likelier than one that was written with a quarter of the cache.
    assert sum(row["nll"] for row in evicted) > sum(row["nll"] for row in full) + 0.1


def test_contexts_that_end_within_a_chunk_are_noticed(server: Server, cases: list[Case]) -> None:
    long = [replace(case, name=f"{case.name}-long", context=case.context + case.question[:3]) for case in cases]
    with pytest.raises(EvalError, match=r"needle-noise 256, random at 0\.25: 3 evictions of .* tokens, not 5 of"):
        server.run(cell("needle-noise", "random"), long, None, lambda done: None)
