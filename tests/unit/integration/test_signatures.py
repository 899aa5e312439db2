"""Each vLLM from 0.26 to 0.33 has the methods that Nitro overrides, with the parameters that it relies on."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import vllm

from nitro.integration.vllm import compat

RECORDED: dict[str, dict[str, list[str] | None]] = json.loads(
    (Path(__file__).parents[2] / "data" / "vllm_signatures.json").read_text(encoding="utf-8")
)
HOOKS = {hook.label: hook for hook in (*compat.hooks(), *compat.v2_hooks())}


def test_all_versions_and_all_methods_are_recorded() -> None:
    minors = {compat.minor_of(version) for version in RECORDED}
    assert minors == {f"0.{number}" for number in range(26, 34)}
    for minor in {minor for tested in compat.TESTED_MINORS.values() for minor in tested}:
        assert minor in minors
    assert all(methods.keys() == HOOKS.keys() for methods in RECORDED.values()), "run ci/vllm_signatures.py again"


@pytest.mark.parametrize("version", RECORDED)
def test_parameters_are_as_expected(version: str) -> None:
    wrong = {
        name: RECORDED[version][name]
        for name, hook in HOOKS.items()
        if RECORDED[version][name] is None
        or (
            isinstance(hook, compat.Hook)
            and RECORDED[version][name][1 : 1 + len(hook.parameters)] != list(hook.parameters)  # type: ignore[index]
        )
    }
    assert not wrong


def test_what_is_recorded_is_what_is_installed() -> None:
    recorded = RECORDED.get(vllm.__version__.split("+")[0])
    if recorded is None:
        pytest.skip(f"vLLM {vllm.__version__} is not recorded")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, hook in HOOKS.items():
        assert hook.fault() is None
        if isinstance(hook, compat.Field):
            assert recorded[name] == [hook.name]
            continue
        function = inspect.unwrap(getattr(hook.owner, hook.name))
        found = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in variable]
        assert recorded[name] == found, name
