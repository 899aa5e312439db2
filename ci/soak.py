#!/usr/bin/env python3
"""Let requests come and go on real engines for minutes, and see that nothing is lost, left behind or wrong.

    python -P ci/soak.py --minutes 10 [--seed 0] [--sample 10] [--json FILE]

A tiny model on vLLM in one process, with so small a pool that requests are preempted, chunked prefill, prefix caching,
and evictions every few tokens; half of the time by a budget, the other half by a threshold. In each round, with a
policy and a seed of its own, 60 clients send prompts of 20 to 160 tokens, some with settings of their own, and hang up
at the worst moments (nitro.testing.storm). After each round every block must be free, the ledger and the workers empty
and the ledger's invariants proven; of the answers that were left alone, a sample must be, token by token, what the
masked oracle says. At the end the process must not have grown for as long as it was looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

POLICIES = ("keydiff", "streaming", "random", "gravity", "knorm", "kvdiff")
OWN = (
    None,
    None,
    {"budget": 40},
    {"budget": 90, "slack": 9},
    {"ratio": 0.6},
    {"enabled": False},
    {"evict_prompt": False},
)
OWN_BY_THRESHOLD = (None, None, {"enabled": False})
GROWTH = 64  # MiB that the process may grow by in the second half: allocators keep some of what they had


@dataclass
class Totals:
    """What came of all rounds."""

    rounds: int = 0
    completed: int = 0
    aborted: int = 0
    in_the_step_of_a_plan: int = 0
    preempted: int = 0
    evictions: int = 0
    tokens_evicted: int = 0
    blocks_freed: int = 0
    held_against_the_oracle: int = 0
    tokens_compared: int = 0
    mismatches: int = 0
    differs_from_full: int = 0
    faults: list[str] = field(default_factory=list)
    rss_mib: list[int] = field(default_factory=list)


def rss() -> int:
    """Return this process' memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def play(llm: Any, reference: Any, totals: Totals, load: Any, policy: str, seed: int, sample: int) -> None:
    """Play one round, and add what came of it."""
    from nitro.testing.pool import assert_pool_whole
    from nitro.testing.storm import run_storm

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.nitro.counters
    outcome = run_storm(llm, reference, load, policy=policy, seed=seed, sample=sample)
    assert_pool_whole(scheduler)
    after, moments, report = scheduler.nitro.counters, outcome.moments, outcome.report
    expected = load.requests - moments.aborted
    if outcome.completed != expected:
        totals.faults.append(f"seed {seed}: {outcome.completed} of {expected} requests were answered")
    if not outcome.pool_whole or outcome.left_over:
        totals.faults.append(f"seed {seed}: blocks held: {not outcome.pool_whole}, requests kept: {outcome.left_over}")
    # An argmax between two equals may fall either way; see nitro.testing.report.
    wrong = [mismatch for mismatch in report.mismatches if mismatch.gap > 1e-4]
    totals.faults += [f"seed {seed}: {mismatch}" for mismatch in wrong]
    totals.rounds += 1
    totals.completed += outcome.completed
    totals.aborted += moments.aborted
    totals.in_the_step_of_a_plan += moments.aborted_with_plan + moments.finished_with_plan
    totals.preempted += moments.preempted
    totals.evictions += after.evictions - before.evictions
    totals.tokens_evicted += after.tokens_evicted - before.tokens_evicted
    totals.blocks_freed += after.blocks_freed - before.blocks_freed
    totals.held_against_the_oracle += min(sample, outcome.completed)
    totals.tokens_compared += report.tokens_compared
    totals.mismatches += len(report.mismatches)
    totals.differs_from_full += report.differs_from_full
    totals.rss_mib.append(rss())


def soak(minutes: float, seed: int, sample: int) -> Totals:
    """Play rounds until the time is over; at least one by each of budget and threshold."""
    from nitro.testing import matrix, models, storm

    totals = Totals()
    halves = ((storm.SCENARIO, OWN), (storm.BY_THRESHOLD, OWN_BY_THRESHOLD))
    with tempfile.TemporaryDirectory() as folder:
        arch, heads = matrix.ARCHITECTURES["llama-gqa"]
        path = models.make_tiny_model(Path(folder) / "tiny", arch, num_kv_heads=heads, vocab=512, max_len=1024)
        reference = models.load_model(path)
        for scenario, own in halves:
            load = storm.Load(own=own)
            with matrix.engine(path, scenario, "in-process") as llm:
                end, first = time.monotonic() + minutes * 60 / len(halves), len(totals.rss_mib)
                while len(totals.rss_mib) == first or time.monotonic() < end:
                    policy = POLICIES[totals.rounds % len(POLICIES)]
                    if scenario is storm.BY_THRESHOLD:
                        policy = "random"  # of which a threshold between 0 and 1 keeps a known share
                    try:
                        play(llm, reference, totals, load, policy, seed + totals.rounds, sample)
                    except Exception:  # whatever it is, it is a finding, and this engine may be broken
                        totals.faults.append(f"seed {seed + totals.rounds}: {traceback.format_exc()}")
                        break
                    print(f"{scenario.name} {policy}: {totals.completed} answered, rss {rss()} MiB", flush=True)
                grown = _growth(totals.rss_mib[first:])
                if grown > GROWTH:
                    totals.faults.append(f"{scenario.name}: grew by {grown} MiB in the second half")
    return totals


def _growth(rss_mib: list[int]) -> int:
    """Return by how much memory has grown in the second half; 0 of fewer than eight rounds, which say nothing."""
    return rss_mib[-1] - rss_mib[len(rss_mib) // 2] if len(rss_mib) >= 8 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=10, help="answers of a round that the oracle checks")
    parser.add_argument("--json", type=Path, help="write the totals there")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or arguments.sample < 1:
        parser.error("--minutes must be above 0 and --sample at least 1")
    totals = soak(arguments.minutes, arguments.seed, arguments.sample)
    # What was not exercised was not tested.
    for name in ("aborted", "preempted", "in_the_step_of_a_plan", "evictions", "differs_from_full"):
        if not getattr(totals, name):
            totals.faults.append(f"{name} is 0: the soak has no power")
    shown = asdict(totals)
    if arguments.json:
        arguments.json.write_text(json.dumps(shown, indent=1))
    memory = shown.pop("rss_mib")
    print("\n".join(f"{name:24} {value}" for name, value in shown.items() if name != "faults"))
    print(f"{'memory, MiB':24} {memory[0]} to {memory[-1]}" if memory else "no round was finished")
    for fault in totals.faults:
        print("FAULT", fault)
    print("FAILED" if totals.faults else "ok")
    return bool(totals.faults)


if __name__ == "__main__":
    sys.exit(main())
