"""Pictures of a load: what ran, what was held, what was preempted and how fast tokens came, over time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colours, which colour-blind people can tell apart; line styles differ as well.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES: tuple[Any, ...] = ((0, (4, 1.5)), "solid", (0, (1, 1)), "dashdot", (0, (6, 2, 1, 2)), (0, (2, 2)))
_BINS = 80
PANELS = {
    "running": "running requests",
    "blocks": "KV blocks in use",
    "preemptions": "preemptions so far",
    "tokens_per_s": "output tokens/s",
}


def new_figure(inches: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib's that needs no display."""
    # The first use builds a font cache, and says so in the middle of the output.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], title: str, target: Path) -> None:
    """Write the picture of all rounds as a PNG; needs no display. The first round has strong lines.

    Args:
        found: runs by engine.
        title: above the picture.
        target: the file.
    """
    figure = new_figure((10, 9))
    panels = dict(zip(PANELS, figure.subplots(len(PANELS), 1, sharex=True), strict=True))
    for index, (name, runs) in enumerate(found.items()):
        for number, run in enumerate(runs):
            times, columns = curves(run)
            for panel, axes in panels.items():
                label = name if panel == "running" and number == 0 else None
                strength = 1.0 if number == 0 else 0.35
                axes.plot(times[panel], columns[panel], linewidth=1.4, alpha=strength, label=label, **style(index))
    for panel, axes in panels.items():
        axes.set_ylabel(PANELS[panel])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels["tokens_per_s"].set_xlabel("time since the load began (s)")
    panels["running"].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(target)


def style(index: int) -> dict[str, Any]:
    """Return how a curve looks: colours and lines that differ."""
    return {"color": COLOURS[index % 6], "linestyle": LINES[index % 6]}


def curves(run: Mapping[str, Any]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return times and values of each panel's curve; tokens are counted in equal spans of time."""
    series = run["series"]
    times = [float(value) for value in series["time_s"]]
    ends = [*times, float(run["seconds"])]
    values = {panel: [*map(float, series[panel]), 0.0] for panel in ("running", "blocks")}
    values["preemptions"] = [*map(float, series["preemptions"]), float(series["preemptions"][-1])]
    edges = np.linspace(0.0, ends[-1], _BINS + 1)
    counted = np.interp(edges, [0.0, *times], [0.0, *series["tokens"]])
    values["tokens_per_s"] = (np.diff(counted) / np.diff(edges)).tolist()
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return {panel: middles if panel == "tokens_per_s" else ends for panel in PANELS}, values
