"""The command line of ``nitro bench``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from nitro.bench.plan import Load
from nitro.errors import NitroError

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure stock vLLM and Nitro side by side.")

Model = Annotated[
    str,
    typer.Option(
        help="A model's folder, or a shape with dummy weights: tiny, smollm2-135m, qwen2.5-0.5b, llama-3.2-1b, "
        "llama-3.1-8b."
    ),
]
Pool = Annotated[
    str, typer.Option(help="Blocks (91750), memory (40GiB), a card's worth (l4), or full: as many as the load needs.")
]
Requests = Annotated[int, typer.Option(help="Requests at once; max_num_seqs is as many.")]
Prompt = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Answer = Annotated[int, typer.Option(help="Tokens of an answer.")]
Rounds = Annotated[int, typer.Option(help="How often each engine serves the load, in turn.")]
Policy = Annotated[str, typer.Option(help="Nitro's policy.")]
Budget = Annotated[int, typer.Option(help="Tokens that a request may hold after an eviction.")]
Slack = Annotated[int, typer.Option(help="Tokens it may grow beyond the budget.")]
Batched = Annotated[int, typer.Option("--max-batched-tokens", help="Tokens that an engine step may compute.")]
Engines = Annotated[
    str, typer.Option(help="together: all alive at once; fresh: one for each run; auto: together if they fit.")
]
Limit = Annotated[
    float, typer.Option("--limit", help="Seconds after which no run ends, as far as can be told; 0: no limit.")
]
Out = Annotated[Path, typer.Option(help="Results directory; the same command goes on there.")]
ENGINES = ("auto", "together", "fresh")


@bench.command()
def stress(
    model: Model = "qwen2.5-0.5b",
    pool: Pool = "l4",
    requests: Requests = 2048,
    prompt: Prompt = 1000,
    answer: Answer = 1000,
    rounds: Rounds = 3,
    policy: Policy = "keydiff",
    budget: Budget = 256,
    slack: Slack = 64,
    max_batched: Batched = 8192,
    engines: Engines = "auto",
    limit: Limit = 0.0,
    out: Out = Path("nitro-stress"),
) -> None:
    """Many requests at once, on stock vLLM and with Nitro, in the same memory: the essay's stress by default."""

    def run() -> None:
        from nitro.bench import app

        nitro = {"policy": policy, "budget": budget, "slack": slack}
        app.stress(
            _asked(model, pool, Load(requests, prompt, answer), rounds, nitro, max_batched, engines, limit, out),
            Console(),
        )

    _told("stress", run)


@bench.command()
def explain(
    model: Model = "qwen2.5-0.5b",
    pool: Pool = "l4",
    ample: Annotated[str, typer.Option(help="The pool without limit, as --pool.")] = "full",
    requests: Requests = 2048,
    prompt: Prompt = 1000,
    answer: Answer = 1000,
    rounds: Rounds = 1,
    policy: Policy = "keydiff",
    budget: Budget = 256,
    slack: Slack = 64,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Stock with an FP8 cache in the tight memory as a rival, too.")
    ] = False,
    max_batched: Batched = 8192,
    engines: Engines = "auto",
    limit: Limit = 0.0,
    out: Out = Path("nitro-explain"),
) -> None:
    """Where Nitro's gain comes from: less recomputation, larger batches, fewer bytes read, or the host."""

    def run() -> None:
        from nitro.bench import app

        nitro = {"policy": policy, "budget": budget, "slack": slack}
        asked = _asked(model, pool, Load(requests, prompt, answer), rounds, nitro, max_batched, engines, limit, out)
        app.explained(asked, ample, fp8, Console())

    _told("explain", run)


@bench.command()
def sweep(
    model: Model = "qwen2.5-0.5b",
    pool: Pool = "l4",
    requests: Annotated[
        str, typer.Option(help="Numbers of requests at once, with commas; max_num_seqs is the largest.")
    ] = "64,256,512,1024,2048",
    retention: Annotated[
        str, typer.Option(help="Percent of a request's tokens that its budget is, with commas.")
    ] = "100,50,25,16.5,12.5",
    prompt: Prompt = 1000,
    answer: Answer = 1000,
    rounds: Rounds = 1,
    policy: Policy = "keydiff",
    slack: Slack = 64,
    max_batched: Batched = 8192,
    engines: Engines = "auto",
    limit: Limit = 0.0,
    out: Out = Path("nitro-sweep"),
) -> None:
    """Where Nitro helps and where it does not: retention ratios by numbers of requests, against stock vLLM."""

    def run() -> None:
        from nitro.bench import app

        numbers = [int(number) for number in _numbers("requests", requests, int)]
        nitro = {"policy": policy, "budget": prompt + answer, "slack": slack}
        load = Load(max(numbers, default=1), prompt, answer)
        asked = _asked(model, pool, load, rounds, nitro, max_batched, engines, limit, out)
        app.swept(asked, numbers, _numbers("retention", retention, float), Console())

    _told("sweep", run)


def _numbers(name: str, text: str, kind: Callable[[str], float]) -> list[float]:
    from nitro.errors import SettingsError

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingsError(f"{name}={text!r} is not a list of numbers ({error}): separate them by commas") from error


def _asked(
    model: str,
    pool: str,
    load: Load,
    rounds: int,
    nitro: dict[str, Any],
    max_batched: int,
    engines: str,
    limit: float,
    out: Path,
) -> Any:
    from nitro.bench.app import Asked
    from nitro.bench.runner import Mode
    from nitro.errors import SettingsError

    if engines not in ENGINES:
        raise SettingsError(f"engines={engines!r} is unknown: give one of {', '.join(ENGINES)}")
    if limit < 0:
        raise SettingsError(f"limit={limit} is below 0: give seconds, or 0 for no limit")
    return Asked(model, pool, load, rounds, nitro, max_batched, cast(Mode, engines), limit, out)


def _told(command: str, run: Callable[[], None]) -> None:
    """Run a command; errors that Nitro raises on purpose are printed without a traceback."""
    try:
        run()
    except NitroError as error:
        typer.echo(f"nitro bench {command}: {error}", err=True)
        raise typer.Exit(1) from None
