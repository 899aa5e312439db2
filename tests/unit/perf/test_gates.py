"""The gates' logic on made-up figures: no GPU, no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gates import FOLDER, METRICS, GateError, Results, Target, judge, load_baseline, load_targets, slug
from perf_judge import Judge

ESSAY = {"essay.footprint": Target(at_most=0.165, goal=0.15), "essay.throughput": Target(at_least=1.27, goal=1.5)}


@pytest.mark.parametrize(
    ("device", "card"),
    [("NVIDIA L4", "l4"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("cpu", "cpu")],
)
def test_the_name_of_a_cards_files(device: str, card: str) -> None:
    assert slug(device) == card


@pytest.mark.parametrize(
    ("name", "value", "passed", "goal"),
    [
        ("essay.footprint", 0.165, True, False),
        ("essay.footprint", 0.1651, False, False),
        ("essay.footprint", 0.14, True, True),
        ("essay.throughput", 1.27, True, False),
        ("essay.throughput", 1.2699, False, False),
        ("essay.throughput", 1.5, True, True),
        ("essay.throughput", float("nan"), False, None),
        ("essay.tokens_per_s", 1.0, None, None),
    ],
)
def test_what_a_figure_is_worth(name: str, value: float, passed: bool | None, goal: bool | None) -> None:
    verdict = judge(name, value, ESSAY)
    assert verdict.passed is passed
    if goal is not None or passed is None:
        assert verdict.goal_reached is goal


def test_a_figure_that_nobody_knows() -> None:
    with pytest.raises(GateError, match=r"metric 'essay\.speed' is not known: use one of essay\.footprint"):
        judge("essay.speed", 1, ESSAY)


def test_a_test_fails_if_one_of_its_figures_misses() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"essay\.footprint = 0\.2, must be at most 0\.165") as caught:
        Judge("l4", ESSAY, None).require({"essay.footprint": [0.2], "essay.throughput": [1.3], "ample.8": [0.1]})
    assert "throughput" not in str(caught.value)


def test_the_median_of_several_rounds_counts() -> None:
    judge_ = Judge("l4", ESSAY, None)
    judge_.require({"essay.throughput": [1.0, 1.3, 1.4]})
    with pytest.raises(pytest.fail.Exception):
        judge_.require({"essay.throughput": [1.0, 1.2, 1.4]})
    assert judge_.results.metrics["essay.throughput"] == [1.0, 1.3, 1.4, 1.0, 1.2, 1.4]


def test_on_an_unknown_card_figures_are_reported_not_passed() -> None:
    judge_ = Judge("own", {}, None)
    with pytest.raises(pytest.skip.Exception, match=r"no gate for own, only reported: essay\.footprint = 0\.9"):
        judge_.require({"essay.footprint": [0.9]})
    assert [verdict.passed for verdict in judge_.verdicts] == [None]
    assert judge_.table().row_count == 1


def test_the_targets_that_are_kept_here() -> None:
    default = load_targets("no such card")
    assert default["host.step_us"].at_most == 2000
    assert {name for name in METRICS if name.startswith("kernel.")} <= default.keys()
    assert "essay.footprint" not in default
    l4 = load_targets("l4")
    assert (l4["essay.footprint"].at_most, l4["essay.throughput"].at_least) == (0.165, 1.27)
    assert default.items() <= l4.items()


def test_each_cards_files_are_sound() -> None:
    for file in (FOLDER / "targets").glob("*.toml"):
        load_targets(file.stem)
    baselines = sorted((FOLDER / "baselines").glob("*.json"))
    assert baselines
    for file in baselines:
        found = load_baseline(file.stem)
        assert found is not None
        assert found.card == file.stem
        assert {"device", "date", "torch", "vllm"} <= found.about.keys()
        missed = [
            verdict
            for verdict in (judge(n, v, load_targets(file.stem)) for n, v in found.medians().items())
            if verdict.passed is False
        ]
        assert not missed, "a baseline that misses its own card's gates"


def test_a_card_overrides_what_holds_for_all(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text('["ample.8"]\nat_least = 0.9\n["ample.256"]\nat_least = 0.9\n')
    (tmp_path / "own.toml").write_text('["ample.8"]\nat_least = 0.5\n')
    found = load_targets("own", tmp_path)
    assert {name: target.gate for name, target in found.items()} == {"ample.8": 0.5, "ample.256": 0.9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["ample.9"]\nat_least = 1', r"metric 'ample\.9' is not known"),
        ('["ample.8"]\nleast = 1', r"ample\.8 has \['least'\]: use at_least, at_most, goal and why"),
        ('["ample.8"]\nat_most = 1', r"better higher, so at_most gates nothing"),
        ('["essay.footprint"]\nat_least = 1', r"better lower, so at_least gates nothing"),
        ('["ample.8"]\nat_least = 1\ngoal = 0.9', r"goal of 0\.9, short of its gate of 1"),
    ],
)
def test_targets_that_would_gate_nothing(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "default.toml").write_text(text)
    with pytest.raises(GateError, match=message):
        load_targets("l4", tmp_path)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = Results("l4", {"date": "2026-12-01"}, {"ample.8": [0.9, 1.0, 0.95]})
    results.save(tmp_path / "l4.json")
    assert load_baseline("l4", tmp_path) == results
    assert load_baseline("h200", tmp_path) is None
    assert results.medians() == {"ample.8": 0.95}


@pytest.mark.parametrize(
    "found", ["", "[]", '{"card": "l4"}', json.dumps({"card": "l", "about": {}, "metrics": {"x": [1]}})]
)
def test_files_that_hold_no_results(tmp_path: Path, found: str) -> None:
    (tmp_path / "l4.json").write_text(found)
    with pytest.raises(GateError, match=r"l4\.json holds no results.*ci/measure_perf\.py"):
        load_baseline("l4", tmp_path)
