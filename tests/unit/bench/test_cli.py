"""The command line: what is refused before anything starts, and two real comparisons on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import make_run
from rich.console import Console
from typer.testing import CliRunner

from nitro.bench import app, explain, fleet, machine, results
from nitro.bench.attribution import PARTS, Steps, fit, split
from nitro.bench.plan import Load, Plan
from nitro.bench.recorder import SECTIONS
from nitro.bench.runner import Runner
from nitro.bench.store import Store
from nitro.cli import main
from nitro.device import Device

SMALL = ["--model", "tiny", "--requests", "10", "--prompt", "64", "--answer", "80", "--budget", "48", "--slack", "16"]
SMALL += ["--rounds", "1"]


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.fixture
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.Machine(Device("cpu", "a test", {"dtype": "float32", "block_size": 32}), 10**10, 1e9, {})
    monkeypatch.setattr(app.machine, "probe", lambda: here)


@pytest.mark.usefixtures("_no_machine")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stress", "--model", "gpt-9"), "model 'gpt-9' is neither a known shape nor a folder"),
        (("stress", "--model", "tiny", "--pool", "lots"), "pool='lots' is no pool"),
        (("stress", "--model", "tiny", "--pool", "3"), "pool=3 is 3 blocks of 32 tokens, below the 65"),
        (("stress", "--model", "tiny", "--budget", "7"), "budget=7 is below sinks + window"),
        (("stress", "--model", "tiny", "--policy", "keydif"), "keydif"),
        (("stress", "--model", "tiny", "--requests", "0"), "requests=0 is below 1"),
        (("stress", "--model", "tiny", "--engines", "some"), "engines='some' is unknown: give one of auto, together"),
        (("stress", "--model", "tiny", "--limit", "-1"), "limit=-1.0 is below 0"),
        (("stress", "--model", "llama-3.1-8b", "--pool", "500"), "engine 'stock' needs about 37.8 GB"),
        (("explain", "--model", "tiny", "--pool", "full"), "is 131073 blocks, not more than the 131073 of pool=full"),
        (("explain", "--model", "tiny", "--fp8"), "fp8 needs a GPU, this machine is a test: leave --fp8 out"),
        (("sweep", "--requests", "8,many"), "requests='8,many' is not a list of numbers"),
        (("sweep", "--requests", "8,0"), "requests=0 is below 1"),
        (("sweep", "--retention", "50,0"), "retention=0 is not within (0, 100]: give percent of a request's tokens"),
        (("sweep", "--retention", "100.5"), "retention=100.5 is not within (0, 100]"),
        (("sweep", "--retention", "1"), "retention=1 of 2000 tokens is a budget of 20"),
    ],
)
def test_what_cannot_run_is_refused_at_once(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = bench(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert said in " ".join(result.output.split())
    assert f"nitro bench {arguments[0]}: " in result.output


def test_help_names_the_defaults_of_the_essay() -> None:
    for command in ("stress", "explain", "sweep"):
        text = bench(command, "--help").output
        assert all(default in text for default in ("2048", "1000", "qwen2.5-0.5b", "l4"))


@pytest.fixture
def _pretended(_no_machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines that take as long as they have no blocks, and no time."""
    run = {key: value for key, value in make_run("", 0, 1.0).items() if key not in ("engine", "load", "round")}
    (tmp_path / "run.json").write_text(json.dumps(run))
    script = f"""
import json, os, sys
spec, events = json.load(open(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
print(json.dumps({{"ready_s": 0.0}}), file=events)
run = json.load(open({str(tmp_path / "run.json")!r}))
run |= {{"seconds": 100 / spec["blocks"], "tokens_per_s": spec["blocks"], "session": 0}}
for line in sys.stdin:
    print(json.dumps({{"result": run}}), file=events)
"""
    monkeypatch.setattr(fleet, "COMMAND", (sys.executable, "-c", script))


