"""Where Nitro enters vLLM's configuration, and where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

import nitro
from nitro.integration.vllm import activate, compat
from nitro.plugin import register

Configure = Callable[..., VllmConfig]


@pytest.fixture
def configure(tiny: Callable[[str], Path]) -> Configure:
    def make(args_class: type[EngineArgs] = EngineArgs, **arguments: Any) -> VllmConfig:
        model = arguments.pop("model", str(tiny("llama-gqa")))
        defaults = {"skip_tokenizer_init": True, "max_model_len": 256, "block_size": 32}
        return args_class(model=model, **{**defaults, **arguments}).create_engine_config()

    return make


def test_without_the_key_vllm_stays_stock(configure: Configure) -> None:
    config = configure()
    assert config.scheduler_config.scheduler_cls is None
    assert config.scheduler_config.get_scheduler_cls().__module__.startswith("vllm.")
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert not config.additional_config


@pytest.mark.parametrize("args_class", [EngineArgs, AsyncEngineArgs])
def test_with_the_key_scheduler_and_worker_are_nitros(configure: Configure, args_class: type[EngineArgs]) -> None:
    config = configure(args_class, additional_config={"nitro": {"budget": 64}, "other": 1})
    assert config.scheduler_config.get_scheduler_cls().__name__ == "NitroScheduler"
    assert config.parallel_config.worker_cls == "nitro.integration.vllm.worker_cpu.NitroCPUWorker"
    assert config.additional_config["other"] == 1
    assert config.additional_config["nitro"]["window"] == 32, "defaults are filled in for the other processes"


def test_registering_twice_wraps_once(configure: Configure) -> None:
    before = EngineArgs.create_engine_config
    register()
    register()
    assert EngineArgs.create_engine_config is before
    assert configure(additional_config=nitro.vllm_config(budget=64)).scheduler_config.scheduler_cls


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"budgt": 512}, "budget"),
        ({"budget": 20}, "sinks"),
        ({"budget": "512"}, "budget"),
        ({"budget": 64, "policy": "keydif"}, "keydiff"),
        ([1], "object"),
    ],
)
def test_wrong_settings_stop_before_the_model_is_even_looked_at(
    configure: Configure, tmp_path: Path, settings: Any, says: str
) -> None:
    with pytest.raises(nitro.SettingsError, match=says):
        configure(model=str(tmp_path), additional_config={"nitro": settings})


@pytest.mark.parametrize("key", ["Nitro", "NITRO", "nitr0", "nitros"])
def test_a_misspelt_outer_key_is_an_error(configure: Configure, key: str) -> None:
    with pytest.raises(nitro.SettingsError, match="did you mean 'nitro'"):
        configure(additional_config={key: {"budget": 64}})


def test_settings_without_the_outer_key_are_warned_about(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(activate.logger, "warning", lambda text, *values: said.append(text % values))
    config = configure(additional_config={"policy": "keydiff", "budget": 64})
    assert config.scheduler_config.scheduler_cls is None
    assert said
    assert all("budget, policy" in line and "Nitro stays off" in line for line in said)


@pytest.mark.parametrize("other", [{"ascend": {"budget": 1}}, {}])
def test_other_plugins_configurations_are_none_of_our_business(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(activate.logger, "warning", lambda text, *values: pytest.fail(text % values))
    assert configure(additional_config=other).scheduler_config.scheduler_cls is None


def test_null_is_off_and_says_so(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(activate.logger, "warning_once", lambda text, *values: said.append(text % values))
    assert configure(additional_config={"nitro": None}).scheduler_config.scheduler_cls is None
    assert 'additional_config has "nitro": null, so Nitro stays off' in said


def test_a_budget_that_never_binds_is_warned_about(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(activate.logger, "warning", lambda text, *values: said.append(text % values))
    configure(additional_config=nitro.vllm_config(budget=192, slack=64))
    assert not said
    configure(additional_config=nitro.vllm_config(budget=193, slack=64))
    assert said
    assert "budget=193 plus slack=64 is more than max_model_len=256" in said[0]


def test_schedulers_and_workers_of_others_are_not_replaced(configure: Configure) -> None:
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    with pytest.raises(nitro.UnsupportedError, match="drop --scheduler-cls"):
        configure(additional_config=nitro.vllm_config(budget=64), scheduler_cls=theirs)
    with pytest.raises(nitro.UnsupportedError, match="drop --worker-cls"):
        configure(additional_config=nitro.vllm_config(budget=64), worker_cls="somebody.Worker")


def test_untested_minors_are_refused_unless_allowed(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.1")
    monkeypatch.delenv(compat.ALLOW_UNTESTED, raising=False)
    with pytest.raises(nitro.UnsupportedError, match=r"0\.99\.1 was never tested.*NITRO_ALLOW_UNTESTED_VLLM=1"):
        configure(additional_config=nitro.vllm_config(budget=64))
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    assert (
        configure(additional_config=nitro.vllm_config(budget=64)).scheduler_config.scheduler_cls == activate.SCHEDULER
    )


def test_every_hook_fits_the_installed_vllm() -> None:
    assert [fault for hook in compat.hooks() if (fault := hook.fault())] == []


def test_hooks_that_no_longer_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def allocate(self, pool: int, request_id: str) -> None: ...

    wrong = (compat.Hook(Changed, "allocate", ("request_id",)), compat.Hook(Changed, "gone", ()))
    monkeypatch.setattr(compat, "hooks", lambda: wrong)
    with pytest.raises(nitro.UnsupportedError, match=r"allocate takes \('pool',\).*gone does not exist"):
        compat.require_hooks()


def test_importing_nitro_brings_neither_torch_nor_vllm() -> None:
    code = "import sys, nitro; nitro.vllm_config; sys.exit(bool({'torch', 'vllm', 'triton'} & set(sys.modules)))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
