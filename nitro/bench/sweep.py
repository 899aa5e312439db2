"""Where Nitro helps and where it does not: what it gains at each retention ratio with so many requests at once.

Two engines, stock and Nitro in the same memory, serve all of it: the budget is each request's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from nitro.bench import charts, results
from nitro.bench.machine import BenchError
from nitro.bench.plan import Engine, Load, Plan
from nitro.bench.store import Store
from nitro.config import Settings
from nitro.errors import SettingsError
from nitro.request_settings import RequestSettings

STOCK, NITRO = "stock", "nitro"
FULL = 100.0


@dataclass(frozen=True)
class Cell:
    """One load at one retention ratio; figures are medians over the rounds.

    Attributes:
        requests: at once.
        percent: of a request's tokens, its budget; 100: nothing is evicted.
        budget: tokens; None: nothing is evicted.
        ratios: Nitro's output tokens/s to stock's, of each round.
        tokens_per_s: Nitro's.
        peak: Nitro's peak blocks to stock's.
        preemptions: with Nitro.
        stock_tokens_per_s: of stock, for the same load.
        stock_preemptions: likewise.
    """

    requests: int
    percent: float
    budget: int | None
    ratios: tuple[float, ...]
    tokens_per_s: float
    peak: float
    preemptions: float
    stock_tokens_per_s: float
    stock_preemptions: float

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)


def loads(requests: Sequence[int], percents: Sequence[float], load: Load, nitro: dict[str, Any]) -> tuple[Load, ...]:
    """Return what is served: the most requests first, of each number the highest retention ratio first.

    Args:
        requests: numbers of requests at once.
        percents: retention ratios.
        load: prompt and answer.
        nitro: the settings of Nitro's engine.

    Raises:
        SettingsError: a number or percentage is out of bounds, or a budget is one that Nitro refuses.
    """
    for name, values in (("requests", requests), ("retention", percents)):
        if not values:
            raise SettingsError(f"{name} is empty: give at least one number")
    for percent in percents:
        if not 0 < percent <= FULL:
            raise SettingsError(f"retention={percent:g} is not within (0, 100]: give percent of a request's tokens")
    server = Settings.parse(nitro)
    budgets: list[int | None] = [None]
    for percent in sorted({*percents} - {FULL}, reverse=True):
        budget = round(load.tokens * percent / 100)
        try:
            RequestSettings.parse({"budget": budget}, server)
        except SettingsError as error:
            raise SettingsError(
                f"retention={percent:g} of {load.tokens} tokens is a budget of {budget}: {error}"
            ) from error
        budgets.append(budget)
    return tuple(
        Load(number, load.prompt, load.answer, budget)
        for number in sorted({*requests}, reverse=True)
        for budget in budgets
    )


def engines(blocks: int, nitro_blocks: int, nitro: dict[str, Any]) -> tuple[Engine, Engine]:
    """Return the two engines; of the pools each has what the memory gives it."""
    return Engine(STOCK, blocks), Engine(NITRO, nitro_blocks, nitro)


def cells(plan: Plan, store: Store) -> list[Cell]:
    """Return what is there of both engines.

    Raises:
        BenchError: Nitro should have evicted and did not.
    """
    made, stock = [], {}
    for index, load in enumerate(plan.loads):
        found = results.runs(plan, store, index)
        if load.budget is None:
            stock[load.requests] = found[STOCK]
        base, runs = {run["round"]: run for run in stock[load.requests]}, found[NITRO]
        both = [run for run in runs if run["round"] in base]
        due = load.budget is not None and results.grows_beyond(plan.engines[1], load.budget, load.tokens)
        if due and any(not run["evictions"] for run in runs):
            raise BenchError(
                f"Nitro evicted nothing of {load} although that is below {load.tokens} tokens: vLLM did not load the "
                "plugin; run `nitro check`"
            )
        if both:
            bases = [base[run["round"]] for run in both]
            made.append(
                Cell(
                    load.requests,
                    FULL if load.budget is None else round(100 * load.budget / load.tokens, 1),
                    load.budget,
                    tuple(run["tokens_per_s"] / of["tokens_per_s"] for run, of in zip(both, bases, strict=True)),
                    statistics.median(run["tokens_per_s"] for run in both),
                    statistics.median(
                        run["peak_blocks"] / of["peak_blocks"] for run, of in zip(both, bases, strict=True)
                    ),
                    statistics.median(run["preemptions"] for run in both),
                    statistics.median(run["tokens_per_s"] for run in bases),
                    statistics.median(run["preemptions"] for run in bases),
                )
            )
    return made


def table(plan: Plan, found: Sequence[Cell]) -> Table:
    """Return the table: a row for each number of requests, a column for each retention ratio."""
    percents = sorted({cell.percent for cell in found}, reverse=True)
    load = plan.loads[0]
    made = Table(
        title=f"{plan.model.name} on {plan.device.description}: requests of {load.prompt} + {load.answer} tokens",
        caption="Nitro's output tokens/s, × stock's (its peak blocks, % of stock's; preemptions if any).",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("requests", justify="right")
    made.add_column("stock, tokens/s\n(preemptions)", justify="right")
    for percent in percents:
        budgets = {cell.budget for cell in found if cell.percent == percent}
        text = ", ".join("no eviction" if budget is None else f"budget {budget}" for budget in budgets)
        made.add_column(f"{percent:g} %\n{text}", justify="right")
    for requests in sorted({cell.requests for cell in found}):
        row = {cell.percent: cell for cell in found if cell.requests == requests}
        stock = next(iter(row.values()))
        made.add_row(
            str(requests),
            f"{stock.stock_tokens_per_s:,.0f} ({stock.stock_preemptions:.0f})",
            *(_text(row[percent]) if percent in row else "" for percent in percents),
        )
    return made


def _text(cell: Cell) -> str:
    preempted = f"; {cell.preemptions:.0f}" if cell.preemptions else ""
    return f"{cell.ratio:.2f} ({100 * cell.peak:.0f} %{preempted})"


def draw(found: Sequence[Cell], title: str, target: Path) -> None:
    """Write the picture as a PNG: what Nitro gains, and the blocks it needs, over the requests at once.

    Args:
        found: what is there.
        title: above the picture.
        target: the file.
    """
    figure = charts.new_figure((11, 5))
    gains, peaks = figure.subplots(1, 2, sharex=True)
    numbers = sorted({cell.requests for cell in found})
    for index, percent in enumerate(sorted({cell.percent for cell in found}, reverse=True)):
        line = sorted((cell for cell in found if cell.percent == percent), key=lambda cell: cell.requests)
        style = charts.style(index) | {"marker": "o", "markersize": 4}
        x = [cell.requests for cell in line]
        label = "100 % (nothing is evicted)" if percent == FULL else f"{percent:g} %"
        gains.plot(x, [cell.ratio for cell in line], label=label, **style)
        gains.fill_between(
            x, [min(c.ratios) for c in line], [max(c.ratios) for c in line], color=style["color"], alpha=0.15
        )
        peaks.plot(x, [100 * cell.peak for cell in line], **style)
    enough = [cell.requests for cell in found if not cell.stock_preemptions]
    for axes in (gains, peaks):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_xlabel("requests at once")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        left, right = axes.get_xlim()
        if enough:
            axes.axvspan(left, max(enough), color="0.5", alpha=0.12, linewidth=0)
        axes.set(xlim=(left, right), ylim=(0, None))
    gains.axhline(1.0, color="0.3", linewidth=0.8)
    gains.set_ylabel("output tokens/s, × stock")
    peaks.set_ylabel("peak blocks, % of stock's")
    gains.set_title("grey: stock's pool is large enough, nothing is preempted", fontsize=9)
    figure.legend(
        loc="outside lower center", ncols=6, frameon=False, fontsize=9, title="retained of a request's tokens"
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(target)
