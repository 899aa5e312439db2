"""Curves of quality against budget, one panel a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nitro.bench.charts import COLOURS, LINES, new_figure
from nitro.eval.results import Interval, measure
from nitro.eval.settings import FULL

_COLUMNS = 3


def draw(found: Sequence[Mapping[str, Any]], title: str, target: Path) -> None:
    """Write the picture as a PNG; needs no display.

    Args:
        found: what `nitro.eval.results.summary` returns.
        title: above the picture.
        target: the file.
    """
    panels = list(dict.fromkeys((one["task"], one["length"]) for one in found))
    policies = list(dict.fromkeys(one["policy"] for one in found if one["policy"] != FULL))
    columns = min(len(panels), _COLUMNS)
    figure = new_figure((4.2 * columns, 3.4 * math.ceil(len(panels) / columns) + 0.6))
    grid = list(figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for (task, length), axes in zip(panels, grid, strict=False):
        of = [one for one in found if (one["task"], one["length"]) == (task, length)]
        for index, policy in enumerate(policies):
            points = sorted((one["budget"], measure(one)) for one in of if one["policy"] == policy)
            if points:
                _curve(axes, points, policy, COLOURS[index % len(COLOURS)], LINES[index % len(LINES)])
        full = next(one for one in of if one["policy"] == FULL)
        axes.axhline(measure(full).value, color="black", linewidth=1, linestyle=(0, (1, 2)), label="full cache")
        axes.set_title(f"{task} {length:,}" if length else task, fontsize=10)
        axes.set_ylabel("exact" if "exact" in full else "NLL over the full cache's", fontsize=9)
        if "exact" in full:
            axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("share of tokens kept", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(target)


def _curve(axes: Any, points: Sequence[tuple[float, Interval]], label: str, colour: str, line: Any) -> None:
    budgets = [budget for budget, _ in points]
    values = [one.value for _, one in points]
    below = [one.value - one.low for _, one in points]
    above = [one.high - one.value for _, one in points]
    axes.errorbar(
        budgets, values, yerr=[below, above], label=label, color=colour, linestyle=line, marker="o", markersize=3,
        linewidth=1.4, elinewidth=0.7, capsize=2,
    )  # fmt: skip
