#!/usr/bin/env python3
"""Host time of a worker's part of a step's evictions, without a model and without a GPU.

    python3 ci/bench_worker.py [--evictions 30] [--steps 500] [--json FILE]

What vLLM has on the device (block tables, caches) is small and on the CPU; kernels and graphs are not launched. What is
timed is the rest: checking a plan, the tables and numbers for the kernels, the requests' own block tables, and what a
plan costs on its way to another process. Requests hold 394 slots in blocks of 16 and keep 330, in place; vLLM's V1 and
V2 runners.
Usual evictions are those that an engine makes by a CUDA graph, others (of prompts) launch their kernels one by one.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.worker.block_table import BlockTable

from nitro import kernel_compactor, policies
from nitro.compactor import Compactor
from nitro.integration.vllm.caches import stable_id
from nitro.integration.vllm.runner_v1 import NitroRunnerMixin
from nitro.integration.vllm.runner_v2 import NitroV2ModelRunner
from nitro.kernel_compactor import KernelCompactor
from nitro.kernels.paged import PagedLayers
from nitro.types import Eviction, StepPlan

BLOCK, HELD, KEEP, REQUESTS, BLOCKS = 16, 394, 330, 2048, 10**5
SRC, DST = -(-HELD // BLOCK), -(-KEEP // BLOCK)


def make_compactor(usual: bool) -> KernelCompactor:
    """Return a KernelCompactor on a cache whose few bytes stand for all blocks, whose kernels are not compiled."""
    layers = PagedLayers.of([torch.zeros(1, 2, BLOCK, 16).expand(BLOCKS, 2, BLOCK, 16)])
    untried = mock.patch.object(KernelCompactor, "set_policy", lambda self, policy: setattr(self, "policy", policy))
    with untried, mock.patch.object(KernelCompactor, "_warm_up"):
        return KernelCompactor(
            layers,
            [0],
            [0, 1],
            policies.get("keydiff"),
            sinks=4,
            window=32,
            seed=0,
            longest=512,
            usual=512 if usual else 0,
            stable_id=stable_id,
        )


def make_runner(kind: str, usual: bool, names: list[str]) -> Any:
    """Return a runner with block tables for these requests."""
    compactor: Compactor = make_compactor(usual)
    rows = {name: row for row, name in enumerate(names)}
    if kind == "V1":
        runner: Any = object.__new__(type("Runner", (NitroRunnerMixin,), {}))
        older = {"kernel_block_size": BLOCK} if "kernel_block_size" in signature(BlockTable).parameters else {}
        table = BlockTable(
            BLOCK, REQUESTS, 256, 8192, False, torch.device("cpu"), cp_kv_cache_interleave_size=1, **older
        )
        runner.input_batch = SimpleNamespace(req_id_to_index=rows, block_table=[table])
        runner.requests = {name: SimpleNamespace(block_ids=([],)) for name in names}
    else:
        runner = object.__new__(NitroV2ModelRunner)
        runner.device = torch.device("cpu")
        runner.req_states = SimpleNamespace(req_id_to_index=rows)
        runner.block_tables = SimpleNamespace(num_blocks=SimpleNamespace(np=np.zeros((1, REQUESTS), np.int32)))
        runner._nitro_evicted = np.zeros(REQUESTS, np.int32)
    runner.nitro = compactor
    return runner


def run(kind: str, usual: bool, evictions: int, steps: int) -> dict[str, Any]:
    names = [f"cmpl-{number:032x}-0-{number:08x}" for number in range(REQUESTS)]
    runner = make_runner(kind, usual, names)
    held = dict.fromkeys(names, (0, HELD))  # epoch, logical length
    seconds: dict[str, list[float]] = {"apply": [], "pickle": []}
    size = 0

    def timed(what: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        seconds[what].append(time.perf_counter() - started)
        return result

    generator = np.random.default_rng(0)
    for _ in range(steps):
        step = []
        for name in generator.choice(names, evictions, replace=False).tolist():
            epoch, logical = held[name]
            blocks = generator.integers(1, BLOCKS, SRC).astype(np.int32)
            if kind == "V1":
                runner.requests[name].block_ids[0][:] = blocks.tolist()
            step.append(Eviction(name, epoch, logical, HELD, KEEP, 4, blocks[:DST], blocks))
            held[name] = (epoch + 1, logical + HELD - KEEP)
        plan = StepPlan.of(step, BLOCK)
        sent = timed("pickle", lambda plan=plan: pickle.dumps(plan, protocol=5))
        plan = timed("pickle", lambda sent=sent: pickle.loads(sent))
        size = len(sent)
        timed("apply", lambda plan=plan: runner._nitro_apply(plan))
    apply = 1e6 * statistics.median(seconds["apply"])
    pickled = 2e6 * statistics.median(seconds["pickle"])
    return {
        "runner": kind,
        "usual": usual,
        "evictions": evictions,
        "apply_us": apply,
        "pickle_us": pickled,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evictions", type=int, default=30, help="in each step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with mock.patch.object(kernel_compactor, "stamp_positions"), mock.patch.object(KernelCompactor, "_score_part"):
        others = [run(kind, False, arguments.evictions, arguments.steps) for kind in ("V1", "V2")]
    with mock.patch.object(KernelCompactor, "_evict_static"):
        results = [run(kind, True, arguments.evictions, arguments.steps) for kind in ("V1", "V2")] + others
    print("| runner | evictions a step | _nitro_apply, median µs | for each | pickled and back, µs | bytes |")
    print("|---|---|---|---|---|---|")
    for row in results:
        each = row["apply_us"] / row["evictions"]
        print(
            f"| {row['runner']} | {row['evictions']} {'usual' if row['usual'] else 'other'} | {row['apply_us']:.0f} "
            f"| {each:.1f} | {row['pickle_us']:.0f} | {row['bytes']:,} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
