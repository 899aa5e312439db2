"""What an evaluation prints: a table for each task, policies in rows, budgets in columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from nitro.eval.settings import FULL

Summaries = Sequence[Mapping[str, Any]]


class TaskTable(NamedTuple):
    """A table, and what stands above and below it."""

    title: str
    table: Table
    caption: str


def tables(found: Summaries) -> Iterator[TaskTable]:
    """Yield a table for each task and length of which more than the full cache is there.

    Args:
        found: what `nitro.eval.results.summary` returns, in the order of the grid.
    """
    for task, length in dict.fromkeys((one["task"], one["length"]) for one in found):
        of = [one for one in found if (one["task"], one["length"]) == (task, length)]
        full = next(one for one in of if one["policy"] == FULL)
        budgets = sorted({one["budget"] for one in of} - {1.0}, reverse=True)
        if not budgets:
            continue
        made = Table(box=box.SIMPLE_HEAD)
        made.add_column("kept")
        for budget in budgets:
            made.add_column(f"{budget:.1%}", justify="right")
        for policy in dict.fromkeys(one["policy"] for one in of):
            if policy != FULL:
                by = {one["budget"]: one for one in of if one["policy"] == policy}
                made.add_row(policy, *(_cell(by[budget]) if budget in by else "" for budget in budgets))
        title = f"{task}{f', contexts of {length:,} tokens' if length else ''}: {full['cases']} cases"
        yield TaskTable(title, made, f"full cache: {_cell(full)}\n{meaning(full)}")


def meaning(one: Mapping[str, Any]) -> str:
    """Return what the figures of a task's cells are."""
    if "exact" in one:
        return (
            "Exact: all answer tokens are the argmax, teacher-forced [Wilson, 95 %]; NLL of the answer, nats a token."
        )
    if "unique" in one:
        return (
            "NLL of the answer under the full cache, nats a token, over that of the full cache's own answers [95 %]; "
            "unique words; repeated 4-grams."
        )
    return "NLL of how it goes on against the full cache, nats a token [95 %]; KL from the full cache, at least."


def _cell(one: Mapping[str, Any]) -> str:
    if "exact" in one:
        exact = one["exact"]
        return f"{exact['value']:.2f} [{exact['low']:.2f}, {exact['high']:.2f}]  {one['nll']['value']:.2f}"
    if one["policy"] == FULL:
        figures = f"NLL {one['nll']['value']:.3f}"
    else:
        over = one["nll_over_full"]
        figures = f"{over['value']:+.3f} [{over['low']:+.3f}, {over['high']:+.3f}]"
    if "unique" in one:
        return f"{figures}  {one['unique']['value']:.2f}  {one['repeated']['value']:.2f}"
    return figures + (f"  {one['kl_at_least']['value']:.3f}" if "kl_at_least" in one else "")


def markdown(found: Summaries) -> str:
    """Return the same tables in Markdown."""
    parts = []
    for title, made, caption in tables(found):
        head = [str(column.header) for column in made.columns]
        rows = zip(*(list(column.cells) for column in made.columns), strict=True)
        lines = [head, ["---"] * len(head), *([str(cell).replace("  ", " · ") for cell in row] for row in rows)]
        below = caption.replace("  ", " · ").replace("\n", ". ")
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"**{title}.** {below}\n\n{body}\n")
    return "\n".join(parts)
