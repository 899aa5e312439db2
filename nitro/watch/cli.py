"""``nitro stats``: its options, and its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from nitro.errors import WatchError
from nitro.watch.figures import Snapshot, snapshot
from nitro.watch.scrape import fetch, metrics_url, parse
from nitro.watch.view import render


def stats(
    url: Annotated[str, typer.Argument(help="A vLLM server: localhost:8000, http://host:8000, ...")],
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a line for each look.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for an answer.")] = 10.0,
) -> None:
    """Watch a server: what its requests hold, what is evicted, and what that takes.

    From its /metrics alone, from any machine; docs/serving.md says what the figures mean. Ctrl-C ends it.
    """
    try:
        where = metrics_url(url)

        def look() -> Snapshot:
            return snapshot(parse(fetch(where, timeout), where), time.monotonic())

        first = look()
        if as_json:
            _print_json(first, None if once else look, interval)
        elif once:
            Console().print(render(first, None))
        else:
            _show(first, look, interval)
    except WatchError as error:
        typer.echo(f"nitro stats: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print_json(first: Snapshot, look: Callable[[], Snapshot] | None, interval: float) -> None:
    """Print a line, and if there is to be more, one after each pause, with rates; a server that goes away ends it."""
    typer.echo(json.dumps(first.to_dict()))
    before = first
    while look is not None:
        time.sleep(interval)
        now = look()
        typer.echo(json.dumps(now.to_dict(before)))
        before = now


def _show(first: Snapshot, look: Callable[[], Snapshot], interval: float) -> None:
    """Show the view until somebody ends it. A server that stops answering is waited for: it may come back."""
    now, before = first, None
    with Live(render(now, None), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(interval)
            try:
                now, before = look(), now
                live.update(render(now, before), refresh=True)
            except WatchError as error:
                since = time.monotonic() - now.at
                live.update(render(now, before, f"no answer for {since:.0f} s: {error}"), refresh=True)
