"""Parity with kvpress runs in an environment of its own (ci/kvpress.sh), on the CPU, with Triton's interpreter."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

if importlib.util.find_spec("kvpress") is not None:
    # The interpreter is ten times as fast with the patch that the kernels' own tests make.
    runpy.run_path(str(Path(__file__).parents[1] / "unit" / "kernels" / "conftest.py"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    parity = sys.modules.get("kvpress_parity")
    tallies = parity.TALLIES if parity is not None else {}
    if not tallies:
        return
    terminalreporter.section("kept tokens, Nitro's and kvpress's")
    total: Counter[str] = sum(tallies.values(), Counter())
    for label, tally in [*sorted(tallies.items()), ("in all", total)]:
        terminalreporter.write_line(
            f"{label:45} {tally['kept']:9,} compared, {tally['tied']:5,} differ as exact ties, "
            f"{tally['rounded']:5,} within rounding"
        )
