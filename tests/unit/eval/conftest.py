"""A tokenizer of words, and settings of a small grid."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from nitro.eval import texts
from nitro.eval.case import Writer
from nitro.eval.settings import EvalSettings


@dataclass
class WordTokenizer:
    """A token is a word with the space before it, a digit, or another character."""

    chat_template: str | None = "yes"
    words: list[str] = field(default_factory=list)

    def __call__(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        ids = []
        for word in re.findall(r" ?[A-Za-z]+|\d|[^A-Za-z\d]", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return SimpleNamespace(input_ids=ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.words[i] for i in ids)


def _conversation(turns: int) -> list[dict[str, str]]:
    """Return as many assistant's turns, each message of some 700 tokens that occur nowhere else in that order."""
    roles = ["system", *("user", "assistant") * turns]
    return [
        {
            "role": role,
            "content": " ".join(
                f"word{n} and" for n in range(10_000 * turns + 200 * at, 10_000 * turns + 200 * at + 140)
            ),
        }
        for at, role in enumerate(roles)
    ]


CONVERSATIONS = [_conversation(turns) for turns in (1, 2, 3, 4)]


@pytest.fixture
def writer() -> Writer:
    return Writer(WordTokenizer(), texts.sentences(None), CONVERSATIONS)


@pytest.fixture
def small() -> EvalSettings:
    return EvalSettings(tasks=("needle-noise", "stories"), policies=("kvdiff",), budgets=(0.5, 0.25), contexts=6)
