"""Base against head on made-up figures, and what ci/compare_perf.py makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gates import METRICS, Results
from hypothesis import given
from hypothesis import strategies as st
from perf_compare import compare

SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "compare_perf.py"


def verdict(name: str, base: list[float], head: list[float]) -> str:
    (row,) = compare(Results("l4", {}, {name: base} if base else {}), Results("l4", {}, {name: head} if head else {}))
    return row.verdict


@pytest.mark.parametrize(
    ("name", "base", "head", "expected"),
    [
        ("ample.8", [1.0, 1.01, 0.99], [0.96, 0.96, 0.96], "same"),
        ("ample.8", [1.0, 1.01, 0.99], [0.94, 0.94, 0.94], "regression"),
        ("ample.8", [1.0, 1.01, 0.99], [1.06, 1.06, 1.06], "improvement"),
        ("host.worker_us", [100], [116], "regression"),
        ("host.worker_us", [100], [114], "same"),
        ("host.worker_us", [100], [84], "improvement"),
        ("essay.footprint", [0.16], [0.162], "regression"),
        # Base differs from itself by 7 % each way: so may head. But never by more than twice the stated noise.
        ("ample.8", [0.93, 1.0, 1.07], [0.94], "same"),
        ("ample.8", [0.5, 1.0, 1.5], [0.89], "regression"),
        # One round of three that went wrong is none.
        ("ample.8", [1.0, 1.0, 1.0], [0.5, 1.0, 1.0], "same"),
        ("ample.8", [1.0], [], "missing"),
        ("ample.8", [1.0], [float("nan")], "missing"),
        ("ample.8", [], [1.0], "new"),
    ],
)
def test_verdicts(name: str, base: list[float], head: list[float], expected: str) -> None:
    assert verdict(name, base, head) == expected


values = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=5)


@given(name=st.sampled_from(sorted(METRICS)), base=values, head=values)
def test_properties(name: str, base: list[float], head: list[float]) -> None:
    assert verdict(name, base, base) == "same"
    if verdict(name, base, head) == "improvement":
        assert verdict(name, head, base) in ("regression", "same")
    ruined = [1e-6] if METRICS[name].better == "higher" else [1e9]
    assert verdict(name, base, ruined) == "regression"


def run(tmp_path: Path, base: Results, head: Results, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, results in (("base", base), ("head", head)):
        results.save(tmp_path / f"{name}.json")
    command = [sys.executable, "-P", str(SCRIPT), str(tmp_path / "base.json"), str(tmp_path / "head.json"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script(tmp_path: Path) -> None:
    base = Results("l4", {}, {"ample.8": [1.0, 1.0], "ample.256": [1.0], "host.worker_us": [100.0]})
    head = Results("l4", {}, {"ample.8": [0.5, 0.5], "host.worker_us": [50.0], "host.step_us": [9.0]})
    done = run(tmp_path, base, head)
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "." in line}
    expected = ("ample.8", "regression", "-50.0%"), ("ample.256", "missing", ""), ("host.worker_us", "improvement", "+")
    for name, said, change in expected:
        assert said in rows[name]
        assert change in rows[name]
    assert "new" in rows["host.step_us"]
    assert sorted(done.stderr.split("\n")) == ["", "missing: ample.256", "regression: ample.8"]
    assert run(tmp_path, base, base).returncode == 0


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one, other = Results("l4", {}, {"ample.8": [1.0]}), Results("h200", {}, {"ample.8": [1.0]})
    done = run(tmp_path, one, other)
    assert (done.returncode, "different cards" in done.stderr) == (2, True)
    done = run(tmp_path, Results("l4"), Results("l4"))
    assert (done.returncode, "nothing in either file" in done.stderr) == (2, True)


def test_recording_a_baseline(tmp_path: Path) -> None:
    results = Results("l4", {"date": "2026-12-01"}, {"ample.8": [0.9, 1.0, 0.95]})
    assert run(tmp_path, results, Results("l4"), "--record").returncode == 0
    assert Results.load(tmp_path / "head.json") == Results("l4", {"date": "2026-12-01"}, {"ample.8": [0.95]})
