"""What the demo prints: one table, two answers side by side, one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nitro.demo.records import Run
from nitro.demo.settings import DemoSettings
from nitro.demo.summary import SAME_WITHIN, Row
from nitro.demo.texts import Prompt

_COLOURS = {"better": "green", "same": "dim", "unclear": "yellow", "worse": "red"}
SAMPLE_CHARACTERS = 700


def table(rows: Sequence[Row], stock: Run, nitro: Run, settings: DemoSettings, model: str) -> Table:
    """Return the demo's one table."""
    counters = nitro.counters
    assert counters is not None, "the Nitro run was checked for its counters"
    made = Table(
        title=f"{model}: {settings.requests} requests, {settings.output_tokens} tokens each, "
        f"one pool of {stock.pool_blocks} blocks of {stock.block_size} tokens",
        caption=f"Nitro: policy {settings.policy}, budget {settings.budget}, slack {settings.slack}; "
        f"{counters.evictions:,} evictions dropped {counters.tokens_evicted:,} tokens and gave back "
        f"{counters.blocks_freed:,} blocks. Same: within {SAME_WITHIN:.0%}. Unclear: within two standard errors of the "
        "difference between answers to the same prompts.",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("")
    for name in ("stock", "Nitro", "ratio"):
        made.add_column(name, justify="right")
    made.add_column("Nitro is")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = Text(row.verdict, style=_COLOURS[row.verdict])
        made.add_row(row.label, *(f"{value:,.{row.digits}f}" for value in (row.stock, row.nitro)), ratio, verdict)
    return made


def typical_answer(nll: Sequence[Sequence[float]]) -> int:
    """Return the request whose answers differ as much in NLL as the median request's: neither the best nor the worst.

    Args:
        nll: of each answer, for stock and for Nitro, in nats per token.
    """
    gaps = [nitro - stock for stock, nitro in zip(*nll, strict=True)]
    order = sorted(range(len(gaps)), key=gaps.__getitem__)
    return order[len(order) // 2]


def samples(
    index: int, prompt: Prompt, stock: Run, nitro: Run, nll: Sequence[Sequence[float]], width: int
) -> RenderableType:
    """Return both answers to one request, side by side where the terminal is wide enough."""
    side = width // 2 - 1 if width >= 80 else width
    panels = [
        Panel(
            Text(shorten(run.answers[index].text)),
            title=name,
            subtitle=f"NLL {scores[index]:.2f} nats/token",
            width=side,
        )
        for name, run, scores in (("stock vLLM", stock, nll[0]), ("Nitro", nitro, nll[1]))
    ]
    asked = Text(f"Request {index}, about {prompt.source}: {prompt.question}", style="bold")
    return Group(asked, Columns(panels, padding=(0, 1)))


def shorten(text: str, limit: int = SAMPLE_CHARACTERS) -> str:
    """Return the text's beginning, cut between words."""
    text = text.strip()
    return text if len(text) <= limit else text[:limit].rsplit(maxsplit=1)[0] + " …"


def show(console: Console, *parts: RenderableType) -> None:
    """Print the parts with an empty line before each."""
    for part in parts:
        console.print()
        console.print(part)
