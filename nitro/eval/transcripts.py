"""Conversations of the user's: what an assistant said next, after a long context that nothing was made up for."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nitro.errors import SettingsError
from nitro.eval.case import Writer

Transcript: TypeAlias = "list[dict[str, str]]"
"""Messages with ``role`` and ``content``, in order."""
QUESTION, ANSWER = 32, 64
"""Tokens before an assistant's turn that are read after the eviction; tokens of the turn that are scored."""
_CHARACTERS = 12  # of a token, at most in the mean: no more of a conversation is tokenised than that


def load(file: Path) -> list[Transcript]:
    """Return the conversations in a file: a JSON list or JSON lines, each of messages or of objects with ``messages``.

    Raises:
        SettingsError: the file cannot be read, or holds something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"transcripts {file} cannot be read: {error}: give a JSON list of conversations, or JSON lines"
        ) from error
    if not isinstance(found, list) or not found:
        raise SettingsError(f"transcripts {file}: must be a list of conversations, and not an empty one")
    return [_messages(one, f"transcripts {file}: number {number}") for number, one in enumerate(found)]


def _messages(one: Any, where: str) -> Transcript:
    messages = one.get("messages") if isinstance(one, dict) else one
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise SettingsError(f"{where} must have messages, each with role and content, both strings")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def contexts(
    w: Writer, transcripts: Sequence[Transcript], length: int, count: int, seed: str
) -> list[tuple[list[int], list[int], list[int]]]:
    """Return contexts of ``length`` tokens, each with the tokens between it and an assistant's turn, and that turn's.

    Conversations come in turn, so that as many as there are take part before one has a second context.

    Raises:
        SettingsError: there are not as many turns behind so many tokens.
    """
    found = list(itertools.islice(_turns(w, transcripts, length, random.Random(seed)), count))
    if len(found) < count:
        raise SettingsError(
            f"transcripts have {len(found)} assistant's turns of at least {ANSWER} tokens behind at least "
            f"{length + QUESTION} others, {count} are needed: give more conversations, or lower --contexts or --lengths"
        )
    return found


def _turns(
    w: Writer, transcripts: Sequence[Transcript], length: int, draw: random.Random
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield them: one of each conversation, then another one of each that has more."""
    left = []
    for messages in draw.sample(transcripts, len(transcripts)):
        turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
        left.append((messages, draw.sample(turns, len(turns))))
    need = length + QUESTION
    while left:
        for messages, turns in left:
            while turns:
                at = turns.pop()
                answer = w.fresh_ids(messages[at]["content"][: _CHARACTERS * ANSWER])[:ANSWER]
                before = w.fresh_ids(w.chat(messages[:at])[-_CHARACTERS * need :])[-need:]
                if len(answer) == ANSWER and len(before) == need:
                    yield before[:length], before[length:], answer
                    break
        left = [(messages, turns) for messages, turns in left if turns]
