"""Figures taken from what the benchmarks write, and the faults that gates must notice; no GPU, no engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import planted
import pytest
from gates import METRICS
from perf_measure import (
    GROUPS,
    MeasureError,
    Measurer,
    facts,
    from_ample,
    from_essay,
    from_kernels,
    from_scheduler,
    from_worker,
    measure,
)


def engine(
    name: str, tokens: float, blocks: int, round_: int = 0, load: str = "2048 x (1000 + 1000)"
) -> dict[str, Any]:
    return {"load": load, "engine": name, "round": round_, "tokens_per_s": tokens, "peak_blocks": blocks}


def test_the_essays_ratios_are_of_the_same_round() -> None:
    rows = [
        row
        for number, (stock, ours) in enumerate(((100, 120), (200, 300)))
        for row in (
            engine("nitro", ours, 40, number),
            engine("stock", stock, 90, number),
            engine("stock, pool without limit", 110, 250, number),
        )
    ]
    assert from_essay({"essay": {"results": rows}}) == {
        "essay.footprint": [0.16, 0.16],
        "essay.throughput": [1.2, 1.5],
        "essay.tokens_per_s": [120, 300],
    }


def test_ample_loads_are_apart() -> None:
    loads = ("8 x (256 + 512)", "256 x (256 + 384)", "2048 x (256 + 256)")
    rows = [engine(name, tokens, 1, 0, load) for load in loads for name, tokens in (("stock", 4.0), ("nitro", 3.0))]
    assert from_ample({"ample": {"results": rows}}) == {"ample.8": [0.75], "ample.256": [0.75], "ample.2048": [0.75]}


def test_times_on_the_host() -> None:
    kinds = ("stock", "Nitro, asking for each slot", "Nitro")
    found = [{"scheduler": kind, "nitro_ms_mean": ms} for kind, ms in zip(kinds, (0, 0.9, 0.3), strict=True)]
    assert from_scheduler(found) == {"host.scheduler_us": [300]}
    assert from_worker([{"runner": "V1", "apply_us": 1}, {"runner": "V2", "apply_us": 2}]) == {"host.worker_us": [2]}


def test_kernels_that_could_not_be_timed_are_an_error() -> None:
    row = {"task": "score knorm", "label": "", "percent_with_passes": 98}
    results = [row, row | {"label": " 4096 B"}, row | {"task": "score lagkv"}]
    assert from_kernels({"failures": [], "results": results}) == {"kernel.score knorm": [0.98]}
    with pytest.raises(MeasureError, match="could not time medium stitch"):
        from_kernels({"failures": ["medium stitch"], "results": [row]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no such device')", r"failed with 1:\nno such device"),
        ("print('done')", r"bench_worker\.py wrote no results"),
        ("time.sleep(60)", r"took more than 2 s"),
        ("write([])", r"lack figures"),
        ("write({'x': 1})", r"lack something"),
    ],
)
def test_scripts_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str) -> None:
    """A benchmark of another commit may fail, hang, or write something else: never a figure then."""
    (tmp_path / "ci").mkdir()
    helper = "def write(x): open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps(x))"
    (tmp_path / "ci" / "bench_worker.py").write_text(f"import json, sys, time\n{helper}\n{body}\n")
    monkeypatch.setitem(GROUPS, "host", lambda measurer: from_worker(measurer.script("bench_worker.py")))
    with pytest.raises(MeasureError, match=message):
        measure("host", Measurer(root=tmp_path, timeout=2))


def test_another_nitro_than_the_one_to_be_measured_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"Python imports Nitro from .*, not from .*: uninstall it there"):
        Measurer(site=tmp_path).check()


def test_groups_and_metrics_belong_together() -> None:
    assert {name.split(".")[0].replace("kernel", "kernels") for name in METRICS} == set(GROUPS)


def test_faults_are_planted_in_all_that_a_command_starts() -> None:
    """In a process and its children; and nowhere without being asked for."""
    code = """
import contextlib, types
from nitro.kernels import compact
copies = []
cache = types.SimpleNamespace(clone=lambda: copies.append(1))
with contextlib.suppress(TypeError):  # the function itself wants more than layers
    compact.fill_ragged(types.SimpleNamespace(caches=[cache] * 3))
print(len(copies))
"""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    for program, spec, expected in ((nested, "copy", "3"), (code, "", "0")):
        variables = Measurer(variables=planted.environment(spec)).environment()
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected, done.stderr


def test_delays_and_unknown_faults() -> None:
    import time

    started = time.perf_counter()
    assert planted.delayed(0.02)(lambda x: x)(3) == 3
    assert time.perf_counter() - started >= 0.02
    with pytest.raises(ValueError, match="NITRO_PLANTED='nothing' is not known: use one of apply, copy"):
        planted.install("nothing")


def test_planted_places_exist() -> None:
    """Else a fault would be planted nowhere, and the test of the gate would say so only on a quiet machine."""
    from importlib import import_module

    for places in planted.PLACES.values():
        for module, name in places:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            assert callable(found)


def test_what_goes_with_figures() -> None:
    """A baseline without these could not be told from one of another machine."""
    found = facts()
    assert all(found[name] for name in ("device", "date", "torch", "vllm"))
    assert facts(Path("/"))["commit"] is None
