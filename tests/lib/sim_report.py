"""Tables of a simulated tournament, with the figures and intervals of `nitro eval`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sim_store import Row, key_of

from nitro.errors import SettingsError
from nitro.eval.plan import Cell
from nitro.eval.results import Interval, mean, summary, wilson
from nitro.eval.settings import FULL, GO_ON, PolicyChoice

Place = tuple[str, int]
"""Task and length."""
Cells = Mapping[tuple[str, int, str, float], Sequence[Row]]
TITLES = {
    "nitro": "Nitro's policies",
    "simulated": "simulated only, equal counts",
    "kvpress": "kvpress 0.5.5",
    "shared": "with tokens shared by all heads",
    "unequal": "unequal counts",
}


def cells_of(rows: Sequence[Row]) -> Cells:
    """Return the rows by task, length, candidate and budget, each in the order of the cases."""
    found: dict[tuple[str, int, str, float], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["case"].rsplit("-", 1)[1])):
        found[row["task"], row["length"], row["candidate"], row["budget"]].append(row)
    return found


def figures(cells: Cells, place: Place, candidate: str, budget: float) -> dict[str, Any]:
    """Return `nitro.eval.results.summary` of one cell."""
    rows = cells[*place, candidate, budget]
    full = {row["case"]: row for row in cells[*place, FULL, 1.0]}
    policy = None if candidate == FULL else PolicyChoice(candidate, candidate, {})
    return summary(Cell(*place, policy, budget), rows, [full[row["case"]] for row in rows])


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield Markdown: for each length and budget a table of all candidates, with the tasks in columns.

    A cell is empty as long as it lacks cases that the full cache has.
    """
    cells = cells_of(rows)
    kinds = _kinds(rows)
    for length in sorted({length for _, length, *_ in cells}):
        tasks = list(dict.fromkeys(task for task, of, *_ in cells if of == length))
        line = " | ".join(_text(figures(cells, (task, length), FULL, 1.0)) for task in tasks)
        for budget in sorted({budget for *_, of, budget in cells if of != FULL}, reverse=True):
            lines = [
                f"| {length:,} tokens, {budget:.1%} kept | {' | '.join(tasks)} |",
                "| --- " * (len(tasks) + 1) + "|",
                f"| full cache | {line} |",
            ]
            for kind, title in TITLES.items():
                heading = f"| *{title}* |" + " |" * len(tasks)
                for name in (name for name in kinds if kinds[name] == kind):
                    found = [
                        _text(figures(cells, (task, length), name, budget))
                        if pooled(cells, [(task, length)], name, budget)
                        else ""
                        for task in tasks
                    ]
                    if any(found):
                        lines += [] if heading in lines else [heading]
                        lines.append(f"| {name} | {' | '.join(found)} |")
            if len(lines) > 3:
                yield "\n".join(lines)


def _text(found: Mapping[str, Any]) -> str:
    if "exact" in found:
        exact = found["exact"]
        return f"{exact['value']:.2f} [{exact['low']:.2f}, {exact['high']:.2f}] · {found['nll']['value']:.2f}"
    if found["policy"] == FULL:
        return f"NLL {found['nll']['value']:.3f}"
    over = found["nll_over_full"]
    return f"{over['value']:+.3f} [{over['low']:+.3f}, {over['high']:+.3f}]"


def pooled(cells: Cells, places: Sequence[Place], candidate: str, budget: float) -> tuple[Interval, float] | None:
    """Return exactness and mean NLL over the cases of several tasks; None where a cell is missing."""
    rows = [row for place in places for row in cells.get((*place, candidate, budget), ())]
    wanted = sum(len(cells[*place, FULL, 1.0]) for place in places)
    if len(rows) < wanted:
        return None
    return wilson(sum(row["exact"] for row in rows), len(rows)), mean([row["nll"] for row in rows]).value


def difference(
    cells: Cells, places: Sequence[Place], one: str, other: str, budget: float, figure: str = "exact"
) -> Interval:
    """Return by how much one candidate is above another on the same cases, with a normal interval.

    Args:
        cells: of `cells_of`.
        places: tasks and lengths, whose cases are put together.
        one: a candidate.
        other: another.
        budget: of both.
        figure: ``exact`` or ``nll``.
    """
    found = []
    for place in places:
        theirs = {row["case"]: row for row in cells[*place, other, budget]}
        found += [float(row[figure]) - float(theirs[row["case"]][figure]) for row in cells[*place, one, budget]]
    return mean(found)


