"""The registry: Nitro's own policies, other packages', and what goes wrong with them."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from nitro import policies
from nitro.config import Settings
from nitro.errors import SettingsError
from nitro.policies.base import Policy, ScoreInput

Install = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Mine(Policy):
    name: ClassVar[str] = "mine"
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError("strength must not be negative")

    def score(self, x: ScoreInput) -> Tensor:
        return x.positions * torch.tensor(self.strength)


class NoDataclass(Policy):
    name: ClassVar[str] = "mine"

    def score(self, x: ScoreInput) -> Tensor:
        return x.positions.float()


@dataclass
class Mutable(Policy):
    name: ClassVar[str] = "mine"

    def score(self, x: ScoreInput) -> Tensor:
        return x.positions.float()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with entry points on sys.path, as pip would; its module is ``some_policies``."""
    module = types.ModuleType("some_policies")
    module.Mine, module.NoDataclass, module.Mutable, module.thing = Mine, NoDataclass, Mutable, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_policies", module)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(package: str, **points: str) -> None:
        info = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{policies.ENTRY_POINT_GROUP}]", *lines, ""]))
        policies._third_party.cache_clear()

    policies._third_party.cache_clear()
    yield write
    monkeypatch.undo()
    policies._third_party.cache_clear()


def test_built_in_policies_are_available() -> None:
    assert {"gravity", "keydiff", "knorm", "kvdiff", "random", "streaming", "vdiff", "vnorm"} <= set(
        policies.available()
    )
    assert list(policies.available()) == sorted(policies.available())
    for name in policies._BUILT_IN:
        assert policies.get(name).name == name


def test_another_package_adds_a_policy(install: Install) -> None:
    install("some-policies", mine="some_policies:Mine")
    assert "mine" in policies.available()
    assert policies.get("mine", strength=2.0) == Mine(strength=2.0)
    settings = Settings.parse({"policy": "mine", "policy_options": {"strength": 2}, "budget": 100})
    assert settings.policy == "mine"


def test_options_of_another_packages_policy_are_checked(install: Install) -> None:
    install("some-policies", mine="some_policies:Mine")
    with pytest.raises(
        SettingsError, match=r"unknown option 'strenth' \(value 1\) of policy 'mine', did you mean 'strength'"
    ):
        policies.get("mine", strenth=1)
    with pytest.raises(SettingsError, match=r"policy 'mine' refuses .*strength must not be negative"):
        policies.get("mine", strength=-1)
    with pytest.raises(SettingsError, match="policy 'mine' refuses"):
        policies.get("mine", strength="1")


def test_collision_with_a_built_in_is_refused_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("some-policies", keydiff="some_policies:Mine", mine="some_policies:Mine")
    with caplog.at_level(logging.WARNING, logger="nitro.policies"):
        assert type(policies.get("keydiff")).__module__ == "nitro.policies.keydiff"
        policies.get("keydiff")
    (warning,) = caplog.messages
    assert "ignoring policy 'keydiff' of some-policies 1.2 (some_policies:Mine)" in warning
    assert policies.get("mine") == Mine()


def test_nearest_name_may_be_another_packages(install: Install) -> None:
    install("some-policies", mine="some_policies:Mine")
    with pytest.raises(SettingsError, match=r"unknown policy 'mime', did you mean 'mine'\?.*streaming"):
        policies.get("mime")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("missing_module:Mine", "cannot be loaded .ModuleNotFoundError: No module named 'missing_module'"),
        ("some_policies:Absent", "cannot be loaded .AttributeError"),
        ("some_policies:thing", "is 3, but must be a frozen dataclass"),
        ("some_policies:NoDataclass", "must be a frozen dataclass"),
        ("some_policies:Mutable", "must be a frozen dataclass"),
        ("collections:OrderedDict", "must be a frozen dataclass"),
    ],
)
def test_broken_entry_point_fails_only_when_asked_for(install: Install, value: str, said: str) -> None:
    install("bad-policies", mine=value)
    assert "mine" in policies.available()
    assert policies.get("streaming").name == "streaming"
    with pytest.raises(SettingsError, match=rf"policy 'mine' of bad-policies 1\.2 \({value}\) .*{said}"):
        policies.get("mine")


def test_name_of_class_and_entry_point_must_agree(install: Install) -> None:
    install("some-policies", other="some_policies:Mine")
    with pytest.raises(SettingsError, match="whose name is 'other'"):
        policies.get("other")


def test_two_packages_with_one_name(install: Install) -> None:
    install("a-policies", mine="some_policies:Mine")
    install("b-policies", mine="some_policies:NoDataclass")
    assert policies.get("streaming").name == "streaming"
    with pytest.raises(
        SettingsError, match=r"'mine' is provided 2 times, by a-policies 1\.2 .* and by b-policies 1\.2"
    ):
        policies.get("mine")


def test_the_same_object_listed_twice_is_no_conflict(install: Install) -> None:
    install("a-policies", mine="some_policies:Mine")
    install("b-policies", mine="some_policies:Mine")
    assert policies.get("mine") == Mine()


def test_entry_point_without_a_distribution(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    point = EntryPoint("mine", "missing_module:Mine", policies.ENTRY_POINT_GROUP)
    monkeypatch.setattr(policies, "entry_points", lambda group: EntryPoints([point]))
    policies._third_party.cache_clear()
    with pytest.raises(SettingsError, match="policy 'mine' of an unknown package"):
        policies.get("mine")


def test_the_fixture_leaves_nothing_behind() -> None:
    assert not any(d.name in ("some-policies", "bad-policies") for d in Distribution.discover())
    assert "mine" not in policies.available()
