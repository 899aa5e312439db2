"""ci/bench_naive.py: its stand-in for kvpress is kvpress, bit for bit, and its checks can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kvpress_parity import random_cache

if os.environ.get("NITRO_REQUIRE_KVPRESS") != "1":
    pytest.importorskip("kvpress", reason="runs in an environment of its own: bash ci/kvpress.sh")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "ci")
    import bench_naive

    return bench_naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("computed", [False, True])
def test_plain_press_is_kvpress(bench: ModuleType, computed: bool, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(bench.TINY, length=77, keep=50)
    cache = random_cache(77, layers=3, seed=1).to(dtype)
    press, origin = bench.make_press(shape, computed)
    assert origin == "its own code"
    arguments = SimpleNamespace(head_dim=64), None, cache.keys, cache.values, None, {"scores": torch.randn(3, 2, 77)}
    plain = bench.PlainPress(50, computed)
    assert torch.equal(plain.score(*arguments), press.score(*arguments))
    for got, want in zip(plain.compress(*arguments), press.compress(*arguments), strict=True):
        assert got.shape == (3, 2, 50, 64)
        assert torch.equal(got, want)


def test_tiny_run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "naive.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "cpu", "--tiny", "--repeats", "1", "--json", str(out)])
    assert bench.main() == 0
    rows = json.loads(out.read_text())["results"]
    ways = ["nitro", "indexing", "kvpress", "kvpress, one batch"]
    assert [(row["scores"], row["way"]) for row in rows] == [(s, w) for s in ("given", "computed") for w in ways]
    assert all(row["tokens_that_differ"] == 0 for row in rows if row["scores"] == "given")


@pytest.mark.parametrize("computed", [False, True])
def test_other_tokens_are_noticed(bench: ModuleType, computed: bool) -> None:
    setup = bench.make_setup(bench.TINY, torch.device("cpu"))
    (way,) = bench.indexing_way(setup, computed)
    bench.check_kept(setup, way, computed)
    # In each row, the first token that stays for the first that does not.
    kept = way.kept()
    for token in (kept.int().argmax(-1, keepdim=True), kept.int().argmin(-1, keepdim=True)):
        kept = kept.scatter(-1, token, ~kept.gather(-1, token))
    with pytest.raises(AssertionError, match="keeps other tokens"):
        bench.check_kept(setup, dataclasses.replace(way, kept=lambda: kept), computed)


def test_rows_that_moved_wrongly_are_noticed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = bench.make_setup(bench.TINY, torch.device("cpu"))
    (way,) = bench.nitro_way(setup, False)
    fill = bench.compact.fill_ragged

    def spoilt(layers: object, *arguments: object, **options: object) -> None:
        fill(layers, *arguments, **options)
        table = setup.batch.block_tables[0].long()
        setup.target.caches[1][table[0], 1, 3, 5] += 1.0

    monkeypatch.setattr(bench.compact, "fill_ragged", spoilt)
    with pytest.raises(AssertionError, match="keys and values that stay"):
        way.kept()
