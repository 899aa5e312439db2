"""``nitro bench stress``, ``explain`` and ``sweep`` from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from nitro.bench import charts, explain, machine, pools, report, results, shapes
from nitro.bench import sweep as sweeping
from nitro.bench.machine import BenchError, Machine
from nitro.bench.plan import Engine, Load, Plan, block_size, itemsize
from nitro.bench.runner import Mode, Runner
from nitro.bench.store import Store, write_whole
from nitro.config import Settings
from nitro.device import share_the_cores
from nitro.errors import SettingsError


@dataclass(frozen=True)
class Asked:
    """What the user asked for; all commands share it.

    Attributes:
        model: a shape's name, or a folder.
        pool: the tight pool (`nitro.bench.pools`).
        load: what is served.
        rounds: how often.
        nitro: Nitro's settings.
        max_batched: tokens that a step may compute.
        mode: whether engines are alive together.
        limit_s: no run is begun that would end later; 0: no limit.
        out: the results directory.
    """

    model: str
    pool: str
    load: Load
    rounds: int
    nitro: dict[str, Any]
    max_batched: int
    mode: Mode
    limit_s: float
    out: Path


def stress(asked: Asked, console: Console) -> dict[str, Any]:
    """Run stock vLLM and Nitro in the same memory, print the comparison, and write pictures and JSON.

    Returns:
        What was written as JSON.

    Raises:
        SettingsError: what was asked for cannot be run.
        BenchError: an engine failed, or Nitro evicted nothing.
    """
    found, model = _begin(asked, console)
    tight, tight_nitro = _pool(asked, asked.pool, model, found)
    engines = (Engine("stock", tight), Engine("nitro", tight_nitro, asked.nitro))
    plan = Plan(model, engines, (asked.load,), found.device, asked.rounds, asked.max_batched)
    return _finish(asked, plan, found, console)


def explained(asked: Asked, ample: str, fp8: bool, console: Console) -> dict[str, Any]:
    """Run stock and Nitro in a tight and an ample pool, and print where the difference comes from.

    Args:
        asked: what to run; its pool is the tight one.
        ample: the other pool.
        fp8: whether stock vLLM with an FP8 cache in the tight pool's memory runs, too.
        console: where to print.

    Returns:
        What was written as JSON.

    Raises:
        SettingsError: what was asked for cannot be run.
        BenchError: an engine failed, or Nitro evicted nothing.
    """
    found, model = _begin(asked, console)
    if fp8 and found.device.kind != "cuda":
        raise SettingsError(f"fp8 needs a GPU, this machine is {found.device.description}: leave --fp8 out")
    tight, tight_nitro = _pool(asked, asked.pool, model, found)
    large, _ = _pool(asked, ample, model, found)
    if large <= tight:
        raise SettingsError(
            f"ample pool={ample} is {large} blocks, not more than the {tight} of pool={asked.pool}: give a "
            "smaller --pool, or more requests or tokens"
        )
    engines = [
        Engine(explain.STOCK_TIGHT, tight),
        Engine(explain.STOCK_AMPLE, large),
        Engine(explain.NITRO_AMPLE, large, asked.nitro),
        Engine(explain.NITRO_TIGHT, tight_nitro, asked.nitro),
        *([Engine(explain.STOCK_FP8, 2 * tight, fp8=True)] if fp8 else []),
    ]
    plan = Plan(model, tuple(engines), (asked.load,), found.device, asked.rounds, asked.max_batched, record=True)
    return _finish(asked, plan, found, console)


def swept(asked: Asked, requests: Sequence[int], percents: Sequence[float], console: Console) -> dict[str, Any]:
    """Serve each number of requests on stock and, at each retention ratio, with Nitro; print what Nitro gains where.

    Args:
        asked: what to run; its load has the most requests, and its settings evict nothing by themselves.
        requests: numbers of requests at once.
        percents: retention ratios.
        console: where to print.

    Returns:
        What was written as JSON.

    Raises:
        SettingsError: what was asked for cannot be run.
        BenchError: an engine failed, or Nitro evicted nothing.
    """
    loads = sweeping.loads(requests, percents, asked.load, asked.nitro)
    found, model = _begin(asked, console)
    engines = sweeping.engines(*_pool(asked, asked.pool, model, found), asked.nitro)
    plan = Plan(model, engines, loads, found.device, asked.rounds, asked.max_batched)
    store, complete = _run(asked, plan, found, console)
    cells = sweeping.cells(plan, store)
    if not cells:
        raise BenchError(f"limit={asked.limit_s:.0f} s ended before both engines had served a load: raise --limit")
    picture, data = asked.out / "sweep.png", asked.out / "results.json"
    sweeping.draw(
        cells,
        f"{model.name} on {found.device.description}, pool {asked.pool}: {asked.load.prompt} + "
        f"{asked.load.answer} tokens",
        picture,
    )
    record = {
        **plan.manifest(),
        "complete": complete,
        "versions": found.versions,
        "cells": [asdict(cell) for cell in cells],
    }
    write_whole(data, record)
    _show(console, [sweeping.table(plan, cells), f"picture  {picture}\ndata     {data}"])
    _say_if_late(asked, complete, console)
    return record


def _begin(asked: Asked, console: Console) -> tuple[Machine, shapes.Model]:
    """Check what can be checked at once, and look at the machine."""
    if find_spec("matplotlib") is None:
        raise BenchError("the pictures need matplotlib: pip install 'nitro-kv[demo]'")
    Settings.parse(asked.nitro)
    model = shapes.find(asked.model)
    share_the_cores()
    with console.status("measuring the machine"):
        found = machine.probe()
    console.print(
        f"{found.device.description}: {found.free_bytes / 1e9:.1f} GB free, copies "
        f"{found.copy_bytes_per_s / 1e9:,.0f} GB/s (read + written)",
        highlight=False,
    )
    return found, model


def _pool(asked: Asked, text: str, model: shapes.Model, found: Machine) -> tuple[int, int]:
    """Return a pool's blocks without Nitro and with it."""
    size, bytes_each = block_size(found.device), itemsize(found.device)
    tokens = asked.load.tokens
    pool = pools.parse(text, model, block_size=size, itemsize=bytes_each, requests=asked.load.requests, tokens=tokens)
    if pool.literal or found.device.kind != "cuda":
        return pool.blocks, pool.blocks
    left = pools.nitro_blocks(pool.blocks, model, block_size=size, itemsize=bytes_each)
    least = pools.needed_blocks(1, tokens, size)
    if left < least:
        raise SettingsError(
            f"pool={text} leaves Nitro {left} blocks beside what it keeps there, below the {least} of one request: "
            "give a larger pool"
        )
    return pool.blocks, left


