"""The tasks: formats that small models can do with a full cache, so that evictions show."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

from nitro.errors import SettingsError
from nitro.eval import texts, transcripts
from nitro.eval.case import Case, Writer, depth_of, haystack
from nitro.eval.settings import CHUNK, EvalSettings

CONTINUATION = 256
"""Tokens of real text that ``perplexity`` scores behind a context."""
Make = Callable[[Writer, random.Random, int, int, int], tuple[list[int], list[int], list[int], float | None]]
"""From length, index and number of contexts to context, question, answer and depth."""


def needle(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int, *, prose: bool, keys: int
) -> tuple[list[int], list[int], list[int], float]:
    """Numbers hidden in noise or in prose, one of which is asked for: RULER's needle in a haystack."""
    names = draw.sample([f"{a}-{n}" for a in texts.ADJECTIVES for n in texts.NOUNS], keys)
    values = [str(draw.randrange(1_000_000, 10_000_000)) for _ in names]
    depths = [depth_of(index, contexts, draw), *(0.9 * draw.random() for _ in names[1:])]
    needles = [
        (depth, w.ids(f" One of the special magic numbers for {name} is: {value}."))
        for depth, name, value in zip(depths, names, values, strict=True)
    ]
    start = w.ids(
        w.head + "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about the numbers afterwards.\n"
    )
    pieces = w.prose(draw) if prose else itertools.cycle(w.ids(" " + sentence) for sentence in texts.NOISE)
    context = start + haystack(pieces, length - len(start), needles, "needles")
    question = (
        f"\nWhat is the special magic number for {names[0]} mentioned in the provided text?{w.tail}"
        f"The special magic number for {names[0]} mentioned in the provided text is:"
    )
    return context, w.ids(question), w.ids(" " + values[0]), depths[0]


def word(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int
) -> tuple[list[int], list[int], list[int], float]:
    """An ordinary word hidden in prose: unlike digits, nothing about it stands out."""
    depth, person, flower = depth_of(index, contexts, draw), draw.choice(texts.PEOPLE), draw.choice(texts.FLOWERS)
    hidden = w.ids(f" The favourite flower of the old {person} was the {flower}.")
    start = w.ids(w.head + "Read the following text. I will ask you about it afterwards.\n")
    context = start + haystack(w.prose(draw), length - len(start), [(depth, hidden)], "prose")
    question = (
        f"\nWhat was the favourite flower of the old {person} in the text?{w.tail}"
        f"The favourite flower of the old {person} was the"
    )
    return context, w.ids(question), w.ids(f" {flower}"), depth


def dictionary(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int
) -> tuple[list[int], list[int], list[int], float]:
    """A table of keys and values, one of which is looked up, after two that are solved."""
    names = [f"{a} {n}" for a in texts.ADJECTIVES for n in texts.NOUNS]
    draw.shuffle(names)
    rows = [(name, str(draw.randrange(1000, 10_000))) for name in names]
    lines = [w.ids(f"\n{name}: {value}") for name, value in rows]
    context, shown = _filled(w, lines, length)
    if shown < 3:
        raise SettingsError(f"a context of {length} tokens has no room for three lines: raise --lengths")
    depth = depth_of(index, contexts, draw)
    asked = min(int(depth * shown), shown - 1)
    others = draw.sample([i for i in range(shown) if i != asked], 2)
    solved = "".join(f"\n{rows[i][0]}: {rows[i][1]}" for i in others)
    question = f"\n\nAnswers looked up in the table above:{solved}\n{rows[asked][0]}:"
    return context, w.ids(question), w.ids(" " + rows[asked][1]), depth


def labels(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int
) -> tuple[list[int], list[int], list[int], None]:
    """Many examples of words with an arbitrary code for their kind, then a word that was not among them."""
    codes = draw.sample(texts.CODES, len(texts.CATEGORIES))
    code_of = dict(zip(texts.CATEGORIES, codes, strict=True))
    kind = draw.choice(list(texts.CATEGORIES))
    asked = draw.choice(texts.CATEGORIES[kind])
    known = [(one, code_of[k]) for k, members in texts.CATEGORIES.items() for one in members if one != asked]

    def examples() -> Iterator[list[int]]:
        while True:
            draw.shuffle(known)
            for one, code in known:
                yield w.ids(f"\nword: {one} -> code: {code}")

    context, _ = _filled(w, examples(), length)
    return context, w.ids(f"\nword: {asked} -> code:"), w.ids(f" {code_of[kind]}"), None


