"""The command line of ``nitro eval``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from nitro.errors import NitroError, SettingsError

T = TypeVar("T", int, float)
_TASKS = (
    "needle-noise, needle-text, needle-keys, needle-word, dictionary, labels, variables, perplexity, transcripts, "
    "stories"
)


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="A model's name or folder. Default: SmolLM2-135M-Instruct, from PyPI.")
    ] = None,
    tasks: Annotated[str, typer.Option(help=f"Separated by commas: {_TASKS}.")] = (
        "needle-noise,needle-text,dictionary,perplexity"
    ),
    policies: Annotated[
        str,
        typer.Option(
            help="Separated by commas, each NAME or NAME:OPTION=VALUE:...; random and streaming run in any case."
        ),
    ] = "kvdiff,vdiff,keydiff",
    budgets: Annotated[str, typer.Option(help="Shares of tokens that stay, separated by commas.")] = "0.5,0.25,0.165",
    lengths: Annotated[
        str, typer.Option(help="Tokens of contexts, separated by commas; multiples of 32, at least 256.")
    ] = ("1024"),
    contexts: Annotated[int, typer.Option(help="Independent contexts for each cell of the grid.")] = 30,
    answer: Annotated[int, typer.Option(help="Tokens that each of the stories has.")] = 400,
    text: Annotated[
        Path | None, typer.Option(help="A file of real text (UTF-8) instead of the public-domain novels.")
    ] = None,
    transcripts: Annotated[
        Path | None, typer.Option(help="A file of conversations for the task of that name: JSON, lists of messages.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model: float32, bfloat16, ...")] = None,
    parallel: Annotated[int, typer.Option(help="Requests at once; the bits of the results depend on it.")] = 16,
    seed: Annotated[int, typer.Option(help="Of contexts, sampling, and policies that draw.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds after which no cell begins; 0: no limit.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Results directory; the command goes on there.")] = Path("nitro-eval"),
) -> None:
    """Measure what evictions cost: tasks served by vLLM with Nitro, by policies and budgets, beside the full cache."""
    try:
        from nitro.eval import app
        from nitro.eval.settings import EvalSettings

        settings = EvalSettings(
            tasks=_split(tasks),
            policies=_split(policies),
            budgets=tuple(_number(float, "budgets", item) for item in _split(budgets)),
            lengths=tuple(_number(int, "lengths", item) for item in _split(lengths)),
            contexts=contexts,
            answer=answer,
            seed=seed,
            parallel=parallel,
        )
        app.run(app.Asked(settings, model, text, transcripts, dtype, limit, out), Console())
    except NitroError as error:
        typer.echo(f"nitro eval: {error}", err=True)
        raise typer.Exit(1) from None


def _split(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _number(kind: Callable[[str], T], option: str, text: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{option}: {text!r} is not a number: separate numbers by commas") from None
