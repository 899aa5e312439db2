"""What a benchmark prints: one table of figures, and what the engines are to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from nitro.bench import results
from nitro.bench.plan import Plan
from nitro.bench.results import Found


def figures(plan: Plan, found: Found, load: int = 0) -> Table:
    """Return the table of medians over the rounds; where there are several, with the range of tokens/s."""
    rounds = max(map(len, found.values()), default=0)
    made = Table(
        title=f"{plan.model.name} on {plan.device.description}: {plan.loads[load]} tokens",
        caption=f"Medians of {rounds} round{'s' * (rounds != 1)}, line by line; blocks of {plan.block_size} tokens.",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("")
    for engine in plan.engines:
        made.add_column(f"{engine.name}\n{engine.blocks:,} blocks", justify="right")
    for key, (label, digits) in results.FIGURES.items():
        values = [results.median(found[engine.name], key) for engine in plan.engines]
        if any(value is not None for value in values):
            made.add_row(label, *("" if value is None else f"{value:,.{digits}f}" for value in values))
    if rounds > 1:
        made.add_row("tokens/s, range", *(_range(found[engine.name]) for engine in plan.engines))
    return made


def _range(runs: Sequence[dict[str, Any]]) -> str:
    values = [run["tokens_per_s"] for run in runs]
    return f"{min(values):,.0f} to {max(values):,.0f}" if values else ""


def ratios(plan: Plan, found: Found) -> Text:
    """Return what each engine's tokens/s are to each stock one's, within rounds: the median and the range."""
    lines = [str(ratio) for ratio in results.ratios(plan, found)]
    return Text(
        "output tokens/s, as ratios within a round (compare engines by these)\n"
        + "\n".join(f"  {line}" for line in lines),
        style="bold",
    )


def remarks(found: Found) -> list[str]:
    """Return what a reader has to know beside the figures."""
    mixed = results.mixed_rounds(found)
    if not mixed:
        return []
    which = ", ".join(map(str, mixed))
    return [
        f"The engines of round{'s' * (len(mixed) > 1)} {which} ran in several commands, hence not side by side: their "
        "ratios are less certain."
    ]