def variables(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int
) -> tuple[list[int], list[int], list[int], float]:
    """RULER's variable tracking with one hop, after a worked example."""
    names = ["".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(4)]
    first, second = (str(draw.randrange(10_000, 100_000)) for _ in range(2))
    ask = (
        "\nQuestion: Find all variables that are assigned the value {} in the text above. Answer: According to the "
        "chain of variable assignment in the text above, 2 variables are assigned this value, they are:"
    )
    noise = itertools.cycle(w.ids(" " + sentence) for sentence in texts.NOISE)

    def chain(one: str, other: str, value: str, depth: float) -> list[tuple[float, list[int]]]:
        return [
            (depth, w.ids(f" VAR {one} = {value}.")),
            (min(depth + 0.1, 1.0), w.ids(f" VAR {other} = VAR {one}.")),
        ]

    start = w.ids("Memorize and track the chain of variable assignment hidden in the following text.\n")
    example = haystack(noise, 100, chain(names[0], names[1], first, 0.3), "variables")
    example = [*example, *w.ids(ask.format(first) + f" {names[0]} {names[1]}\n\n"), *start]
    depth = depth_of(index, contexts, draw)
    room = length - len(start) - len(example)
    context = [*start, *example, *haystack(noise, room, chain(names[2], names[3], second, depth), "variables")]
    return context, w.ids(ask.format(second)), w.ids(f" {names[2]} {names[3]}"), depth


def perplexity(
    w: Writer, draw: random.Random, length: int, index: int, contexts: int
) -> tuple[list[int], list[int], list[int], None]:
    """Real text, and how it goes on."""
    tokens = haystack(w.prose(draw), length + CONTINUATION, (), "text")
    return tokens[:length], [], tokens[length:], None


def stories(w: Writer, draw: random.Random, index: int) -> list[int]:
    """Return the prompt of a long answer."""
    person, noun = draw.choice(texts.PEOPLE), draw.choice(texts.NOUNS)
    adjective, place = draw.choice(texts.ADJECTIVES), draw.choice(texts.CATEGORIES["places"])
    asked = f"Tell me a long story about an old {person} who finds a {adjective} {noun} in the {place}."
    return w.ids(w.head + asked + w.tail)


MAKERS: dict[str, Make] = {
    "needle-noise": partial(needle, prose=False, keys=1),
    "needle-text": partial(needle, prose=True, keys=1),
    "needle-keys": partial(needle, prose=True, keys=4),
    "needle-word": word,
    "dictionary": dictionary,
    "labels": labels,
    "variables": variables,
    "perplexity": perplexity,
}


def cases(task: str, length: int, settings: EvalSettings, writer: Writer) -> list[Case]:
    """Return a task's cases; the same for the same settings, whatever else is run.

    Args:
        task: one of ``TASKS``.
        length: tokens of a context; of ``stories`` not looked at.
        settings: seed and number of contexts.
        writer: has the tokenizer and the texts.

    Raises:
        SettingsError: a context is too short for what it has to hold, or there are not enough transcripts.
    """
    if task == "transcripts":
        found = transcripts.contexts(
            writer, writer.transcripts, length - CHUNK, settings.contexts, f"{settings.seed}/{task}/{length}"
        )
        return [
            Case(f"{task}-{length}-{index}", tuple(context), tuple(question), tuple(answer))
            for index, (context, question, answer) in enumerate(found)
        ]
    made = []
    for index in range(settings.contexts):
        draw = random.Random(f"{settings.seed}/{task}/{length}/{index}")
        name = f"{task}-{length}-{index}"
        if task == "stories":
            made.append(Case(name, tuple(stories(writer, draw, index)), (), ()))
            continue
        tokens = length - CHUNK
        context, question, answer, depth = MAKERS[task](writer, draw, tokens, index, settings.contexts)
        assert len(context) == tokens, f"{name} has a context of {len(context)} tokens"
        made.append(Case(name, tuple(context), tuple(question), tuple(answer), depth))
    return made


def _filled(w: Writer, lines: Iterator[list[int]] | list[list[int]], length: int) -> tuple[list[int], int]:
    """Return a context of whole lines, with noise before them up to its exact length, and how many lines it has."""
    body: list[int] = []
    shown = 0
    for line in lines:
        if len(body) + len(line) > length - 8:
            break
        body += line
        shown += 1
    noise = itertools.cycle(w.ids(sentence + " ") for sentence in texts.NOISE)
    return haystack(noise, length - len(body), (), "lines") + body, shown
