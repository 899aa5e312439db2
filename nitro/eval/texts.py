"""What contexts are made of: noise, sentences of public-domain novels or of the user's file, words, labels."""

from __future__ import annotations

import re
from pathlib import Path

from nitro.demo import texts
from nitro.errors import SettingsError

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""RULER's noise (https://arxiv.org/abs/2404.06654)."""
CATEGORIES = {
    kind: tuple(words.split())
    for kind, words in {
        "animals": "horse rabbit eagle salmon spider donkey turtle monkey pigeon beetle lizard panther",
        "foods": "bread cheese butter carrot potato tomato pepper walnut cherry pumpkin biscuit sausage",
        "tools": "hammer shovel ladder chisel needle bucket scissors pliers wrench broom pencil compass",
        "places": "village harbour station library castle market theatre hospital airport prison museum temple",
    }.items()
}
CODES, ADJECTIVES, NOUNS, FLOWERS, PEOPLE = (
    tuple(words.split())
    for words in (
        "blick zorp fenna wuggle tarn mibble quosh dax",
        "quiet golden hidden frozen ancient wooden silver broken gentle crimson hollow narrow distant polished velvet "
        "copper stormy painted rusty marble",
        "lantern river window garden mirror bridge candle anchor feather orchard tower engine meadow saddle compass "
        "basket ribbon kettle valley curtain",
        "lavender tulip daisy orchid violet jasmine poppy lily marigold magnolia peony thistle",
        "miller sailor baker painter tailor shepherd captain gardener blacksmith widow soldier merchant",
    )
)
_FEWEST_SENTENCES = 20


def sentences(file: Path | None) -> list[str]:
    """Return the sentences of a text file, or those of the novels that come with Nitro.

    Raises:
        SettingsError: the file cannot be read, or is too short.
    """
    if file is None:
        passages = [passage for novel in texts.NOVELS for passage in texts.passages(novel)]
    else:
        try:
            passages = [" ".join(part.split()) for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"text {file} cannot be read: {error}: give a text file in UTF-8") from error
    found = [one for passage in passages for one in re.split(r'(?<=[.!?]) (?=["A-Z])', passage) if one]
    if len(found) < _FEWEST_SENTENCES:
        raise SettingsError(
            f"text {file} has {len(found)} sentences, needs at least {_FEWEST_SENTENCES}: give a longer one"
        )
    return found
