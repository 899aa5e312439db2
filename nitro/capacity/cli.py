"""``nitro plan``: its options."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from nitro.capacity.plan import make_plan
from nitro.capacity.question import KV_DTYPES, Question
from nitro.capacity.report import render
from nitro.errors import NitroError

_DEFAULT = Question("", "", budget=512)


def plan(
    model: Annotated[str, typer.Argument(help="A shape such as qwen2.5-0.5b or llama-3.1-8b, or a model's folder.")],
    card: Annotated[str, typer.Option(help="The GPU: l4, a10, l40s, a100-80gb, h100, h200, rtx-4090, ...")] = "l4",
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = _DEFAULT.prompt,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = _DEFAULT.answer,
    budget: Annotated[int | None, typer.Option(help="Tokens a request may hold; 512 without a ratio.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of its tokens that stay, instead of a budget.")] = None,
    slack: Annotated[int, typer.Option(help="Tokens it may grow beyond that.")] = _DEFAULT.slack,
    sinks: Annotated[int, typer.Option(help="First tokens that always stay.")] = _DEFAULT.sinks,
    window: Annotated[int, typer.Option(help="Newest tokens that always stay.")] = _DEFAULT.window,
    evict_prompt: Annotated[bool, typer.Option(help="Whether prompts may be evicted.")] = True,
    kv_dtype: Annotated[str, typer.Option(help=f"Of the cache: {', '.join(KV_DTYPES)}.")] = _DEFAULT.kv_dtype,
    weight_bits: Annotated[
        float | None, typer.Option(help="Bits of a weight in the layers (16, 8, 4.25, ...); default: the model's.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = _DEFAULT.block_size,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="The share of a GPU that vLLM may take.")
    ] = _DEFAULT.utilisation,
    memory: Annotated[float | None, typer.Option(help="GiB that CUDA reports, instead of the datasheet's.")] = None,
    reserve: Annotated[
        float | None, typer.Option(help="GiB that a GPU needs beside weights and cache; default: a guess.")
    ] = None,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens of an engine step.")] = _DEFAULT.max_batched,
    max_seqs: Annotated[int | None, typer.Option(help="vLLM's max_num_seqs; default: vLLM's for the card.")] = None,
    requests: Annotated[int | None, typer.Option(help="Play so many requests that come at once, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a server: how many users fit a card with and without Nitro, and how fast it could be at best.

    Arithmetic alone, in a moment, on any machine; docs/plan.md has the formulas and how near they come.
    """
    if budget is None and ratio is None:
        budget = _DEFAULT.budget
    values: dict[str, Any] = {
        "prompt": prompt,
        "answer": answer,
        "budget": budget,
        "ratio": ratio,
        "slack": slack,
        "sinks": sinks,
        "window": window,
        "evict_prompt": evict_prompt,
        "kv_dtype": kv_dtype,
        "weight_bits": weight_bits,
        "tensor_parallel": tensor_parallel,
        "block_size": block_size,
        "utilisation": gpu_memory_utilization,
        "memory_gib": memory,
        "reserve_gib": reserve,
        "max_batched": max_batched_tokens,
        "max_seqs": max_seqs,
        "requests": requests,
    }
    try:
        made = make_plan(Question(model, card, **values))
    except NitroError as error:
        typer.echo(f"nitro plan: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=1))
    else:
        Console().print(render(made))