@pytest.mark.usefixtures("_pretended")
def test_stress_writes_its_table_picture_and_data(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = bench("stress", *SMALL, "--pool", "20", "--rounds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "nitro / stock: 1.000 (1.000 to 1.000)" in result.output
    found = json.loads((out / "results.json").read_text())
    assert [len(of) for of in found["runs"].values()] == [2, 2]
    assert found["complete"]
    assert "attribution" not in found
    assert (out / "bench.png").exists()


@pytest.mark.usefixtures("_pretended")
def test_explain_writes_its_tables_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = ["explain", *SMALL, "--pool", "20", "--ample", "40", "--out", str(tmp_path / "out")]
    result = bench(*command)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert sum(found["attribution"]["arrows"]["stock, tight → stock, ample"].values()) == pytest.approx(
        100 / 20 - 100 / 40
    )
    for title in ("Seconds saved, by cause", "A step's time on the host", "Roofline at the copy bandwidth"):
        assert title in result.output
    again = bench(*command)
    assert "ready after" in result.output
    assert "ready after" not in again.output
    other = bench(*command, "--slack", "20")
    assert other.exit_code == 1
    assert "slack was 16, now 20" in " ".join(other.output.split())


@pytest.mark.usefixtures("_pretended")
def test_sweep_has_a_cell_for_each_number_and_ratio(tmp_path: Path) -> None:
    command = ["sweep", "--model", "tiny", "--prompt", "64", "--answer", "80", "--slack", "16", "--pool", "20"]
    command += ["--requests", "4,10", "--retention", "50,100", "--rounds", "2", "--out", str(tmp_path / "out")]
    result = bench(*command)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    cells = {(cell["requests"], cell["percent"]): cell for cell in found["cells"]}
    assert list(cells) == [(10, 100), (10, 50), (4, 100), (4, 50)]
    assert cells[4, 50]["budget"] == 72
    assert cells[4, 50]["ratios"] == [1.0, 1.0]
    # Each number of requests is served by both, and at each lower ratio by Nitro alone.
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2 * 2 * (2 + 1)
    assert "no eviction" in result.output
    assert "budget 72" in result.output
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    again = bench(*command)
    assert "ready after" not in again.output
    assert "1.00 (100 %; 1)" in again.output


@pytest.mark.usefixtures("_pretended")
def test_a_sweep_without_evictions_is_no_sweep(tmp_path: Path) -> None:
    run = json.loads((tmp_path / "run.json").read_text()) | {"evictions": 0}
    (tmp_path / "run.json").write_text(json.dumps(run))
    options = ["--model", "tiny", "--prompt", "64", "--answer", "80", "--pool", "20", "--requests", "4"]
    result = bench("sweep", *options, "--slack", "72", "--retention", "50", "--out", str(tmp_path / "none"))
    assert result.exit_code == 0, result.output  # budget and slack are the whole request
    result = bench("sweep", *options, "--slack", "71", "--retention", "50", "--out", str(tmp_path / "some"))
    assert result.exit_code == 1
    assert "evicted nothing of 4 x (64 + 80), budget 72" in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.engine
def test_sweep_from_end_to_end(tmp_path: Path) -> None:
    """Real engines: requests keep to their own budgets, and those without one are never evicted."""
    options = ["--model", "tiny", "--prompt", "64", "--answer", "80", "--pool", "60", "--requests", "10"]
    result = bench("sweep", *options, "--retention", "100,33", "--slack", "16", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    full, third = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert (full["peak"], full["preemptions"]) == (1.0, 0)
    assert third["peak"] < 0.6
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").iterdir())]
    assert [run["evictions"] > 0 for run in runs] == [False, False, True]


@pytest.mark.engine
def test_recorded_engines_side_by_side(plan: Plan, tmp_path: Path) -> None:
    """Real engines in processes of their own: what is recorded inside agrees with what vLLM's front-end counts."""
    tight = dataclasses.replace(plan, engines=(plan.engines[0], plan.engines[-1]), loads=(Load(10, 64, 80),), rounds=1)
    store = Store(tmp_path, tight.manifest())
    here = machine.Machine(tight.device, 10**11, 1e9, {})
    assert Runner(tight, store, here, Console(quiet=True), mode="together").run()
    runs = {name: of[0] for name, of in results.runs(tight, store).items()}
    stock, nitro = runs[explain.STOCK_TIGHT], runs[explain.NITRO_TIGHT]
    assert stock["preemptions"] > nitro["preemptions"] == 0 == stock["evictions"] < nitro["evictions"]
    assert nitro["steps"] < stock["steps"]
    assert stock["peak_blocks"] <= 19
    for name, run in runs.items():
        _check_recording(name, run)
    assert sum(stock["recording"]["columns"]["again"]) > 0 == sum(nitro["recording"]["columns"]["again"])
    # With Nitro a request reads at most budget and slack; with stock, what it has.
    assert sum(nitro["recording"]["columns"]["kv_tokens"]) <= 10 * 79 * (48 + 16 + 1)
    steps = [Steps.of(kind, run) for kind, run in (("stock", stock), ("nitro", nitro))]
    parts = split(*steps, fit(steps))
    assert sum(parts.values()) == pytest.approx(stock["seconds"] - nitro["seconds"])


def _check_recording(name: str, run: dict[str, Any]) -> None:
    columns = run["recording"]["columns"]
    # Each token of prompts and answers is computed once, but the last ones; the rest is computed again.
    assert sum(columns["tokens"]) - sum(columns["again"]) == 10 * (64 + 79), name
    assert sum(columns["evictions"]) == run["evictions"]
    assert sum(columns["preempted"]) == run["preemptions"]
    sections = sum(sum(columns[f"{section}_s"]) for section in SECTIONS)
    assert 0.5 * sum(columns["seconds"]) < sections <= sum(columns["seconds"]) <= run["seconds"]
    for section in ("scheduler", "preparation", "forward", "attention", "sampler"):
        assert sum(columns[f"{section}_s"]) > 0, (name, section)
    for section in ("nitro_scheduler", "nitro_worker"):
        assert (sum(columns[f"{section}_s"]) > 0) == name.startswith("nitro"), (name, section)


@pytest.mark.slow
@pytest.mark.engine
def test_explain_from_end_to_end(tmp_path: Path) -> None:
    """All four engines, each in a process of its own, which ends before the next begins."""
    out = tmp_path / "out"
    result = bench("explain", *SMALL, "--pool", "20", "--engines", "fresh", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads((out / "results.json").read_text())
    assert found["complete"]
    runs = {name: of[0] for name, of in found["runs"].items()}
    assert set(runs) == set(explain.WAY)
    tight, ample, nitro = (runs[name] for name in (explain.STOCK_TIGHT, explain.STOCK_AMPLE, explain.NITRO_TIGHT))
    assert tight["preemptions"] > 0 == ample["preemptions"] == ample["evictions"]
    assert tight["peak_blocks"] <= 19 < ample["peak_blocks"]
    assert nitro["evictions"] > 0
    assert nitro["steps"] < tight["steps"]

    parts = found["attribution"]["arrows"]
    assert set(parts["all"]) == set(PARTS)
    assert sum(parts["all"].values()) == pytest.approx(tight["seconds"] - nitro["seconds"])
    recorded = {name: _recording(out, name) for name in explain.WAY}
    for name, run in recorded.items():
        _check_recording(name, run)
    # Unlimited, a request reads its prompt and what it has said in each step; with Nitro at most budget and slack.
    reads = sum(64 + said for said in range(1, 80))
    assert sum(recorded[explain.STOCK_AMPLE]["recording"]["columns"]["kv_tokens"]) == 10 * reads
    assert sum(recorded[explain.NITRO_AMPLE]["recording"]["columns"]["kv_tokens"]) <= 10 * 79 * (48 + 16 + 1)
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def _recording(out: Path, name: str) -> dict[str, Any]:
    slug = name.replace(", ", "-")
    run: dict[str, Any] = json.loads((out / "runs" / f"load0-round0-{slug}.json").read_text())
    return run


@pytest.mark.slow
@pytest.mark.engine
def test_stress_from_end_to_end_without_a_look_inside(tmp_path: Path) -> None:
    result = bench("stress", *SMALL, "--pool", "20", "--engines", "together", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    stock, nitro = (found["runs"][name][0] for name in ("stock", "nitro"))
    assert stock["preemptions"] > nitro["preemptions"] == 0 < nitro["evictions"]
    (ratio,) = found["ratios"]
    assert ratio["values"] == [nitro["tokens_per_s"] / stock["tokens_per_s"]]
    assert "attribution" not in found
