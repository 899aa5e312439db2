"""One context with a question and its answer, as token ids; and how they are put together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nitro.errors import SettingsError

_MARK = "@@@"


@dataclass(frozen=True, slots=True)
class Case:
    """A request.

    Attributes:
        name: unique; the request's id, on which the draws of the random policy depend.
        context: what is evicted before the question is read.
        question: what follows; may be empty.
        answer: tokens that are scored after it; empty where the model shall generate.
        depth: where in the context the answer stands, 0 to 1; None: everywhere or nowhere.
    """

    name: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float | None = None


class Writer:
    """Text to tokens, in pieces: contexts have an exact length."""

    def __init__(
        self, tokenizer: Any, sentences: Sequence[str], transcripts: Sequence[list[dict[str, str]]] = ()
    ) -> None:
        """Begin.

        Args:
            tokenizer: of transformers.
            sentences: of real text.
            transcripts: conversations, see `nitro.eval.transcripts`.
        """
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.sentences, self.transcripts = sentences, transcripts
        self.head, self.tail = "", "\n"
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": _MARK}]
            whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            self.head, _, self.tail = whole.partition(_MARK)

    def ids(self, text: str) -> list[int]:
        """Return a piece's tokens, without any that begin or end a text."""
        if text not in self._known:
            self._known[text] = self.fresh_ids(text)
        return self._known[text]

    def fresh_ids(self, text: str) -> list[int]:
        """Return a text's tokens like ``ids``, without keeping them for the next time."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return a conversation as the model knows them, up to where an assistant's turn begins.

        Raises:
            SettingsError: the model's template refuses it.
        """
        if getattr(self._tokenizer, "chat_template", None):
            from jinja2 import TemplateError

            try:
                return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            except TemplateError as error:
                raise SettingsError(
                    f"the model's chat template refuses a conversation: {error}: leave it out"
                ) from error
        return "".join(f"{message['role']}: {message['content']}\n\n" for message in messages) + "assistant: "

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return decoded

    def prose(self, draw: random.Random) -> Iterator[list[int]]:
        """Yield sentences of the real text, from a random one on, and again from the first."""
        start = draw.randrange(len(self.sentences))
        for index in itertools.count(start):
            yield self.ids(" " + self.sentences[index % len(self.sentences)])


def haystack(
    pieces: Iterable[list[int]], room: int, needles: Sequence[tuple[float, list[int]]], what: str
) -> list[int]:
    """Return ``room`` tokens: pieces, the last of which is cut, and needles between pieces.

    Args:
        pieces: what the needles are hidden in; as many as are asked for.
        room: tokens.
        needles: each with its depth, 0 to 1.
        what: this is, for the message.

    Raises:
        SettingsError: there is no room for the needles.
    """
    left = room - sum(len(needle) for _, needle in needles)
    if left < 1:
        raise SettingsError(f"a context of {what} has no room for what is hidden in it: raise --lengths")
    filler: list[int] = []
    ends = [0]
    for piece in pieces:
        filler += piece
        if len(filler) >= left:
            break
        ends.append(len(filler))
    del filler[left:]
    for depth, needle in sorted(needles, reverse=True):
        at = min(ends, key=lambda end: abs(end - depth * left))
        filler[at:at] = needle
    return filler


def depth_of(index: int, contexts: int, draw: random.Random) -> float:
    """Return a depth: contexts have one stratum each of the first nine tenths; the end is kept anyway."""
    return 0.9 * (index + draw.random()) / contexts
