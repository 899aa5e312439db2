"""Who goes by the names of Nitro's metrics: docs/serving.md, and each query of the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nitro.metrics import METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs/dashboard/nitro.json").read_text(encoding="utf-8"))
SERVED = (ROOT / "tests/data/metrics.txt").read_text(encoding="utf-8")
"""What vLLM 0.32 with Nitro had in /metrics on a CPU, under load."""
NAME = re.compile(r"\b(?:nitro|vllm):\w+")


def served() -> dict[str, set[str]]:
    """Each sample's name, and the names of its labels."""
    families = text_string_to_metric_families(SERVED)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_page_has_the_table_of_the_code() -> None:
    table = re.findall(r"^\| `(nitro:\w+)` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert table == [(m.samples[0].removesuffix("_bucket"), m.kind, m.text) for m in METRICS]


def test_a_server_has_all_of_them() -> None:
    found = served()
    for metric in METRICS:
        for sample in metric.samples:
            assert set(metric.labels) <= found[sample], sample
    known = {name for metric in METRICS for name in metric.samples}
    known |= {f"{PREFIX}{metric.name}_created" for metric in METRICS}
    assert {name for name in found if name.startswith(PREFIX)} <= known, "the recording has metrics that are gone"


@pytest.mark.parametrize("query", queries())
def test_every_query_names_metrics_that_exist(query: str) -> None:
    names = NAME.findall(query)
    assert names
    found = served()
    for name, selector in re.findall(r"((?:nitro|vllm):\w+)\{([^}]*)\}", query):
        assert name in found
        assert set(re.findall(r"(\w+)=~?", selector)) == {"model_name", "engine"} <= found[name]
    assert len(names) == len(re.findall(r"(?:nitro|vllm):\w+\{", query)), "each is of the chosen model and engine"
    for label in re.findall(r"by \(([^)]*)\)", query):
        assert set(label.split(", ")) <= set.union(*(found[name] for name in names)), label
    assert query.count("(") == query.count(")")
    for name in names:
        is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
        wrapped = re.search(
            rf"(?:rate|increase)\({re.escape(name)}\{{[^}}]*\}}\[\$__(?:rate_interval|range)\]\)", query
        )
        assert bool(wrapped) == is_counter, f"{name}: counters are looked at by their rate, gauges as they are"


def test_every_metric_of_nitro_is_on_the_dashboard() -> None:
    named = {name for query in queries() for name in NAME.findall(query)}
    missing = [metric.name for metric in METRICS if not named & set(metric.samples)]
    assert not missing


def test_names_in_the_texts_exist() -> None:
    known = {name for metric in METRICS for name in metric.samples}
    known |= {PREFIX + metric.name for metric in METRICS if metric.kind == "histogram"}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {(page.name, name) for page in pages for name in re.findall(r"\bnitro:\w+", page.read_text("utf-8"))}
    assert named
    assert {(page, name) for page, name in named if name not in known} == set()


def test_the_dashboard_is_one() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert DASHBOARD.get("id") is None, "an id belongs to one Grafana"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "engine"], "each before those that use it"
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    for name in ("model", "engine"):
        assert variables[name]["datasource"] == source
        wanted = re.match(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variables[name]["query"]["query"])
        assert wanted
        assert wanted[2] in served()[wanted[1]]
    used = set(re.findall(r"\$(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used <= {*variables, "__rate_interval", "__range"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    kinds = {"row", "stat", "timeseries", "heatmap"}
    assert {panel["type"] for panel in DASHBOARD["panels"]} <= kinds
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"] == source
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source for target in panel["targets"])
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
