from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from nitro import check
from nitro.integration.vllm import compat

from .test_refusals import write_config


def report(name: str | None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = check.run(name, console=console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_a_model_that_can_be_served(tiny: Callable[[str], Path]) -> None:
    code, text = report(str(tiny("llama-gqa")))
    assert code == 0
    assert "can serve it" in text
    assert f"all {len(compat.hooks())} methods as expected" in text
    assert "3 layers, 2 KV heads of 32" in text
    assert f"{2 * 3 * 2 * 32 * 2:,} bytes per token" in text, "K and V, in the bf16 that vLLM serves it in"


def test_a_model_that_cannot(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = write_config(tmp_path / "chunked", tiny("llama-gqa"), attention_chunk_size=128)
    code, text = report(str(model))
    assert code == 1
    assert "chunked local attention is not supported yet" in text
    assert "can serve it" not in text.replace("cannot serve it", "")


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = report(str(tmp_path / "missing"))
    assert code == 1
    assert text == "", "said at once, before vLLM is imported"
    assert "there is no such folder" in capsys.readouterr().err


def test_a_vllm_that_was_never_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    code, text = report(None)
    assert code == 1
    assert "0.99.0 was never tested" in text


def test_a_plugin_that_vllm_is_told_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    code, text = report(None)
    assert code == 1
    assert "leaves Nitro out" in text
