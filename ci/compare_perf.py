#!/usr/bin/env python3
"""Compare the figures of two commits, or keep those of one as a card's baseline.

    python3 ci/compare_perf.py BASE.json HEAD.json
    python3 ci/compare_perf.py --record RESULTS.json tests/perf/baselines/CARD.json

The exit code is 1 if a metric of head is worse than that of base by more than its noise (tests/lib/gates.py states it),
or is missing; 2 if the files cannot be compared. Both files are of ci/measure_perf.py, on one card in turn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

from gates import GateError, Results
from perf_compare import FAILURES, compare, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--record", action="store_true", help="write the medians of the first file to the second one")
    arguments = parser.parse_args()
    try:
        base = Results.load(arguments.base)
        if arguments.record:
            medians = {name: [value] for name, value in base.medians().items()}
            Results(base.card, base.about, medians).save(arguments.head)
            print(f"{len(medians)} figures of {base.card} kept in {arguments.head}")
            return 0
        head = Results.load(arguments.head)
    except GateError as error:
        print(f"compare_perf: {error}", file=sys.stderr)
        return 2
    if base.card != head.card:
        print(f"compare_perf: {base.card} and {head.card} are different cards: measure both on one", file=sys.stderr)
        return 2
    rows = compare(base, head)
    if not rows:
        print("compare_perf: there is nothing in either file: see the logs of ci/measure_perf.py", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows, head.card))
    bad = [row for row in rows if row.verdict in FAILURES]
    for row in bad:
        print(f"{row.verdict}: {row.metric}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
