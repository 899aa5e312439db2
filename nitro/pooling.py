"""Pooling: what becomes of the tokens that an eviction takes away. docs/pooling.md has what it does to answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Merging:
    """Values of evicted tokens are folded into the survivors with the nearest keys; see ``nitro.kernels.pool``.

    Attributes:
        least: cosine from which on a token is folded; below it is dropped.
        own: what a survivor that stands for itself alone weighs beside a folded token.
        most: what the mass of a survivor may grow to.
    """

    least: float = 0.8
    own: float = 8.0
    most: int = 2048


POOLING: dict[str, Merging | None] = {"none": None, "merge": Merging()}
"""By the names that users write."""
