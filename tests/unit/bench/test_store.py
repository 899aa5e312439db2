"""Results directories: what is kept, what goes on, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nitro.bench.store import Store, differences
from nitro.errors import SettingsError

SETTINGS = {"model": {"name": "tiny"}, "engines": [{"name": "stock", "blocks": 20}], "record": False}


def test_runs_come_back_and_commands_are_counted(tmp_path: Path) -> None:
    first = Store(tmp_path / "new", SETTINGS)
    assert first.session == 0
    assert not first.has(0, 1, "stock")
    first.put(0, 1, "stock", {"seconds": 1.5})
    second = Store(tmp_path / "new", SETTINGS)
    assert second.session == 1
    assert second.has(0, 1, "stock")
    assert second.get(0, 1, "stock") == {"session": 0, "seconds": 1.5}
    assert not second.has(1, 1, "stock")
    assert not second.has(0, 0, "stock")


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS)
    other = {**SETTINGS, "engines": [{"name": "stock", "blocks": 30}], "record": True}
    with pytest.raises(SettingsError) as caught:
        Store(tmp_path, other)
    assert "engines[0].blocks was 20, now 30; record was false, now true" in str(caught.value)
    assert "--out" in str(caught.value)
    assert Store(tmp_path, SETTINGS).session == 1  # the refused command left no trace


def test_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    store.path(0, 0, "stock").write_text('{"seconds": ')
    with pytest.raises(SettingsError, match=r"load0-round0-stock.json is damaged.*remove it"):
        store.get(0, 0, "stock")
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(SettingsError, match=r"repair or remove it, or give another one with --out"):
        Store(tmp_path, SETTINGS)
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="results directory"):
        Store(tmp_path / "file", SETTINGS)


def test_a_run_that_is_being_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, SETTINGS)

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(0, 0, "stock", {"seconds": 1.0})
    assert not store.has(0, 0, "stock")


def test_differences_name_the_key() -> None:
    assert list(differences(json.loads('{"a": [1, 2]}'), {"a": [1]})) == ["a was [1, 2], now [1]"]
    assert list(differences({"a": 1}, {"b": 1})) == ["a was 1, now null", "b was null, now 1"]
    assert not list(differences({"a": {"b": [1]}}, {"a": {"b": [1]}}))
