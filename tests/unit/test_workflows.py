"""CI's files: they parse, run when they should, and call what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_both_are_there() -> None:
    assert {path.stem for path in WORKFLOWS} == {"cpu", "gpu-l4"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_calls_only_what_exists(path: Path) -> None:
    workflow = load(path.stem)
    assert workflow["permissions"] == {"contents": "read"}
    text = "\n".join(step.get("run", "") for step in steps(workflow))
    scripts, targets = set(re.findall(r"\bci/[\w.]+", text)), set(re.findall(r"\bmake (\w+)", text))
    assert scripts | targets, "nothing of ours is called"
    for script in scripts:
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= known
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        if "run" in step:
            subprocess.run(["bash", "-n"], input=re.sub(r"\$\{\{.*?\}\}", "x", step["run"]), text=True, check=True)
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_the_cpus_runs_all_of_make_test_for_every_push_and_pull_request() -> None:
    workflow = load("cpu")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 takes "on" for a boolean
    assert [step for step in steps(workflow) if step.get("run", "").startswith("make test")]
    assert any(step.get("with", {}).get("cache") == "pip" for step in steps(workflow))


def test_the_gpus_runs_tests_and_gates_on_its_own_runner() -> None:
    workflow = load("gpu-l4")
    assert set(workflow[True]) == {"workflow_dispatch", "schedule", "pull_request"}
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "gpu", "l4"]
    assert "labels" in job["if"]
    assert job["env"]["NITRO_REQUIRE_GPU"] == "1"
    text = "\n".join(step.get("run", "") for step in steps(workflow))
    for call in ("ci/gpu.sh gpu-results", "ci/perf.sh |", 'ci/perf.sh "$BASE" HEAD'):
        assert call in text
    assert all("if" in step for step in steps(workflow) if "upload-artifact" in step.get("uses", ""))


def test_ci_scripts_are_executable() -> None:
    for script in (ROOT / "ci").glob("*.sh"):
        assert script.stat().st_mode & 0o111, script
        subprocess.run(["bash", "-n", str(script)], check=True)
