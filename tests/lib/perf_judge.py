"""What tests of tests/perf share: the card's targets and baseline, and all verdicts of a session."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from gates import METRICS, Results, Target, Verdict, judge
from rich import box
from rich.table import Table

_MARKS = {True: "[green]passed[/]", False: "[red]FAILED[/]", None: "[yellow]no gate[/]"}


@dataclass(slots=True)
class Judge:
    """Judges figures of one card and remembers them; ``about`` goes with them into files."""

    card: str
    targets: Mapping[str, Target]
    baseline: Results | None
    about: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.card, self.about)

    def verdict(self, name: str, values: Sequence[float]) -> Verdict:
        """Judge the median of a metric's figures, without failing anything."""
        return judge(name, statistics.median(values), self.targets, self.baseline)

    def require(self, figures: Mapping[str, Sequence[float]]) -> None:
        """Fail the test if a figure misses its gate; skip it, with the figures, if none of them has one."""
        found = [self.verdict(name, values) for name, values in figures.items()]
        self.verdicts += found
        self.results.add({name: list(values) for name, values in figures.items()})
        missed = [str(verdict) for verdict in found if verdict.passed is False]
        if missed:
            pytest.fail("; ".join(missed), pytrace=False)
        if all(verdict.passed is None for verdict in found):
            pytest.skip(f"no gate for {self.card}, only reported: {'; '.join(map(str, found))}")

    def table(self) -> Table:
        """Return all verdicts."""
        made = Table(title=f"gates on speed, {self.card}", box=box.SIMPLE_HEAD)
        for name in ("metric", "measured", "gate", "goal", "baseline", ""):
            made.add_column(name, justify="left" if name in ("metric", "") else "right")
        for verdict in self.verdicts:
            target = verdict.target or Target()
            numbers = (verdict.value, target.gate, target.goal, verdict.baseline)
            cells = ["" if number is None else f"{number:,.4g}" for number in numbers]
            unit = METRICS[verdict.metric].unit
            goal = " and its goal" if verdict.goal_reached else ""
            made.add_row(f"{verdict.metric}{f', {unit}' if unit else ''}", *cells, _MARKS[verdict.passed] + goal)
        return made
