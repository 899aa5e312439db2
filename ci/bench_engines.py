#!/usr/bin/env python3
"""Suites of engines side by side on one GPU: throughput, latency, preemptions and blocks.

    python3 ci/bench_engines.py [--suite essay|ample|llama8b[_long][_fp8]] [--rounds N] [--json FILE] [--out FOLDER]

All engines of a suite are alive at once, each in processes of its own, and serve the same requests in turn, so that
what the machine does meanwhile hits all of them. For everything that is not in a suite: `nitro bench`, docs/bench.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nitro.bench import machine, results, shapes
from nitro.bench.plan import Engine, Load, Plan
from nitro.bench.runner import Runner
from nitro.bench.store import Store


@dataclass(frozen=True)
class Suite:
    """What runs on what. The engines of a suite are alive together, so their weights and pools have to fit together."""

    shape: str
    engines: tuple[Engine, ...]
    loads: tuple[Load, ...]
    rounds: int = 1


_ESSAY = {"policy": "keydiff", "budget": 256, "slack": 64}
_TIGHT = 91_750  # what an L4 has for this model
_LLAMA_BLOCKS = 9_000  # 18.9 GB; of FP8, twice as many blocks take as much


def _llama(load: Load, quarter: int) -> dict[str, Suite]:
    """Return two suites: with budgets of 1/4 and 1/8 of the tokens, and with FP8 caches; stock is in both.

    All five engines, each with 16 GB of weights and about 3 GB beside weights and pool, would not fit 140 GB. Nor
    would four with any ease.
    """
    stock = Engine("stock", _LLAMA_BLOCKS)
    # A slack costs memory, and a small one evictions, which cost what is read, about as much as the budget is long.
    to_quarter, to_eighth = (
        {"policy": "keydiff", "budget": budget, "slack": budget // 24} for budget in (quarter, quarter // 2)
    )
    engines = {
        "": (
            stock,
            Engine("nitro 1/4", _LLAMA_BLOCKS, to_quarter),
            Engine("nitro 1/8", _LLAMA_BLOCKS, to_eighth),
        ),
        "_fp8": (
            stock,
            Engine("stock, fp8", 2 * _LLAMA_BLOCKS, fp8=True),
            Engine("nitro 1/4, fp8", 2 * _LLAMA_BLOCKS, to_quarter, fp8=True),
        ),
    }
    return {name: Suite("llama-3.1-8b", chosen, (load,)) for name, chosen in engines.items()}


SUITES = {
    "essay": Suite(
        "qwen2.5-0.5b",
        (
            Engine("stock", _TIGHT),
            Engine("nitro", _TIGHT, _ESSAY),
            Engine("stock, pool without limit", 2048 * 126),
        ),
        (Load(2048, 1000, 1000),),
    ),
    "ample": Suite(
        "qwen2.5-0.5b",
        (Engine("stock", _TIGHT), Engine("nitro", _TIGHT, {"policy": "keydiff", "budget": 2048})),
        (Load(8, 256, 512), Load(256, 256, 384), Load(2048, 256, 256)),
        rounds=3,
    ),
    **{f"llama8b{name}": suite for name, suite in _llama(Load(256, 4096, 2048), 1536).items()},
    **{f"llama8b_long{name}": suite for name, suite in _llama(Load(128, 16_000, 1000), 4250).items()},
}


def run_suite(suite: Suite, rounds: int, here: machine.Machine, console: Console, folder: Path) -> dict[str, Any]:
    """Let the suite's engines serve each load in turn, ``rounds`` times; return the settings and all figures.

    What is in the folder already, of the same suite on the same machine, is not served again.
    """
    # With several rounds, one before them is for the caches of all kinds, and does not count.
    plan = Plan(shapes.find(suite.shape), suite.engines, suite.loads, here.device, rounds, warm_up=suite.rounds > 1)
    found = []
    store = Store(folder, plan.manifest())
    Runner(plan, store, here, console, mode="together").run()
    for index, load in enumerate(plan.loads):
        runs = results.runs(plan, store, index)
        for ratio in results.ratios(plan, runs):
            print(f"{load}: {ratio}", flush=True)
        found += [run for of in runs.values() for run in of]
    figures = [{key: value for key, value in run.items() if key != "series"} for run in found]
    return {"suite": plan.manifest(), "results": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: essay")
    parser.add_argument("--rounds", type=int, help="of each load; default: the suite's own number")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--out", type=Path, help="keep each run there, to go on if this is interrupted")
    arguments = parser.parse_args()
    console, here, found = Console(), machine.probe(), {}
    with tempfile.TemporaryDirectory(prefix="nitro-bench-") as temporary:
        for name in arguments.suite or ["essay"]:
            suite, folder = SUITES[name], (arguments.out or Path(temporary)) / name
            found[name] = run_suite(suite, arguments.rounds or suite.rounds, here, console, folder)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
