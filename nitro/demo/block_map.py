"""A picture of a request's block map: blocks as rows, slots as cells, before an eviction and after it in each mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nitro.fragmentation import DEAD, MODES, Placement
from nitro.types import KeepRecord

FREE, HOLE = -2.0, -1.0
"""Cells of blocks that were given back, and dead or unused cells of those that are held."""


def cells(placement: Placement, layer: int, head: int, rows: int) -> npt.NDArray[np.float64]:
    """Return what is in each slot of one layer and KV head.

    Returns:
        ``[rows, block_size]``: the logical position of the token there, ``HOLE``, or ``FREE``.
    """
    size = placement.block_size
    found = np.full((rows, size), FREE)
    found[placement.held] = HOLE
    slots = placement.positions[layer, head]
    flat = found.reshape(-1)
    live = np.flatnonzero(slots != DEAD)
    flat[live] = slots[live]
    return found


def maps(records: Sequence[KeepRecord], block_size: int, layer: int, head: int) -> dict[str, npt.NDArray[np.float64]]:
    """Return the cells before the last of a request's evictions (in ``fill``), and after it in each mode."""
    last = records[-1]
    layers, heads, _ = last.kept.shape
    made = {}
    for mode in MODES:
        placement = Placement(mode, layers, heads, block_size)
        for record in records[:-1]:
            placement.grow(record.logical_len)
            placement.evict(record.kept)
        placement.grow(last.logical_len)
        made[mode] = (placement, -(-placement.positions.shape[-1] // block_size))
    rows = max(count for _, count in made.values())
    found = {"before": cells(made["fill"][0], layer, head, rows)}
    for mode, (placement, _) in made.items():
        placement.evict(last.kept)
        found[mode] = cells(placement, layer, head, rows)
    return found


def draw(records: Sequence[KeepRecord], block_size: int, layer: int, head: int, title: str, target: Path) -> None:
    """Write the picture as a PNG; needs no display.

    Args:
        records: a request's evictions of one run; the last is the one that is shown.
        block_size: slots of a block.
        layer: whose slots are shown.
        head: likewise, a KV head.
        title: above the picture.
        target: where it goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    found = maps(records, block_size, layer, head)
    last = records[-1]
    rows = len(found["before"])
    figure = Figure(figsize=(11, 1.6 + 0.24 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(found), sharey=True)
    scale = ScalarMappable(Normalize(0, last.logical_len - 1), "viridis")
    for axes, (name, cell) in zip(panels, found.items(), strict=True):
        axes.imshow(np.where(cell == FREE, np.nan, 0.0), cmap=ListedColormap(["#D9D9D9"]), aspect="auto")
        tokens = np.where(cell >= 0, cell, np.nan)
        axes.imshow(tokens, norm=scale.norm, cmap=scale.cmap, aspect="auto")
        held = int((cell[:, 0] != FREE).sum())
        live = int((cell >= 0).sum())
        ratio = held * block_size / live
        axes.set_title(f"{name}\n{held} blocks, {live} tokens: {ratio:.2f}", fontsize=9)
        axes.set_xticks(np.arange(-0.5, block_size, 1), minor=True)
        axes.set_yticks(np.arange(-0.5, rows, 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.4)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("slot of the block")
    panels[0].set_ylabel("block of the request")
    figure.colorbar(scale, ax=panels, label="position of the token", pad=0.01)
    figure.suptitle(f"{title} (grey: dead or unused; white: given back)", fontsize=10)
    figure.savefig(target)
