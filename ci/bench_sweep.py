#!/usr/bin/env python3
"""Which blocks hold no live token any longer? The same sweep three ways, and the ledger's time in an engine step.

    python ci/bench_sweep.py [--requests 2048] [--nested-seconds 60] [--json FILE]

The three ways (tests/lib/sweep_bench.py): two nested Python loops, a Python set, and C++. The nested loops run at
growing sizes for as long as the given time allows; sizes that are left out are said to be, not extrapolated. Times are
processor time of the thread, the shortest of several calls (the nested loops run once).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "lib"))

from sweep_bench import SIZES, EssayLedger, growth, hash_sweep, make_pool, native_sweep, nested_loops, seconds

NESTED_SIZES = (2_000, 5_000, 10_000, 20_000, 50_000, *SIZES)


def sweeps(nested_seconds: float) -> list[dict[str, Any]]:
    rows, left = [], nested_seconds
    for size in NESTED_SIZES:
        pool = make_pool(size)
        blocks, live = pool.blocks.tolist(), pool.live.tolist()
        native, python = native_sweep(pool).tolist(), hash_sweep(blocks, live)
        if native != python:
            raise SystemExit(f"C++ and Python find different blocks among {size:,} slots")
        row: dict[str, Any] = {"slots": size, "blocks": len(blocks), "live": len(live), "dead": len(native)}
        row["native_s"] = seconds(lambda p=pool: native_sweep(p), 9)
        row["python_s"] = seconds(lambda b=blocks, a=live: hash_sweep(b, a), 5)
        # The next size takes at least four times as long as the last one did.
        last = next((r["nested_s"] for r in reversed(rows) if r["nested_s"] is not None), 0.0)
        row["nested_s"] = None
        if 4 * last < left:
            started = time.thread_time()
            if nested_loops(blocks, live) != native:
                raise SystemExit(f"the nested loops find other blocks among {size:,} slots")
            row["nested_s"] = time.thread_time() - started
            left -= row["nested_s"]
        rows.append(row)
    return rows


def exponent(rows: list[dict[str, Any]], key: str) -> float:
    measured = [row for row in rows if row[key] is not None]
    return growth([row["slots"] for row in measured], [row[key] for row in measured])


def ledger(requests: int, steps: int = 512) -> dict[str, float]:
    essay = EssayLedger(requests)
    for _ in range(EssayLedger.SLACK):
        essay.step()
    taken = [essay.step() for _ in range(steps)]
    milliseconds = [1e3 * spent for spent, _, _ in taken]
    return {
        "requests": requests,
        "evictions": statistics.fmean(count for _, count, _ in taken),
        "adoptions": statistics.fmean(count for _, _, count in taken),
        "mean_ms": statistics.fmean(milliseconds),
        "median_ms": statistics.median(milliseconds),
        "p99_ms": statistics.quantiles(milliseconds, n=100)[-1],
    }


def milliseconds(value: float | None) -> str:
    return "not run" if value is None else f"{1e3 * value:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--nested-seconds", type=float, default=60.0, help="for the nested loops in all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = sweeps(arguments.nested_seconds)
    print("| slots | blocks | live slots | dead blocks | nested loops, ms | Python set, ms | C++, ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(milliseconds(row[key]) for key in ("nested_s", "python_s", "native_s"))
        print(f"| {row['slots']:,} | {row['blocks']:,} | {row['live']:,} | {row['dead']:,} | {times} |")
    large = [row for row in rows if row["slots"] in SIZES]
    exponents = {
        "nested": exponent(rows, "nested_s"),
        "python": exponent(large, "python_s"),
        "native": exponent(large, "native_s"),
    }
    print(f"\ntime grows with slots^x: nested {exponents['nested']:.2f}, over what was run;", end=" ")
    print(f"Python {exponents['python']:.2f}, C++ {exponents['native']:.2f}, from {SIZES[0]:,} to {SIZES[-1]:,} slots")
    step = ledger(arguments.requests)
    print(
        f"the ledger's part of a step of {step['requests']:,.0f} requests ({step['evictions']:.0f} evictions, "
        f"{step['adoptions']:.0f} new blocks): mean {step['mean_ms']:.3f} ms, median {step['median_ms']:.3f}, "
        f"99th percentile {step['p99_ms']:.3f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"sweeps": rows, "growth": exponents, "ledger": step}, indent=1))


if __name__ == "__main__":
    main()