def _finish(asked: Asked, plan: Plan, found: Machine, console: Console) -> dict[str, Any]:
    """Run what is missing, then report everything that is there."""
    store, complete = _run(asked, plan, found, console)
    runs = results.runs(plan, store)
    results.require_evictions(plan, runs, asked.load.tokens)
    if not any(runs.values()):
        raise BenchError(f"limit={asked.limit_s:.0f} s ended before a run did: raise --limit")
    picture, data = asked.out / "bench.png", asked.out / "results.json"
    charts.draw(runs, f"{plan.model.name} on {plan.device.description}: {asked.load} tokens", picture)
    record = {
        **plan.manifest(),
        "complete": complete,
        "versions": found.versions,
        "runs": {name: [_without_bulk(run) for run in of] for name, of in runs.items()},
        "ratios": [asdict(ratio) for ratio in results.ratios(plan, runs)],
    }
    parts: list[Any] = [report.figures(plan, runs), report.ratios(plan, runs)]
    if plan.record:
        made = explain.explain(plan, runs)
        record |= explain.to_dict(plan, made, runs)
        if made is not None:
            parts += [explain.attribution_table(made), "\n".join(explain.costs_lines(plan, made))]
        parts += [explain.shares_table(plan, runs), explain.roofline_table(plan, runs)]
    write_whole(data, record)
    _show(console, [*parts, *report.remarks(runs), f"picture  {picture}\ndata     {data}"])
    _say_if_late(asked, complete, console)
    return record


def _run(asked: Asked, plan: Plan, found: Machine, console: Console) -> tuple[Store, bool]:
    """Run what is missing; return the results, and whether they are complete."""
    store = Store(asked.out, plan.manifest())
    return store, Runner(plan, store, found, console, mode=asked.mode, limit_s=asked.limit_s).run()


def _say_if_late(asked: Asked, complete: bool, console: Console) -> None:
    if not complete:
        console.print(f"Time is up: the same command goes on in {asked.out}", style="bold yellow", highlight=False)


def _without_bulk(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in ("series", "recording")}


def _show(console: Console, parts: Sequence[Any]) -> None:
    for part in parts:
        console.print()
        console.print(part, highlight=False)
