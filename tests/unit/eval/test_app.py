"""The command from end to end, with an engine that makes its results up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nitro.cli import main
from nitro.device import Device
from nitro.errors import SettingsError
from nitro.eval import app
from nitro.eval.serve import EvalError
from nitro.eval.settings import EvalSettings

ENGINE = """
import json, os, sys
from pathlib import Path
from nitro.eval.plan import cells
from nitro.eval.settings import EvalSettings
from nitro.eval.store import EvalStore

spec = json.loads(Path(sys.argv[1]).read_text())
settings = EvalSettings.from_dict(spec["settings"])
store = EvalStore(Path(spec["out"]), spec["manifest"])
with os.fdopen(int(sys.argv[2]), "w") as events:
    def report(event):
        print(json.dumps(event), file=events, flush=True)
    report({"versions": {"vllm": "0"}})
    for count, cell in enumerate([one for one in cells(settings) if not store.has(one)]):
        if spec["until"] and count == 3:
            break
        report({"cell": cell.title, "requests": settings.contexts})
        kept = cell.label == "kvdiff" or cell.policy is None
        store.put(cell, [{"case": str(i), "depth": None, "nll": 1.0 - kept, "exact": kept, "tokens": 1}
                         for i in range(settings.contexts)])
        report({"done": settings.contexts})
        report({"kept": cell.title})
    if FAIL:
        print("out of memory")
        sys.exit(3)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the engine of above in the place of vLLM's."""

    def install(*, fail: bool = False) -> None:
        path = tmp_path / "engine.py"
        path.write_text(ENGINE.replace("FAIL", str(fail)), encoding="utf-8")
        monkeypatch.setattr(app, "COMMAND", (sys.executable, str(path)))

    monkeypatch.setattr(app.device, "detect", lambda: Device("cuda", "a test"))
    install()
    return install


def asked(out: Path, **changes: Any) -> app.Asked:
    settings = EvalSettings(tasks=("labels",), policies=("kvdiff",), budgets=(0.25,), contexts=3)
    values = {
        "settings": settings,
        "model": "/models/tiny",
        "text": None,
        "transcripts": None,
        "dtype": None,
        "limit": 0.0,
        "out": out,
    }
    return app.Asked(**values | changes)  # type: ignore[arg-type]


def test_from_end_to_end(tmp_path: Path, engine: Any) -> None:
    out, console = tmp_path / "results", Console(record=True, width=120)
    record = app.run(asked(out), console)
    text = console.export_text()
    assert "labels 1024, kvdiff at 0.25: done" in text
    assert "kvdiff      1.00 [0.44, 1.00]" in text
    assert record["complete"]
    assert json.loads((out / "results.json").read_text())["cells"][1]["exact"]["value"] == 1.0
    assert len((out / "results.jsonl").read_text().splitlines()) == 4 * 3
    assert (out / "eval.png").exists()
    engine(fail=True)  # which is not started again: all is there
    assert app.run(asked(out), console)["cells"] == record["cells"]


def test_a_limit_and_going_on(tmp_path: Path, engine: Any) -> None:
    out, console = tmp_path / "results", Console(record=True, width=120)
    assert not app.run(asked(out, limit=60.0), console)["complete"]
    assert "Time is up: the same command goes on in" in console.export_text().replace("\n", " ")
    assert app.run(asked(out, limit=60.0), console)["complete"]


def test_an_engine_that_fails(tmp_path: Path, engine: Any) -> None:
    engine(fail=True)
    with pytest.raises(EvalError, match=r"ended with status 3(.|\n)*out of memory"):
        app.run(asked(tmp_path / "results"), Console())


def test_other_settings_are_refused(tmp_path: Path, engine: Any) -> None:
    app.run(asked(tmp_path), Console(record=True))
    with pytest.raises(SettingsError, match='dtype was "auto", now "bfloat16"'):
        app.run(asked(tmp_path, dtype="bfloat16"), Console())
    text = tmp_path / "text.txt"
    text.write_text("This is a sentence. " * 30, encoding="utf-8")
    with pytest.raises(SettingsError, match="text was null, now"):
        app.run(asked(tmp_path, text=text), Console())


def test_errors_are_told_without_a_traceback(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["eval", "--text", str(tmp_path / "missing.txt"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "nitro eval: text" in done.output
    assert "cannot be read" in done.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(main, ["eval", "--limit", "-1"])
    assert "limit=-1.0 is below 0" in done.output
