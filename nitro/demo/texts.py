"""The demo's prompts: passages of public-domain novels, each with a question about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest

from nitro.errors import SettingsError

NOVELS = {
    "pride_and_prejudice": "Pride and Prejudice (1813)",
    "sense_and_sensibility": "Sense and Sensibility (1811)",
    "emma": "Emma (1815)",
    "persuasion": "Persuasion (1817)",
    "mansfield_park": "Mansfield Park (1814)",
    "northanger_abbey": "Northanger Abbey (1817)",
}
QUESTIONS = (
    "Who are the people in this passage, and what do they think of each other?",
    "Retell what happens in this passage in plain modern English, and explain why it matters.",
    "What does the narrator really think of the people described here? Explain how you can tell.",
    "Write a letter in which someone in this passage tells a friend about these events.",
    "Which of the people in this passage would be the best friend to have, and why?",
    "Continue the story from where the passage ends.",
    "What do money and rank mean to the people in this passage? Give examples.",
    "Turn this passage into a scene of a play, with stage directions.",
)
# About 420 tokens of English prose; paragraphs are kept whole, so passages vary by a few hundred characters.
PASSAGE_CHARACTERS = 1750


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        source: the novel that the passage is from.
        question: what is asked about it.
        text: the user's turn of the conversation, passage and question; the chat template is applied later.
    """

    source: str
    question: str
    text: str


def passages(novel: str) -> list[str]:
    """Return the novel's text cut into passages of whole sentences, without chapter headings and italics marks."""
    raw = (files("nitro.demo") / "data" / f"{novel}.txt").read_text(encoding="ascii").replace("_", "")
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", raw)]
    sentences = [
        sentence
        for paragraph in paragraphs
        if not re.fullmatch(r"chapter \w+", paragraph, re.IGNORECASE)
        for sentence in re.split(r'(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=["A-Z])', paragraph)
    ]
    found: list[str] = []
    current = ""
    for sentence in sentences:
        current = f"{current} {sentence}".strip()
        # Paragraphs may end with a colon, before a letter for instance: no place to stop.
        if len(current) >= PASSAGE_CHARACTERS and current.endswith((".", "!", "?", '"')):
            found.append(current)
            current = ""
    return found  # the remainder is shorter than a passage, and dropped


def prompts(count: int) -> list[Prompt]:
    """Return ``count`` prompts with distinct passages, taken from the novels in turn.

    Raises:
        SettingsError: there are fewer passages than ``count``.
    """
    by_novel = [[(NOVELS[novel], passage) for passage in passages(novel)] for novel in NOVELS]
    turns = [item for turn in zip_longest(*by_novel) for item in turn if item is not None]
    if count > len(turns):
        raise SettingsError(f"requests={count} is above {len(turns)}, the passages there are: ask for fewer requests")
    made = []
    for index, (source, passage) in enumerate(turns[:count]):
        # The passages come from the novels in turn; stepping on once a turn gives each novel all kinds of questions.
        question = QUESTIONS[(index + index // len(NOVELS)) % len(QUESTIONS)]
        text = (
            f"Here is a passage from {source} by Jane Austen:\n\n{passage}\n\n{question} "
            "Answer in detail, in several paragraphs."
        )
        made.append(Prompt(source, question, text))
    return made
