"""The compactor that uses kernels, token by token, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import compactor_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nitro import kernel_compactor, policies
from nitro.errors import IntegrityError, SettingsError
from nitro.kernels.fp8 import FP8
from nitro.policies.base import Policy, ScoreInput
from nitro.policies.knorm import KNorm
from nitro.types import Eviction, StepPlan

from .conftest import interpreted

pytestmark = interpreted


# Interpreted, the others take minutes here; below they are compared with the dense compactor, and on a GPU with all.
@pytest.mark.parametrize("policy", ["streaming", "random", "knorm", "keydiff", "gravity"])
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, *FP8]), usual=st.sampled_from([0, 30]))
def test_histories(policy: str, seed: int, dtype: torch.dtype, usual: int) -> None:
    cases.check_history(policy, seed=seed, steps=4, dtype=dtype, usual=usual)


@pytest.mark.parametrize("policy", ["streaming", "random", "keydiff", "vnorm"])
def test_evictions_of_the_usual_size(policy: str) -> None:
    cases.check_usual(policy)


def test_numbers_of_a_usual_eviction_are_checked() -> None:
    world = cases.World("kernel", "streaming", usual=24)
    world.grow("x", 20)
    good = Eviction("x", 0, 20, 20, 12, 2, np.array([1, 2], np.int32), np.array([1, 2, 3], np.int32))
    before = [cache.clone() for cache in world.caches]
    for wrong, said in (
        ({"keep": 7}, "keeps 7 slots"),
        ({"src_blocks": np.array([1, 2, 64], np.int32)}, "block 64 is not within the cache's 64 blocks"),
        ({"src_blocks": np.array([1, 2, -1], np.int32)}, "block -1 is not within"),
    ):
        with pytest.raises(ValueError, match=said):
            world.compactor.apply(StepPlan.of([dataclasses.replace(good, **wrong)], cases.BLOCK))
    assert all(torch.equal(a, b) for a, b in zip(before, world.caches, strict=True))
    assert world.compactor.evicted("x") == 0


def test_policies_that_look_at_the_host_are_never_captured() -> None:
    class Own(policies.get("keydiff").__class__):  # type: ignore[misc]
        __slots__ = ()

        def score_ragged(self, x: Any) -> Tensor:
            return super().score_ragged(x)

    assert policies.get("keydiff").capturable
    assert not Own().capturable, "nobody said so"
    assert cases.World("kernel", "random", usual=24).compactor._static is None


@pytest.mark.parametrize(
    ("policy", "options"), [("kvdiff", {}), ("kvdiff", {"recency": 0.0, "radius": 0}), ("vdiff", {})], ids=str
)
def test_histories_are_those_of_the_dense_compactor(policy: str, options: dict[str, float]) -> None:
    """Also when slots are out of order: positions, neighbours and ranks are of tokens, not of slots."""
    cases.check_history(policy, seed=1, steps=4, twin=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, *FP8], ids=str)
@pytest.mark.parametrize("policy", cases.POLICIES)
def test_the_best_stay(policy: str, dtype: torch.dtype) -> None:
    cases.check_choice(policy, dtype=dtype)


@pytest.mark.parametrize("policy", cases.POLICIES)
def test_counts(policy: str) -> None:
    cases.check_counts(policy)


def test_counts_of_layers_and_requests_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LAYERS", 5)
    counts = []
    for limit in (2**28, 3 * 16 * cases.HEADS * 40, 1):
        monkeypatch.setattr(kernel_compactor, "SCRATCH_BYTES", limit)
        world = cases.World("kernel", "random")
        for name, length in (("x", 40), ("y", 33), ("z", 50)):
            world.grow(name, length)
        counts.append(world.count(["x", "y", "z"], 0.5))
    assert counts[0] == counts[1] == counts[2]
    assert len(set(counts[0])) > 1


def test_the_window_is_exact_when_evictions_follow_each_other_closely() -> None:
    """After a fill the newest tokens lie anywhere; fewer than a window of new ones are behind them."""
    world = cases.World("kernel", "gravity")
    world.grow("x", 40)
    world.evict({"x": 20})
    for _ in range(4):
        world.grow("x", 2)
        world.evict({"x": 20})


def test_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (2**28, 1):
        monkeypatch.setattr(kernel_compactor, "SCRATCH_BYTES", limit)
        world = cases.World("kernel", "random")
        for name in ("x", "y", "z"):
            world.grow(name, 33)
        results.append(world.evict({"x": 20, "y": 9, "z": 32}))
    assert results[0] == results[1]


def test_layers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LAYERS", 5)
    results = []
    for limit in (2**28, 3 * 16 * cases.HEADS * 40):
        monkeypatch.setattr(kernel_compactor, "SCRATCH_BYTES", limit)
        world = cases.World("kernel", "random")
        world.grow("x", 40)
        results.append(world.evict({"x": 20}))
    assert results[0] == results[1]
    assert len(results[0][0]) == 5


def test_a_policy_without_kernels() -> None:
    @dataclass(frozen=True)
    class Plain(Policy):
        name = "plain"

        def score(self, x: ScoreInput) -> Tensor:
            assert (x.positions.diff(dim=-1) > 0).all(), "in logical order"
            return policies.get("random").score(x)

    worlds = [cases.World("kernel", "random") for _ in range(2)]
    worlds[1].compactor.set_policy(Plain())
    kept = []
    for world in worlds:
        world.grow("x", 45)
        world.evict({"x": 30})
        world.grow("x", 3)
        world.grow("y", 20)
        kept.append(world.evict({"x": 25, "y": 11}))
    assert kept[0] == kept[1]


def test_a_policy_that_breaks_its_contract_is_named() -> None:
    @dataclass(frozen=True)
    class Broken(KNorm):
        name = "broken"

        def score_ragged(self, x: object) -> Tensor:
            return torch.zeros(1)

    world = cases.World("kernel", "knorm")
    with pytest.raises(SettingsError, match=r"'broken'.*score_ragged"):
        world.compactor.set_policy(Broken())
    assert world.compactor.policy == policies.get("knorm"), "the old one stays"


def test_a_plan_that_does_not_continue_the_state_changes_nothing() -> None:
    world = cases.World("kernel", "knorm")
    sequence = world.grow("x", 20)
    before = [cache.clone() for cache in world.caches]
    blocks = np.array(sequence.blocks, np.int32)
    wrong = Eviction("x", 1, 20, 20, 10, 2, blocks[:2], blocks)
    with pytest.raises(IntegrityError, match="does not continue its state"):
        world.compactor.apply(StepPlan.of([wrong], cases.BLOCK))
    assert all(torch.equal(a, b) for a, b in zip(before, world.caches, strict=True))
    assert world.compactor.evicted("x") == 0
