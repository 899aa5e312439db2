"""Run the whole oracle matrix; print a line per mode and scenario: python ci/oracle.py [mode ...] [--json FILE]."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    from nitro.testing import matrix, models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", default=list(matrix.MODES), help=f"of {', '.join(matrix.MODES)}")
    parser.add_argument("--json", type=Path, help="write every cell there")
    arguments = parser.parse_args()
    cells, bad, started = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, (arch, heads) in matrix.ARCHITECTURES.items():
            paths[name] = models.make_tiny_model(Path(folder) / name, arch, num_kv_heads=heads, vocab=512, max_len=1024)
        references = {name: models.load_model(path) for name, path in paths.items()}
        for mode in arguments.modes:
            for scenario in matrix.SCENARIOS.values():
                for arch, path in paths.items():
                    with matrix.engine(path, scenario, mode) as llm:
                        for policy in matrix.POLICIES:
                            outcome = matrix.run_cell(llm, references[arch], scenario, policy)
                            faults = outcome.faults(scenario)
                            bad += len(faults)
                            head = {"mode": mode, "scenario": scenario.name, "arch": arch, "policy": policy}
                            cells.append({**head, **matrix.summary(outcome), "faults": faults})
                            for fault in faults:
                                print("FAULT", head, fault, flush=True)
                    print(f"{time.monotonic() - started:6.0f} s: {mode} {scenario.name} {arch} done", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(cells, indent=1))
    columns = [
        "tokens",
        "after_eviction",
        "mismatches",
        "differs_from_full",
        "evictions",
        "preemptions",
        "cached_tokens",
    ]
    columns += ["prompt_evictions"]
    table = Table("mode", "scenario", "cells", *columns, "max_logprob_error")
    for mode in arguments.modes:
        for name in matrix.SCENARIOS:
            row = [cell for cell in cells if cell["mode"] == mode and cell["scenario"] == name]
            sums = [str(sum(cell[column] for cell in row)) for column in columns]
            table.add_row(mode, name, str(len(row)), *sums, f"{max(cell['max_logprob_error'] for cell in row):.1e}")
    table.add_section()
    table.add_row("all", "", str(len(cells)), *(str(sum(cell[column] for cell in cells)) for column in columns), "")
    Console(width=200).print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
