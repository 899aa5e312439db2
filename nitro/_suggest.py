"""The nearest right name for a wrong one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be, or None if nothing is close.

    Case and the choice between ``-`` and ``_`` do not count as differences.
    """
    folded = {_fold(candidate): candidate for candidate in known}
    matches = difflib.get_close_matches(_fold(name), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'budget'?"`` for an error message, or ``""`` if nothing is close."""
    guess = nearest(name, known)
    return f", did you mean {guess!r}?" if guess is not None else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
