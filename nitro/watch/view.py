"""What ``nitro stats`` shows of a scrape."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nitro.watch.figures import HISTOGRAMS, WORST, Histogram, Pool, Snapshot

WIDTH = 56  # characters of the maps
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STEPS = " ▁▂▃▄▅▆▇█"
_COUNTED = (
    ("evictions", "evictions"),
    ("tokens evicted", "tokens_evicted"),
    ("blocks freed", "blocks_freed"),
    ("tokens generated", "generated"),
    ("preemptions", "preemptions"),
    ("requests refused", "requests_refused"),
)
_CALLED = {"plan_seconds": "scheduler", "worker_seconds": "worker", "device_seconds": "GPU"}


def render(now: Snapshot, before: Snapshot | None, note: str = "") -> RenderableType:
    """Return the view of a scrape.

    Args:
        now: what is shown.
        before: the one before, for what has happened in between; None shows totals since the server began.
        note: what else to say, at the end.
    """
    engines = "" if now.engines == 1 else f", {now.engines} engines"
    parts: list[RenderableType] = [
        Text(f"{', '.join(now.models)}{engines}", style="bold"),
        _held(now),
        *_maps(now),
        _counted(now, now.rates(before)),
        _times(now, before),
    ]
    if now.counters["bridge_answers"] or any(now.drops.values()) or now.gauges["bridge_questions"]:
        parts.append(_bridge(now))
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _held(now: Snapshot) -> Table:
    gauges = now.gauges
    table = _table("requests", "", "tokens", "")
    table.columns[2].justify = "left"
    rows = (
        ("running", gauges["running"], "computed (logical)", number(gauges["logical_tokens"])),
        ("waiting", gauges["waiting"], "in the cache (physical)", number(gauges["physical_tokens"])),
        ("with a budget", gauges["active_requests"], "slots allocated", number(gauges["allocated_slots"])),
        ("evicted", gauges["evicted_requests"], "fragmentation", _times_of(gauges["fragmentation_ratio"])),
        ("", None, "  of the worst request", _times_of(gauges[WORST])),
    )
    for label, count, other, value in rows:
        table.add_row(label, "" if count is None else number(count), other, value)
    return table


def _maps(now: Snapshot) -> list[Text]:
    retention = now.gauges["retention_ratio"]
    share = "nobody runs" if math.isnan(retention) else f"{retention:.1%}"
    lines = [Text.assemble("retention  ", (bar(retention), "green"), f" {share}")]
    if now.pool is not None:
        lines.append(Text.assemble("blocks     ", *block_map(now.pool, now.gauges)))
        whole = now.gauges["logical_tokens"] / (now.pool.blocks * now.pool.block_size)
        used = f"{number(now.pool.used)} of {number(now.pool.blocks)} blocks in use"
        lines.append(
            Text(
                f"           {used}; all computed tokens would fill {whole:.0%}",
                style="dim",
            )
        )
        lines.append(Text("           █ tokens  ▒ allocated, empty  ░ shared or cached otherwise  · free", style="dim"))
    return lines


def bar(share: float, width: int = WIDTH) -> str:
    """Return a share in [0, 1] as a bar of eighths; an empty one for NaN."""
    eighths = 0 if math.isnan(share) else round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def block_map(pool: Pool, gauges: Mapping[str, float], width: int = WIDTH) -> list[tuple[str, str]]:
    """Return the pool as so many cells: how much of it is what. A coarse map: the engine does not say which block.

    A block that requests share counts for each of them in what is allocated, but once in what is in use; tokens and
    free slots are shown in proportion then.
    """
    held = gauges["allocated_slots"] / pool.block_size
    live = gauges["physical_tokens"] / pool.block_size
    scale = min(1.0, pool.used / held) if held else 0.0
    ends = [live * scale, held * scale, pool.used, pool.blocks]
    cells, at = [], 0
    for end, (sign, style) in zip(ends, (("█", "green"), ("▒", "yellow"), ("░", "blue"), ("·", "dim")), strict=True):
        upto = max(min(round(end / pool.blocks * width), width), at)
        cells.append((sign * (upto - at), style))
        at = upto
    return cells


def _counted(now: Snapshot, rates: Mapping[str, float]) -> Table:
    table = _table("", "a second", "in all")
    for label, name in _COUNTED:
        table.add_row(label, number(rates[name]) if name in rates else "", number(now.counters[name]))
    return table


def _times(now: Snapshot, before: Snapshot | None) -> Table:
    first = next(iter(now.histograms.values()))
    scale = f"{seconds(first.bounds[0])} … {seconds(first.bounds[-2])}" if len(first.bounds) > 1 else ""
    table = _table("time of a step", scale, "p50", "p99", "mean", "steps")
    for name in HISTOGRAMS:
        found = now.histograms[name]
        if before is not None:
            found = found.since(before.histograms[name])
        quantiles = (seconds(found.quantile(share)) for share in (0.5, 0.99))
        table.add_row(_CALLED[name], sparks(found), *quantiles, seconds(found.mean), number(found.count))
    return table


def sparks(found: Histogram) -> str:
    """Return a column for each bucket; the fullest one is the highest, and none that has anything is invisible."""
    most = max(found.counts, default=0)
    if not most:
        return ""
    return "".join(_STEPS[math.ceil(count / most * 8)] for count in found.counts)


def _bridge(now: Snapshot) -> Text:
    dropped = ", ".join(f"{number(count)} {reason}" for reason, count in now.drops.items() if count) or "none"
    answers, open_ = number(now.counters["bridge_answers"]), number(now.gauges["bridge_questions"])
    depth = number(now.gauges["bridge_depth"])
    return Text(f"bridge: {answers} answers, dropped: {dropped}; {open_} questions open, at most {depth} in the ring")


def number(value: float) -> str:
    """Return a count or a rate for people."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def seconds(value: float) -> str:
    """Return a time with a unit that fits; nothing for NaN."""
    if math.isnan(value):
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _times_of(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}×"
