"""``nitro eval`` from end to end."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nitro import device
from nitro.child import Child
from nitro.demo import models
from nitro.errors import SettingsError
from nitro.eval import charts, report, results, texts, transcripts
from nitro.eval.plan import Cell, cells
from nitro.eval.serve import EvalError
from nitro.eval.settings import FULL, EvalSettings
from nitro.eval.store import EvalStore

# -P: a checkout must not shadow what is installed.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "nitro.eval.engine")


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        settings: the grid.
        model: name or folder; None: SmolLM2-135M-Instruct, fetched if need be.
        text: file of real text; None: the novels that come with Nitro.
        transcripts: file of conversations; None: there are none.
        dtype: of the model; None: what fits the device.
        limit: seconds after which no cell begins; 0: no limit.
        out: results directory.
    """

    settings: EvalSettings
    model: str | None
    text: Path | None
    transcripts: Path | None
    dtype: str | None
    limit: float
    out: Path


def run(asked: Asked, console: Console) -> dict[str, Any]:
    """Run the cells that are missing in the results directory; print tables, write curves and data.

    Returns:
        What was written as JSON.

    Raises:
        ModelFetchError: the default model cannot be had.
        SettingsError: what was asked for cannot be run, or the directory has other results.
        EvalError: the engine failed, or did not evict as it should have.
    """
    started = time.time()
    if find_spec("matplotlib") is None:
        raise EvalError("the curves need matplotlib: pip install 'nitro-kv[demo]'")
    if asked.limit < 0:
        raise SettingsError(f"limit={asked.limit} is below 0: give seconds, or 0 for no limit")
    # So that a bad file is reported before anything is fetched or loaded.
    texts.sentences(asked.text)
    if asked.transcripts is not None:
        transcripts.load(asked.transcripts)
    elif "transcripts" in asked.settings.tasks:
        raise SettingsError("the task transcripts needs a file of conversations: give --transcripts FILE")
    device.share_the_cores()
    model = asked.model or str(models.ensure_model(lambda stage: console.print(f"model: {stage}", highlight=False)))
    machine = device.detect()
    arguments = machine.engine_args | ({} if asked.dtype is None else {"dtype": asked.dtype})
    manifest = {
        "model": Path(model).name,
        "device": machine.description,
        "dtype": arguments.get("dtype", "auto"),
        "text": _digest(asked.text),
        "transcripts": _digest(asked.transcripts),
        **asked.settings.to_dict(),
    }
    store = EvalStore(asked.out, manifest)
    grid = list(cells(asked.settings))
    spec = {
        "model": model,
        "settings": asked.settings.to_dict(),
        "manifest": manifest,
        "text": None if asked.text is None else str(asked.text.resolve()),
        "transcripts": None if asked.transcripts is None else str(asked.transcripts.resolve()),
        "out": str(asked.out.resolve()),
        "engine_args": arguments | _cache_arguments(machine, model, asked.settings),
        "own_seeds": machine.kind == "cuda",
        "until": started + asked.limit if asked.limit else 0,
    }
    versions = {}
    if not all(map(store.has, grid)):
        versions = _serve(spec, machine, asked.out, grid, store, console)
    return _finish(asked, manifest, versions, grid, store, console)


def _digest(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def _serve(
    spec: dict[str, Any], machine: device.Device, out: Path, grid: list[Cell], store: EvalStore, console: Console
) -> dict[str, str]:
    """Let an engine run what is missing; return the versions that it runs with."""
    path = out / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    environment = {**machine.env, **os.environ, **device.REQUIRED_ENV}
    child = Child([*COMMAND, str(path)], out / "engine.log", environment)
    versions: dict[str, str] = {}
    try:
        with _bars(console) as bars:
            whole = bars.add_task("cells", total=len(grid), completed=sum(map(store.has, grid)))
            one = bars.add_task("starting the engine", total=None)
            for event in child.events():
                if "versions" in event:
                    versions = event["versions"]
                elif "cell" in event:
                    bars.update(one, description=event["cell"], total=event["requests"], completed=0)
                elif "done" in event:
                    bars.update(one, completed=event["done"])
                else:
                    bars.advance(whole)
                    if not console.is_terminal:
                        console.print(f"{event['kept']}: done", highlight=False)
            if child.wait() != 0:
                raise EvalError(child.failure("evaluation's"))
    finally:
        child.stop()
    return versions


def _finish(
    asked: Asked,
    manifest: dict[str, Any],
    versions: dict[str, str],
    grid: list[Cell],
    store: EvalStore,
    console: Console,
) -> dict[str, Any]:
    there = [cell for cell in grid if store.has(cell)]
    full = {(cell.task, cell.length): store.get(cell) for cell in there if cell.label == FULL}
    found = [results.summary(cell, store.get(cell), full[cell.task, cell.length]) for cell in there]
    record = {**manifest, "complete": len(there) == len(grid), "versions": versions, "cells": found}
    data, lines = store.write("results.json", record), store.write_lines(there)
    tables = asked.out / "results.md"
    tables.write_text(report.markdown(found), encoding="utf-8")
    for title, table, caption in report.tables(found):
        console.print(f"\n[bold]{title}[/]", table, caption, sep="\n", highlight=False)
    if found:
        picture = asked.out / "eval.png"
        charts.draw(found, f"{manifest['model']} on {manifest['device']}", picture)
        console.print(f"picture  {picture}", highlight=False, soft_wrap=True)
    console.print(f"data     {data}, {lines}\ntables   {tables}", highlight=False, soft_wrap=True)
    if len(there) < len(grid):
        console.print(f"Time is up: the same command goes on in {asked.out}", style="bold yellow", highlight=False)
    return record


def _cache_arguments(machine: device.Device, model: str, settings: EvalSettings) -> dict[str, int]:
    """Return the size of a CPU's cache: a task's contexts stay in it, if a quarter of the memory will do."""
    if machine.kind != "cpu":
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    longest = max(*settings.lengths, settings.answer) + 512
    wanted = token * (2 * settings.contexts * max(settings.lengths) + settings.parallel * longest)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"kv_cache_memory_bytes": min(wanted, memory // 4)}


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
