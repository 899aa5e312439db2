"""Contexts: their exact length, what they hide, where, and that they are the same each time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro.errors import SettingsError
from nitro.eval import tasks, texts
from nitro.eval.case import Writer, depth_of, haystack
from nitro.eval.settings import CHUNK, TASKS, EvalSettings

from .conftest import WordTokenizer

READ = [task for task in TASKS if task != "stories"]


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("task", READ)
def test_contexts_have_their_exact_length_and_are_different(
    task: str, length: int, writer: Writer, small: EvalSettings
) -> None:
    found = tasks.cases(task, length, small, writer)
    assert len(found) == small.contexts
    assert len({case.context for case in found}) == len(found)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert len(case.context) == length - CHUNK
        assert case.answer


@pytest.mark.parametrize("task", TASKS)
def test_the_same_again_whatever_else_runs(task: str, writer: Writer, small: EvalSettings) -> None:
    once = tasks.cases(task, 512, small, writer)
    again = tasks.cases(task, 512, replace(small, tasks=(task,), budgets=(0.4,)), writer)
    assert once == again
    assert tasks.cases(task, 512, replace(small, seed=1), writer) != once


@pytest.mark.parametrize("task", ["needle-noise", "needle-text", "needle-keys", "needle-word", "dictionary"])
def test_the_answer_is_once_in_the_context_at_its_depth(task: str, writer: Writer, small: EvalSettings) -> None:
    for index, case in enumerate(tasks.cases(task, 1024, small, writer)):
        context, answer = writer.text(case.context), writer.text(case.answer)
        key = {"needle-word": "of the old", "dictionary": "\n"}.get(task, "numbers for")
        asked = writer.text(case.question).rsplit(":" if task == "dictionary" else "?", 1)[0].rsplit("\n", 1)[1]
        assert context.count(answer) == 1
        assert case.depth is not None
        assert case.depth * small.contexts / 0.9 == pytest.approx(index + 0.5, abs=0.51)
        assert abs(context.index(answer) / len(context) - case.depth) < 0.15
        if task == "dictionary":
            assert f"{key}{asked}:{answer}" in context
        elif task.startswith("needle-") and task != "needle-word":
            name = asked.split("number for ")[1].split(" mentioned")[0]
            assert f"{key} {name} is:{answer}." in context


def test_four_keys_have_four_values(writer: Writer, small: EvalSettings) -> None:
    for case in tasks.cases("needle-keys", 1024, small, writer):
        assert writer.text(case.context).count("One of the special magic numbers for") == 4


def test_labels_hold_the_word_back(writer: Writer, small: EvalSettings) -> None:
    for case in tasks.cases("labels", 512, small, writer):
        asked = writer.text(case.question).split("word: ")[1].split(" ->")[0]
        context, code = writer.text(case.context), writer.text(case.answer)
        assert f"word: {asked} " not in context
        kind = next(members for members in texts.CATEGORIES.values() if asked in members)
        codes = {line.split("code:")[1] for line in context.split("\n")[1:] if line.split()[1] in kind}
        assert codes == {code}


def test_variables_are_assigned_in_a_chain(writer: Writer, small: EvalSettings) -> None:
    for case in tasks.cases("variables", 512, small, writer):
        one, other = writer.text(case.answer).split()
        value = writer.text(case.question).split("the value ")[1].split()[0]
        context = writer.text(case.context)
        assert context.index(f"VAR {one} = {value}.") < context.index(f"VAR {other} = VAR {one}.")


def test_perplexity_is_of_text_in_one_piece(writer: Writer, small: EvalSettings) -> None:
    whole = " " + " ".join(writer.sentences) + " " + " ".join(writer.sentences)
    for case in tasks.cases("perplexity", 512, small, writer):
        assert len(case.answer) == tasks.CONTINUATION
        assert not case.question
        assert writer.text(case.context + case.answer) in whole


def test_without_a_chat_template(small: EvalSettings) -> None:
    writer = Writer(WordTokenizer(chat_template=None), texts.sentences(None))
    case = tasks.cases("needle-noise", 512, small, writer)[0]
    assert writer.text(case.context).startswith("Some special")
    assert "<assistant>" not in writer.text(case.question)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.integers(1, 120),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 20)), max_size=4),
)
def test_haystacks(pieces: list[int], room: int, hidden: list[tuple[float, int]]) -> None:
    needles = [(depth, [100 + i] * count) for i, (depth, count) in enumerate(hidden)]
    filler = itertools.cycle([[i + 1000 * (place == 0) for place in range(n)] for i, n in enumerate(pieces)])
    if sum(count for _, count in hidden) >= room:
        with pytest.raises(SettingsError, match="raise --lengths"):
            haystack(filler, room, needles, "tests")
        return
    found = haystack(filler, room, needles, "tests")
    assert len(found) == room
    for i, (_, count) in enumerate(hidden):
        if 100 + i in found:
            first = found.index(100 + i)
            assert found[first : first + count] == [100 + i] * count, "needles are whole"


@given(st.integers(0, 29), st.integers(0, 99))
def test_depths_are_in_their_strata(index: int, seed: int) -> None:
    depth = depth_of(index, 30, random.Random(seed))
    assert 0.03 * index <= depth <= 0.03 * (index + 1) + 1e-12


def test_text_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"This is paragraph {i}.\nIt goes on! And on." for i in range(20)), encoding="utf-8")
    found = texts.sentences(path)
    assert found[:3] == ["This is paragraph 0.", "It goes on!", "And on."]
    path.write_text("Too short.", encoding="utf-8")
    with pytest.raises(SettingsError, match="has 1 sentences, needs at least 20"):
        texts.sentences(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="UTF-8"):
        texts.sentences(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        texts.sentences(tmp_path / "missing.txt")
