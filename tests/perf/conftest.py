"""The judge of this machine's card, and its table at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gates import load_baseline, load_targets, slug
from perf_judge import Judge
from perf_measure import facts
from rich.console import Console

_JUDGE = pytest.StashKey[Judge]()


@pytest.fixture(scope="session")
def perf(pytestconfig: pytest.Config) -> Judge:
    about = facts()
    card = slug(about["device"])
    judge = pytestconfig.stash[_JUDGE] = Judge(card, load_targets(card), load_baseline(card), about)
    return judge


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    judge = config.stash.get(_JUDGE, None)
    if judge is None or not judge.verdicts:
        return
    console = Console(width=120)
    with console.capture() as capture:
        console.print(judge.table())
    terminalreporter.write_line(capture.get())
    if file := os.environ.get("NITRO_PERF_JSON"):
        judge.results.save(Path(file))
        terminalreporter.write_line(f"figures written to {file}")
