"""Settings, cells, results directories, figures and their intervals, what is printed and drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from nitro.cli import main
from nitro.errors import SettingsError
from nitro.eval import charts, report, results, score
from nitro.eval.plan import cells
from nitro.eval.settings import EvalSettings, PolicyChoice
from nitro.eval.store import EvalStore


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ("needle-noize",)}, "unknown task 'needle-noize', did you mean 'needle-noise'"),
        ({"policies": ("kvdif",)}, "unknown policy 'kvdif', did you mean 'kvdiff'"),
        ({"policies": ("kvdiff:recency",)}, "'recency' is not OPTION=VALUE"),
        ({"policies": ("kvdiff:recency=20",)}, "between 0 and 10"),
        ({"policies": ("kvdiff", "kvdiff")}, "each only once"),
        ({"budgets": (1.0,)}, "must be above 0 and below 1"),
        ({"budgets": (float("nan"),)}, "must be above 0 and below 1"),
        ({"budgets": ()}, "at least one"),
        ({"budgets": (0.03,)}, "0.03 of 1024 tokens is 30, but the first 4 and the last 32 always stay"),
        ({"lengths": (1000,)}, "1000 must be a multiple of 32"),
        ({"lengths": (128,)}, "at least 256"),
        ({"contexts": 0}, "contexts=0 is below 1"),
        ({"tasks": ("stories",), "answer": 100, "budgets": (0.3,)}, "answer=100: 0.3 of that is 30"),
    ],
)
def test_bad_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        EvalSettings(**changes)
    assert said in str(caught.value)


def test_bad_numbers_on_the_command_line() -> None:
    done = CliRunner().invoke(main, ["eval", "--budgets", "0.5,half"])
    assert done.exit_code == 1
    assert "nitro eval: budgets: 'half' is not a number" in done.output


def test_settings_survive_json() -> None:
    settings = EvalSettings(policies=("vdiff:radius=2",), seed=3)
    assert EvalSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_policies_with_options() -> None:
    choice = PolicyChoice.parse("kvdiff:recency=0.5")
    assert (choice.name, choice.options) == ("kvdiff", {"recency": 0.5})
    assert PolicyChoice.parse("vdiff:radius=2").options == {"radius": 2}
    assert PolicyChoice.parse("vdiff:radius=2").slug == "vdiff_radius_2"


def test_the_grid_has_the_nulls_and_the_full_cache_first(small: EvalSettings) -> None:
    grid = list(cells(small))
    assert len(grid) == 2 * (1 + 3 * 2)
    assert [cell.label for cell in grid[:7]] == ["full", *["kvdiff"] * 2, *["random"] * 2, *["streaming"] * 2]
    assert (grid[0].budget, grid[7].task, grid[7].length) == (1.0, "stories", 0)
    assert len({cell.slug for cell in grid}) == len(grid)


def test_a_results_directory_goes_on(tmp_path: Path, small: EvalSettings) -> None:
    first, second = list(cells(small))[:2]
    store = EvalStore(tmp_path, small.to_dict())
    store.put(first, [{"case": "a", "nll": 1.5}, {"case": "b", "nll": 2.0}])
    ids, logprobs = np.arange(6, dtype=np.int32).reshape(1, 2, 3), np.zeros((1, 2, 3), np.float32)
    store.put_likeliest(first, (ids, logprobs))
    again = EvalStore(tmp_path, small.to_dict())
    assert (again.has(first), again.has(second)) == (True, False)
    assert again.get(first)[1] == {"case": "b", "nll": 2.0}
    assert np.array_equal(again.likeliest(first)[0], ids)
    lines = again.write_lines([first]).read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "task": "needle-noise", "length": 1024, "policy": "full", "budget": 1.0, "case": "a", "nll": 1.5,
    }  # fmt: skip
    with pytest.raises(SettingsError, match="seed was 0, now 1"):
        EvalStore(tmp_path, EvalSettings.from_dict(small.to_dict() | {"seed": 1}).to_dict())
    (tmp_path / "cells" / f"{first.slug}.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(SettingsError, match="remove it, and the cell is run again"):
        again.get(first)


# Known from Newcombe, Statistics in Medicine 17 (1998), table I, and from R's prop.test(correct=FALSE).
@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson(hits: int, count: int, low: float, high: float) -> None:
    found = results.wilson(hits, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    mirrored = results.wilson(count - hits, count)
    assert mirrored.low == pytest.approx(1 - found.high)


@given(st.integers(1, 500), st.data())
def test_a_share_is_within_its_interval(count: int, data: st.DataObject) -> None:
    found = results.wilson(data.draw(st.integers(0, count)), count)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_no_share_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 hits of 0"):
        results.wilson(0, 0)


def test_mean() -> None:
    found = results.mean([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    assert found.high - found.value == pytest.approx(1.959964 * math.sqrt(5 / 3) / 2)
    assert results.mean([1.0]) == (1.0, -math.inf, math.inf)


def logprob(value: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank)


def test_answers_are_scored_from_the_end() -> None:
    prompt = [None, {9: logprob(-9.0, 9)}, {5: logprob(-0.5, 1)}, {6: logprob(-1.5, 2), 7: logprob(-0.4, 1)}]
    assert score.answer_row(prompt, (5, 6)) == {"nll": 1.0, "exact": False, "tokens": 2}
    assert score.answer_row(prompt, (5, 7))["exact"]


@given(st.integers(0, 2**31), st.floats(0, 3))
def test_divergence_is_a_lower_bound(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    p = np.exp(rng.normal(0, 3, (4, 60)))
    q = p * np.exp(rng.normal(0, noise, p.shape))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    best = [np.argsort(-x, axis=1)[:, :20].astype(np.int32) for x in (p, q)]
    logprobs = [
        np.log(np.take_along_axis(x, ids, axis=1)).astype(np.float32) for x, ids in zip((p, q), best, strict=True)
    ]
    found = score.divergence(best[0], logprobs[0], best[1], logprobs[1])
    true = float((p * np.log(p / q)).sum(axis=1).mean())
    assert -1e-5 <= found <= true + 1e-5
    assert score.divergence(best[0], logprobs[0], best[0], logprobs[0]) == pytest.approx(0.0, abs=1e-6)


def rows(exact: str, nll: float) -> list[dict[str, Any]]:
    count = len(exact)
    return [
        {"case": str(i), "depth": 0.9 * (i + 0.5) / count, "nll": nll + i, "exact": hit == "x", "tokens": 7}
        for i, hit in enumerate(exact)
    ]


@pytest.fixture
def found(small: EvalSettings) -> list[dict[str, Any]]:
    grid = list(cells(small))[:7]
    kinds = ["xxxxxx", "xxxxx.", "xxx...", "x.....", "......", "x.....", "......"]
    full = rows(kinds[0], 0.1)
    made = [
        results.summary(cell, rows(kind, 0.1 + i), full) for i, (cell, kind) in enumerate(zip(grid, kinds, strict=True))
    ]
    story = [{"case": str(i), "nll": 1.0 + i / 10, "unique": 0.5, "repeated": 0.1} for i in range(6)]
    return made + [results.summary(cell, story, story) for cell in list(cells(small))[7:]]


def test_summaries(found: list[dict[str, Any]]) -> None:
    one = found[2]
    assert one["exact"]["value"] == 0.5
    assert one["nll_over_full"]["value"] == pytest.approx(2.0)
    assert one["nll_over_full"]["high"] == pytest.approx(2.0), "paired: what cases have in common cancels"
    assert [stratum["value"] for stratum in one["exact_by_depth"]] == [1.0, 0.5, 0.0]
    assert results.measure(one).value == 0.5
    assert results.measure(found[-1]).value == 0.0


def test_curves(found: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    make = charts.new_figure
    monkeypatch.setattr(charts, "new_figure", lambda inches: figures.append(make(inches)) or figures[-1])
    charts.draw(found, "a test", tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    needles, stories = figures[0].axes
    assert (needles.get_title(), stories.get_title()) == ("needle-noise 1,024", "stories")
    names = [container.get_label() for container in needles.containers]
    assert names == ["kvdiff", "random", "streaming"]
    line = needles.containers[0].lines[0]
    assert line.get_xdata().tolist() == [0.25, 0.5]
    assert line.get_ydata().tolist() == [0.5, pytest.approx(5 / 6)]
    assert [one.get_text() for one in figures[0].legends[0].get_texts()] == ["full cache", *names]


def test_tables(found: list[dict[str, Any]]) -> None:
    console = Console(record=True, width=140)
    for title, table, caption in report.tables(found):
        console.print(title, table, caption)
    text = console.export_text()
    assert "needle-noise, contexts of 1,024 tokens: 6 cases" in text
    assert "0.50 [0.19, 0.81]" in text
    assert "full cache: 1.00 [0.61, 1.00]" in text
    assert "stories: 6 cases" in text
    marked = report.markdown(found)
    assert "| kvdiff | 0.83 [0.44, 0.97] · 3.60 | 0.50 [0.19, 0.81] · 4.60 |" in marked


def test_tables_of_what_is_there(found: list[dict[str, Any]]) -> None:
    """As when time was up."""
    assert "| kvdiff | 0.83 [0.44, 0.97] · 3.60 |" in report.markdown(found[:2])
    assert not report.markdown(found[:1])
