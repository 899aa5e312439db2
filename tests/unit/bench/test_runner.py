"""Rounds with processes that only pretend to be engines: order, resumption, limits, failures, memory."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nitro.bench import fleet, results
from nitro.bench.fleet import fit_together
from nitro.bench.machine import BenchError, Machine
from nitro.bench.plan import Engine, Load, Plan
from nitro.bench.runner import Runner, jobs
from nitro.bench.store import Store
from nitro.device import Device
from nitro.errors import SettingsError

# Answers each load at once; its name and process are in what it "measures".
PRETENDER = """
import json, os, sys
spec, events = json.load(open(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
say = lambda event: print(json.dumps(event), file=events)
say({"ready_s": 0.0, "versions": {}})
for line in sys.stdin:
    job = json.loads(line)
    say({"progress": {"tokens": 1, "running": 1, "usage": 0.5}})
    if spec["blocks"] == 666 and job["seed"] == 1:
        sys.exit("out of luck")
    figures = dict.fromkeys(("peak_blocks", "peak_running", "preemptions", "steps", "evictions"), 5)
    seconds = 1.0 + job["seed"]
    say({"result": {**figures, "seconds": seconds, "tokens_per_s": spec["blocks"] / seconds, "mean_running": 1.0,
                    "pid": os.getpid(), "seed": job["seed"], "series": {}}})
"""


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "COMMAND", (sys.executable, "-c", PRETENDER))


def machine_with(free: float, device: Device) -> Machine:
    return Machine(device, int(free), 1e9, {})


def pair(plan: Plan, **changes: Any) -> Plan:
    engines = (Engine("stock", 20), Engine("nitro", 40, {"policy": "keydiff", "budget": 48}))
    return dataclasses.replace(plan, engines=engines, record=False, **changes)


def run(plan: Plan, folder: Path, **options: Any) -> tuple[bool, Store, str]:
    printed = io.StringIO()
    store = Store(folder, plan.manifest())
    console = Console(file=printed, width=300)
    done = Runner(plan, store, machine_with(1e12, plan.device), console, **options).run()
    return done, store, printed.getvalue()


def test_every_other_round_goes_backwards(plan: Plan) -> None:
    two = pair(plan, rounds=3, loads=(Load(2, 8, 8), Load(1, 8, 8)))
    order = [(job.load, job.number, job.engine.name) for job in jobs(two)]
    assert order[:6] == [
        (0, 0, "stock"),
        (0, 0, "nitro"),
        (0, 1, "nitro"),
        (0, 1, "stock"),
        (0, 2, "stock"),
        (0, 2, "nitro"),
    ]
    assert [job[0] for job in order] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(("mode", "processes"), [("together", 2), ("auto", 2), ("fresh", 4)])
def test_engines_are_alive_together_or_fresh(plan: Plan, tmp_path: Path, mode: Any, processes: int) -> None:
    two = pair(plan)
    done, store, printed = run(two, tmp_path, mode=mode)
    assert done
    found = results.runs(two, store)
    assert len({one["pid"] for of in found.values() for one in of}) == processes
    assert [one["seed"] for one in found["stock"]] == [0, 1]  # new prompts in each round
    assert printed.count("tokens/s") == 4
    ratio = results.ratios(two, found)[0]
    assert (str(ratio), ratio.values) == ("nitro / stock: 2.000 (2.000 to 2.000)", (2.0, 2.0))
    assert not results.mixed_rounds(found)


def test_a_warm_up_does_not_count(plan: Plan, tmp_path: Path) -> None:
    done, store, printed = run(pair(plan, warm_up=True), tmp_path, mode="fresh")
    assert done
    assert printed.count("tokens/s") == 4
    assert len(list((store.folder / "runs").iterdir())) == 4


def test_an_interrupted_benchmark_goes_on(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlucky = pair(plan)
    unlucky = dataclasses.replace(unlucky, engines=(unlucky.engines[0], Engine("nitro", 666, {"budget": 48})))
    with pytest.raises(BenchError) as caught:
        run(unlucky, tmp_path, mode="together")
    assert "the nitro engine ended with status 1" in str(caught.value)
    assert str(caught.value).endswith("out of luck")
    # The first round is there; what is left is done by another process, which has better luck.
    monkeypatch.setattr(fleet, "COMMAND", (sys.executable, "-c", PRETENDER.replace("666", "667")))
    done, store, printed = run(unlucky, tmp_path, mode="together")
    assert done
    assert "2 runs to do, 2 done before" in printed
    found = results.runs(unlucky, store)
    assert {name: [one["session"] for one in of] for name, of in found.items()} == {"stock": [0, 1], "nitro": [0, 1]}
    done, _, printed = run(unlucky, tmp_path)
    assert done
    assert not printed  # nothing left to do, and no engine is started for it
    more = dataclasses.replace(unlucky, rounds=3)  # more rounds of the same belong together
    assert run(more, tmp_path)[0]
    assert len(results.runs(more, store)["stock"]) == 3


def test_a_round_of_two_commands_is_said_to_be(plan: Plan, tmp_path: Path) -> None:
    two = pair(plan)
    _, store, _ = run(two, tmp_path)
    store.path(0, 1, "stock").unlink()
    _, store, _ = run(two, tmp_path)
    assert results.mixed_rounds(results.runs(two, store)) == [1]


def test_no_run_is_begun_that_would_end_too_late(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nitro.bench import runner

    now = iter(range(0, 100_000, 10))  # each look at the clock is ten seconds after the one before
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(now)))
    done, store, _ = run(pair(plan), tmp_path, mode="together", limit_s=100)
    assert not done
    assert 0 < len(list((store.folder / "runs").iterdir())) < 4


def test_memory_decides_what_is_alive_at_once(plan: Plan) -> None:
    two = pair(plan)
    one = max(map(two.memory, two.engines))
    assert fit_together(two, two.engines, machine_with(2.2 * one, plan.device))
    assert not fit_together(two, two.engines, machine_with(1.5 * one, plan.device))
    with pytest.raises(SettingsError, match=r"engine 'stock' needs about 1\.5 GB .* 1\.0 GB are free.*smaller pool"):
        fit_together(two, two.engines, machine_with(1.01e9, plan.device))


def test_evictions_are_required_where_they_must_come(plan: Plan, tmp_path: Path) -> None:
    two = pair(plan)
    _, store, _ = run(two, tmp_path)
    found = results.runs(two, store)
    results.require_evictions(two, found, 200)
    for one in found["nitro"]:
        one["evictions"] = 0
    results.require_evictions(two, found, 48 + 64)  # it never grows beyond budget and slack
    with pytest.raises(BenchError, match="'nitro' evicted nothing in round 0 although its budget of 48 is below 113"):
        results.require_evictions(two, found, 113)
