"""Tables and pictures from made-up runs: what is added up, what is left out, what is said."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import make_run
from rich.console import Console

from nitro.bench import charts, explain, measure, report
from nitro.bench.plan import Engine, Plan

WALLS = {explain.STOCK_TIGHT: 8.0, explain.STOCK_AMPLE: 5.0, explain.NITRO_AMPLE: 4.0, explain.NITRO_TIGHT: 4.5}


def made_runs(rounds: int = 2) -> dict[str, list[dict[str, Any]]]:
    return {name: [make_run(name, i, wall * (1 + i)) for i in range(rounds)] for name, wall in WALLS.items()}


def shown(*parts: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, width=200)
    for part in parts:
        console.print(part)
    return text.getvalue()


def test_columns_sum_up_to_what_was_measured(plan: Plan) -> None:
    made = explain.explain(plan, made_runs())
    assert made is not None
    assert made.rounds == 2
    sums = {arrow: sum(parts.values()) for arrow, parts in made.arrows.items()}
    assert sums == {
        "stock, tight → stock, ample": pytest.approx(4.5),  # means of rounds of 3 and 6 seconds
        "stock, ample → nitro, ample": pytest.approx(1.5),
        "nitro, ample → nitro, tight": pytest.approx(-0.75),
        "all": pytest.approx(5.25),
    }
    for part in made.arrows["all"]:
        low, high = made.ranges[part]
        assert low <= made.arrows["all"][part] + 1e-9
        assert high >= made.arrows["all"][part] - 1e-9
    text = shown(explain.attribution_table(made))
    assert "+5.25" in text
    assert "+43.8" in text  # of 12 seconds
    assert "residue" in text


def test_incomplete_rounds_do_not_count(plan: Plan) -> None:
    found = made_runs()
    found[explain.NITRO_AMPLE].pop()
    made = explain.explain(plan, found)
    assert made is not None
    assert made.rounds == 1
    found[explain.STOCK_AMPLE].clear()
    assert explain.explain(plan, found) is None
    assert "stock, tight" in shown(report.figures(plan, found), explain.roofline_table(plan, found))


def test_sections_and_the_loop_are_the_whole() -> None:
    run = make_run("stock", 0, 8.0)
    found = explain.shares(run)
    assert found["scheduler"] == pytest.approx(3.6)
    assert found["loop"] == pytest.approx(3.6)
    assert sum(found.values()) == pytest.approx(7.2)


def test_events_of_the_device() -> None:
    run = make_run("stock", 0, 8.0)
    assert explain.device_times(run) == {}
    run["recording"]["device"] = {
        "forward": {"steps": [0, 1, 16], "ms": [4.0, 6.0, 5.0]},
        "attention": {"steps": [0, 16, 32], "ms": [1.0, 2.0, 9.0]},  # of step 32, the forward pass was not seen
    }
    assert explain.device_times(run) == {"forward_ms": 5.0, "attention_share": 3 / 9, "attention_steps": 2.0}


def test_the_roofline_counts_weights_each_step_and_keys_each_token(plan: Plan) -> None:
    run = make_run("stock", 0, 8.0)
    found = explain.roofline(plan, Engine("stock", 20), run)
    assert found["weight_bytes"] == 8 * plan.model.parameters() * 4
    assert found["kv_bytes"] == 8 * plan.model.kv_bytes(4)
    assert found["seconds"] == (found["weight_bytes"] + found["kv_bytes"]) / 1e9
    assert found["share"] == found["seconds"] / 8.0
    assert explain.roofline(plan, Engine("fp8", 20, fp8=True), run)["kv_bytes"] == 8 * plan.model.kv_bytes(1)


def test_everything_is_printed_and_survives_json(plan: Plan) -> None:
    found = made_runs()
    found[explain.NITRO_TIGHT][1]["session"] = 3
    made = explain.explain(plan, found)
    assert made is not None
    text = shown(
        report.figures(plan, found),
        report.ratios(plan, found),
        explain.shares_table(plan, found),
        explain.roofline_table(plan, found),
        "\n".join(explain.costs_lines(plan, made)),
        *report.remarks(found),
    )
    assert "tiny on a test's CPU: 2 x (8 + 8) tokens" in text
    assert "nitro, tight / stock, tight: 1.778" in text
    assert "The engines of round 1 ran in several commands" in text
    assert "scheduler: schedule, book tokens" in text
    assert json.loads(json.dumps(explain.to_dict(plan, made, found)))["attribution"]["rounds"] == 2


def test_the_picture(tmp_path: Path) -> None:
    charts.draw(made_runs(), "a title", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_curves_end_at_nothing_and_keep_all_tokens() -> None:
    times, values = charts.curves(make_run("stock", 0, 2.0))
    assert (times["running"], values["running"]) == ([0.5, 2.0], [2.0, 0.0])
    assert values["preemptions"] == [1.0, 1.0]
    width = times["tokens_per_s"][1] - times["tokens_per_s"][0]
    assert sum(values["tokens_per_s"]) * width == pytest.approx(10.0)


def test_long_series_are_thinned_out_without_losing_counts() -> None:
    samples = [(0.1 * i, i % 7, 0.5, i % 2, 3) for i in range(10_000)]
    found = measure.series(samples, 101)
    assert len(found["time_s"]) <= 1501
    assert found["tokens"][-1] == 30_000
    assert found["preemptions"][-1] == 5000
    assert set(found["blocks"]) == {50}
    assert found["time_s"][-1] == pytest.approx(999.9)


def test_percentiles() -> None:
    assert measure.percentiles("x", []) == {}
    assert measure.percentiles("x", [1.0, 2.0, 3.0]) == {"x_p50": 2.0, "x_p95": pytest.approx(2.9)}
