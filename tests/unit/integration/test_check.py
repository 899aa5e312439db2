from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nitro import check
from nitro.cli import main
from nitro.config import Settings
from nitro.errors import BridgeError
from nitro.integration.vllm import compat

from .test_refusals import write_config


def report(name: str | None, **settings: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = check.run(name, Settings.parse(settings) if settings else None, console=console)
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


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            RuntimeError("...\noperator torchvision::nms does not exist"),
            "pip uninstall torchvision torchaudio torchcodec",
        ),
        (ImportError("libcudart.so.13: cannot open shared object file"), "install vLLM anew"),
    ],
)
def test_a_vllm_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path], error: Exception, remedy: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(compat, "hooks", fail)
    code, text = report(str(tiny("llama-gqa")))
    assert code == 1
    assert f"cannot be imported ({str(error).splitlines()[-1]})" in text
    assert remedy in text


def test_a_plugin_that_vllm_is_told_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    code, text = report(None)
    assert code == 1
    assert "leaves Nitro out" in text


def test_what_a_threshold_and_its_bounds_mean(tiny: Callable[[str], Path]) -> None:
    code, text = report(str(tiny("llama-gqa")), threshold=0.5, min_keep=100, max_keep=400)
    assert code == 0
    assert "with threshold=0.5" in text
    assert "in the unit of keydiff's scores" in text
    assert "100 tokens, 0 MiB stay at least" in text
    assert "400 tokens, 0 MiB stay at most; at most 464 tokens" in text
    assert "takes the workers' answers" in text


def test_a_threshold_without_bounds_says_how_far_a_request_may_grow(tiny: Callable[[str], Path]) -> None:
    code, text = report(str(tiny("llama-gqa")), threshold=0.5, evict_prompt=False)
    assert code == 0
    assert "36 tokens, 0 MiB stay at least (sinks + window)" in text
    assert "max_keep" in text
    assert "grows to 1,024 tokens" in text
    assert "beside its prompt" in text


def test_settings_that_never_evict_are_a_problem(tiny: Callable[[str], Path]) -> None:
    code, text = report(str(tiny("llama-gqa")), threshold=0.5, min_keep=1000)
    assert code == 1
    assert "1000 tokens that stay plus slack=64 are more than max_model_len=1024: lower them" in text


def test_shared_memory_that_is_missing_is_a_problem_of_thresholds(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BridgeError("/dev/shm is missing: mount a tmpfs there")

    monkeypatch.setattr("nitro.integration.vllm.asks.try_bridge", missing)
    assert report(str(tiny("llama-gqa")), ratio=0.5)[0] == 0
    code, text = report(str(tiny("llama-gqa")), threshold=0.5)
    assert code == 1
    assert "mount a tmpfs there" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--settings", '{"max_keep": 100}'], "max_keep=100 is set without a threshold"),
        (["m", "--settings", "{"], "Expecting property name"),
        (["--settings", '{"budget": 64}'], "name it, too"),
    ],
)
def test_wrong_settings_are_refused_before_vllm_is_imported(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["check", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
