"""Base against head: which figures got worse by more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gates import METRICS, Results
from rich import box
from rich.table import Table

MOST_NOISE = 2.0
"""So many times its stated noise is the most that a metric is granted, however much base differs from itself."""
FAILURES = ("regression", "missing")
_COLOURS = {"regression": "red", "missing": "red", "improvement": "green", "same": "dim", "new": "yellow"}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric.

    Attributes:
        base: its median in base; None: not measured there.
        head: likewise.
        change: of the medians, as a share of base; positive is better.
        bound: what noise may do.
        verdict: regression, improvement, same, missing (in head) or new (in head).
    """

    metric: str
    base: float | None
    head: float | None
    change: float | None
    bound: float
    verdict: str


def compare(base: Results, head: Results) -> list[Row]:
    """Return a row for each metric that either has, in the order of the catalogue."""
    return [
        _row(name, base.metrics.get(name, []), head.metrics.get(name, []))
        for name in METRICS
        if name in base.metrics or name in head.metrics
    ]


def _row(name: str, base: Sequence[float], head: Sequence[float]) -> Row:
    metric = METRICS[name]
    before = statistics.median(base) if base else None
    after = statistics.median(head) if head else None
    if before is None or after is None:
        return Row(name, before, after, None, metric.noise, "new" if before is None else "missing")
    # What base shows of noise in this very run counts, within reason: a machine that jumps about hides nothing large.
    shown = (max(base) - min(base)) / 2 / before if before else 0.0
    bound = min(max(metric.noise, shown), MOST_NOISE * metric.noise)
    gain = after - before if metric.better == "higher" else before - after
    change = gain / abs(before) if before else 0.0
    verdict = "same" if abs(change) <= bound else "improvement" if change > 0 else "regression"
    if change != change:
        verdict = "missing"
    return Row(name, before, after, change, bound, verdict)


def table(rows: Sequence[Row], card: str) -> Table:
    """Return the table that ``ci/compare_perf.py`` prints."""
    made = Table(title=f"base and head on {card}, medians", box=box.SIMPLE_HEAD)
    for name in ("metric", "better", "base", "head", "change for the better", "noise", "verdict"):
        made.add_column(name, justify="left" if name in ("metric", "better", "verdict") else "right")
    for row in rows:
        unit = METRICS[row.metric].unit
        base, head = ("" if v is None else f"{v:,.4g} {unit}".rstrip() for v in (row.base, row.head))
        change = "" if row.change is None else f"{row.change:+.1%}"
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        made.add_row(row.metric, METRICS[row.metric].better, base, head, change, f"{row.bound:.1%}", verdict)
    return made
