"""The demo's picture: blocks in use and running requests over time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nitro.demo.records import Run
from nitro.demo.settings import DemoSettings

# Okabe and Ito's colour-blind-safe vermilion and blue; the line styles differ as well.
_STYLES: dict[str, dict[str, Any]] = {
    "stock": {"color": "#D55E00", "linestyle": (0, (4, 1.5)), "label": "stock vLLM"},
    "nitro": {"color": "#0072B2", "linestyle": "solid", "label": "Nitro"},
}


def draw(stock: Run, nitro: Run, settings: DemoSettings, model: str, target: Path) -> None:
    """Write the picture as a PNG; needs no display."""
    # The first use builds a font cache, and says so in the middle of the demo's output.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    blocks, running = figure.subplots(2, 1, sharex=True)
    close = abs(stock.wall_s - nitro.wall_s) < 0.25 * max(stock.wall_s, nitro.wall_s)
    for run in (stock, nitro):
        style = _STYLES[run.name]
        # The last sample holds until the run ends; then everything is free.
        times = [step.time_s for step in run.steps] + [run.wall_s, run.wall_s]
        for axes, values in (
            (blocks, [step.blocks for step in run.steps]),
            (running, [step.running for step in run.steps]),
        ):
            axes.plot(times, [*values, values[-1], 0], drawstyle="steps-post", linewidth=1.6, **style)
        if preempted := [step for step in run.steps if step.preempted]:
            running.plot(
                [step.time_s for step in preempted],
                [step.running for step in preempted],
                linestyle="none",
                marker="v",
                markersize=6,
                color=style["color"],
                markeredgecolor="black",
                label=f"preemptions, {style['label']} ({sum(step.preempted for step in preempted)})",
            )
        running.annotate(
            f"{style['label']} done\nafter {run.wall_s:.0f} s",
            (run.wall_s, 0),
            xytext=(-5, 34 if close and run is nitro else 6),  # above the other's label where they would overlap
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=style["color"],
        )
    blocks.axhline(stock.pool_blocks, color="0.4", linewidth=1, linestyle=":", label="the whole pool")
    blocks.set_ylabel(f"KV blocks in use\n({stock.block_size} tokens each)")
    blocks.set_ylim(0, stock.pool_blocks * 1.05)
    running.set_ylabel("running requests")
    running.yaxis.get_major_locator().set_params(integer=True)
    running.set_ylim(0, settings.requests * 1.05)
    running.set_xlabel("time since the first engine step (s)")
    for axes in (blocks, running):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, max(stock.wall_s, nitro.wall_s) * 1.02)
    # One legend above the panels, where it cannot cover a curve.
    legend = {
        label: handle
        for axes in (blocks, running)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    blocks.legend(
        legend.values(),
        legend.keys(),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(
        f"{model}: {settings.requests} requests in one pool of {stock.pool_blocks} blocks\n"
        f"stock vLLM against Nitro ({settings.policy}, budget {settings.budget} + slack {settings.slack} tokens)",
        fontsize=12,
    )
    figure.savefig(target)
