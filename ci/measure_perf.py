#!/usr/bin/env python3
"""Measure what the gates on speed judge, and add the figures to a JSON file: `ci/perf.sh` calls this in turn.

    python3 ci/measure_perf.py GROUP --json FILE [--root CHECKOUT] [--site FOLDER]

Groups: host (without a GPU), kernels, essay, ample. With --root and --site, the benchmarks of that checkout run on the
Nitro that was installed into that folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

from gates import GateError, Results, slug
from perf_measure import GROUPS, ROOT, MeasureError, Measurer, facts, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--json", type=Path, required=True, help="figures are added to those that are there")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--site", type=Path, help="the folder of `pip install --target`")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        about = facts(arguments.root)
        results = Results.load(arguments.json) if arguments.json.exists() else Results(slug(about["device"]), about)
        site = arguments.site.resolve() if arguments.site else None
        results.add(measure(arguments.group, Measurer(arguments.root.resolve(), site)))
    except (GateError, MeasureError) as error:
        print(f"measure_perf: {error}", file=sys.stderr)
        return 1
    results.save(arguments.json)
    print(f"{arguments.group} of {arguments.root}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
