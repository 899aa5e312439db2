"""Contexts from conversations: what they are made of, who takes part, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nitro.errors import SettingsError
from nitro.eval import app, tasks, texts, transcripts
from nitro.eval.case import Writer
from nitro.eval.settings import CHUNK, EvalSettings

from .conftest import CONVERSATIONS, WordTokenizer
from .test_app import asked

SETTINGS = EvalSettings(tasks=("transcripts",), contexts=8)


def test_a_turn_follows_what_was_said_before_it(writer: Writer) -> None:
    turns = [
        (writer.chat(messages[:at]), messages[at]["content"])
        for messages in CONVERSATIONS
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for case in tasks.cases("transcripts", 512, SETTINGS, writer):
        before, answer = writer.text(case.context + case.question), writer.text(case.answer)
        assert any(known.endswith(before) and said.startswith(answer) for known, said in turns)
        assert before.endswith("<assistant>")
        assert (len(case.question), len(case.answer)) == (transcripts.QUESTION, transcripts.ANSWER)


def test_each_conversation_takes_part_before_one_does_again(writer: Writer) -> None:
    found = transcripts.contexts(writer, CONVERSATIONS, 496, 10, "seed")
    texts_ = [writer.text(context + question) for context, question, _ in found]
    by = [[index for index, known in enumerate(CONVERSATIONS) if text in writer.chat(known)] for text in texts_]
    assert sorted(by[:4]) == [[0], [1], [2], [3]]
    assert sorted(by) == [[0], *[[1]] * 2, *[[2]] * 3, *[[3]] * 4]
    assert len(set(texts_)) == 10


def test_too_few_turns_are_refused(writer: Writer) -> None:
    with pytest.raises(
        SettingsError, match=r"10 assistant's turns of at least 64 tokens behind at least 528 others, 30"
    ):
        tasks.cases("transcripts", 512, replace(SETTINGS, contexts=30), writer)
    short = [[{"role": "user", "content": "word1 " * 600}, {"role": "assistant", "content": "word2"}]]
    with pytest.raises(SettingsError, match="transcripts have 0 assistant's turns"):
        transcripts.contexts(writer, short, 496, 1, "seed")


def test_without_a_chat_template() -> None:
    writer = Writer(WordTokenizer(chat_template=None), texts.sentences(None), CONVERSATIONS)
    case = tasks.cases("transcripts", 512, SETTINGS, writer)[0]
    assert writer.text(case.question).endswith("assistant: ")
    assert len(case.context) == 512 - CHUNK


def test_lists_lines_and_objects_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello", "name": "Anne"}]
    file = tmp_path / "chats.json"
    for text in (json.dumps([messages, {"messages": messages, "id": 3}]), f"{json.dumps(messages)}\n\n" * 2):
        file.write_text(text, encoding="utf-8")
        assert transcripts.load(file) == [[{"role": "user", "content": "Hello"}]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read: .*: give a JSON list of conversations, or JSON lines"),
        ("[]", "must be a list of conversations, and not an empty one"),
        ('{"cases": []}', "must be a list of conversations"),
        ('[[{"role": "user"}]]', "number 0 must have messages, each with role and content, both strings"),
        ('[[], [{"role": "user", "content": ["parts"]}]]', "number 1 must have messages"),
        ('["Hello"]', "number 0 must have messages"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "chats.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        transcripts.load(file)


def test_a_missing_file_is_reported_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the task transcripts needs a file of conversations: give --transcripts"):
        app.run(asked(tmp_path / "out", settings=SETTINGS), Console())
    with pytest.raises(SettingsError, match=r"none\.json cannot be read"):
        app.run(asked(tmp_path / "out", settings=SETTINGS, transcripts=tmp_path / "none.json"), Console())
    assert not (tmp_path / "out").exists()
