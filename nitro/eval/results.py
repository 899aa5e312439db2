"""The figures of an evaluation, from its cells' rows, with intervals of 95 %."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nitro.eval.plan import Cell
from nitro.eval.settings import GO_ON
from nitro.eval.store import Row

Z = statistics.NormalDist().inv_cdf(0.975)
STRATA = 3
"""Parts of a context by which exactness is told apart."""


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    value: float
    low: float
    high: float


def wilson(hits: int, count: int) -> Interval:
    """Return a share with Wilson's score interval (J. Am. Stat. Assoc. 22, 1927), good for small counts, too.

    Raises:
        ValueError: there are no trials, or more hits than trials.
    """
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} hits of {count} have no share")
    share, z2 = hits / count, Z * Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    # Rounding must not leave the share itself outside.
    return Interval(share, max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0))


def mean(values: Sequence[float]) -> Interval:
    """Return a mean with its normal interval; of one value, there is none."""
    centre = statistics.fmean(values)
    half = Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Interval(centre, centre - half, centre + half)


def summary(cell: Cell, rows: Sequence[Row], full: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of one cell.

    Args:
        cell: which.
        rows: its rows.
        full: those of the full cache, of the same cases in the same order.
    """
    found: dict[str, Any] = {
        "task": cell.task,
        "length": cell.length,
        "policy": cell.label,
        "budget": cell.budget,
        "cases": len(rows),
        "nll": mean([row["nll"] for row in rows])._asdict(),
        # Of the same cases: what contexts have in common cancels.
        "nll_over_full": mean([row["nll"] - of["nll"] for row, of in zip(rows, full, strict=True)])._asdict(),
    }
    if cell.task == "stories":
        for key in ("unique", "repeated"):
            found[key] = mean([row[key] for row in rows])._asdict()
        return found
    if "kl" in rows[0]:
        found["kl_at_least"] = mean([row["kl"] for row in rows])._asdict()
    if cell.task not in GO_ON:
        found["exact"] = wilson(sum(row["exact"] for row in rows), len(rows))._asdict()
        found["exact_by_depth"] = by_depth(rows)
    return found


def by_depth(rows: Sequence[Row]) -> list[dict[str, float]] | None:
    """Return exactness in the parts of the context, from its beginning to its end; None where answers have no place."""
    strata: list[list[bool]] = [[] for _ in range(STRATA)]
    for row in rows:
        if row["depth"] is None:
            return None
        strata[min(int(row["depth"] / 0.9 * STRATA), STRATA - 1)].append(row["exact"])
    return [{"cases": len(hits), **wilson(sum(hits), len(hits))._asdict()} for hits in strata if hits]


def measure(found: Mapping[str, Any]) -> Interval:
    """Return the figure by which a cell is drawn: exactness, or the NLL over that of the full cache."""
    return Interval(**found["exact"] if "exact" in found else found["nll_over_full"])