def standings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield Markdown: all candidates over all tasks with an exactness, best first in the mean over budgets.

    In parentheses the hits of each task; candidates that lack a task at some budget are left out of that column.
    """
    cells = cells_of(rows)
    kinds = _kinds(rows)
    budgets = sorted({budget for *_, of, budget in cells if of != FULL}, reverse=True)
    for length in sorted({length for _, length, *_ in cells}):
        places = _places(cells, length)
        if not places:
            continue
        standing = {name: [pooled(cells, places, name, budget) for budget in budgets] for name in kinds}
        standing = {name: each for name, each in standing.items() if any(each)}
        if not standing:
            continue
        count = sum(len(cells[*place, FULL, 1.0]) for place in places)
        lines = [
            f"| {length:,} tokens, {count} cases ({', '.join(task for task, _ in places)}) | "
            + " | ".join(f"{budget:.1%}" for budget in budgets)
            + " |",
            "| --- " * (len(budgets) + 1) + "|",
        ]
        mean_of = {name: [one[0].value for one in each if one] for name, each in standing.items()}
        for name in sorted(standing, key=lambda name: (-len(mean_of[name]), -sum(mean_of[name]))):
            each = []
            for budget, one in zip(budgets, standing[name], strict=True):
                hits = [sum(row["exact"] for row in cells.get((*place, name, budget), ())) for place in places]
                each.append(_standing(one, hits) if one else "")
            lines.append(f"| {name} ({kinds[name]}) | {' | '.join(each)} |")
        yield "\n".join(lines)


def _standing(one: tuple[Interval, float], hits: Sequence[int]) -> str:
    exact, nll = one
    return f"{exact.value:.2f} [{exact.low:.2f}, {exact.high:.2f}] · {nll:.2f} ({', '.join(map(str, hits))})"


def _kinds(rows: Sequence[Row]) -> dict[str, str]:
    return {row["candidate"]: row["kind"] for row in rows if row["kind"] in TITLES}


def _places(cells: Cells, length: int) -> list[Place]:
    """Return the tasks of a length that have an exactness, in the order of the rows."""
    return list(dict.fromkeys((task, of) for task, of, *_ in cells if of == length and task not in GO_ON))


def versus(rows: Sequence[Row], other: str) -> Iterator[str]:
    """Yield Markdown: for each length, how much more often exact candidates are than one of them, on the same cases."""
    cells = cells_of(rows)
    for length in sorted({length for _, length, *_ in cells}):
        places = _places(cells, length)
        budgets = sorted({budget for *_, of, budget in cells if of != FULL}, reverse=True)
        budgets = [budget for budget in budgets if places and pooled(cells, places, other, budget)]
        if not budgets:
            continue
        lines = [
            f"| exact, above {other}; {length:,} tokens | " + " | ".join(f"{budget:.1%}" for budget in budgets) + " |",
            "| --- " * (len(budgets) + 1) + "|",
        ]
        for name in (name for name in _kinds(rows) if name != other):
            found = []
            for budget in budgets:
                one = difference(cells, places, name, other, budget) if pooled(cells, places, name, budget) else None
                found.append(f"{one.value:+.2f} [{one.low:+.2f}, {one.high:+.2f}]" if one else "")
            if any(found):
                lines.append(f"| {name} | {' | '.join(found)} |")
        yield "\n".join(lines)


class Agreement(NamedTuple):
    """How a cell of the simulation compares with the same cell of `nitro eval`.

    Attributes:
        cases: that both have.
        same: of them, those that are exact in both or in neither.
        apart: largest difference of an answer's NLL.
    """

    cases: int
    same: int
    apart: float


def agreement(rows: Sequence[Row], served: Sequence[Mapping[str, Any]]) -> dict[str, Agreement]:
    """Compare case by case; cells that only one side has are left out.

    Args:
        rows: of the simulation.
        served: lines of the ``results.jsonl`` that `nitro eval` writes.

    Raises:
        SettingsError: they have no case in common.
    """
    theirs = {(row["task"], row["length"], row["case"], row["policy"], row["budget"]): row for row in served}
    pairs: dict[str, list[tuple[Row, Mapping[str, Any]]]] = defaultdict(list)
    for row in rows:
        if other := theirs.get(key_of(row)):
            pairs[f"{row['task']} {row['length']}, {row['candidate']} at {row['budget']:.3g}"].append((row, other))
    if not pairs:
        raise SettingsError("no case is in both: give the same tasks, lengths, policies and budgets to both")
    return {
        cell: Agreement(
            len(found),
            sum(one["exact"] == other["exact"] for one, other in found),
            max(abs(one["nll"] - other["nll"]) for one, other in found),
        )
        for cell, found in pairs.items()
    }
