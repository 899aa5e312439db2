"""The compactor that uses kernels, token by token, compiled."""

from __future__ import annotations

from typing import Any

import compactor_cases as cases
import paged_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro import policies
from nitro.kernel_compactor import KernelCompactor
from nitro.kernels.fp8 import FP8

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, *FP8)


@pytest.mark.parametrize("policy", cases.POLICIES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), usual=st.sampled_from([0, 30]))
def test_histories(policy: str, seed: int, dtype: torch.dtype, usual: int) -> None:
    cases.check_history(policy, seed=seed, device="cuda", dtype=dtype, usual=usual)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", cases.POLICIES)
def test_evictions_of_the_usual_size(policy: str, dtype: torch.dtype) -> None:
    """From CUDA graphs."""
    cases.check_usual(policy, device="cuda", dtype=dtype)


@pytest.mark.parametrize("policy", cases.POLICIES)
def test_a_usual_eviction_does_not_wait_for_the_device(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = cases.World("kernel", policy, device="cuda", usual=60)
    world.grow("x", 50)
    compact = KernelCompactor._compact_usual

    def without_waiting(self: KernelCompactor, *args: Any) -> None:
        with paged_cases.no_synchronisation():
            compact(self, *args)

    monkeypatch.setattr(KernelCompactor, "_compact_usual", without_waiting)
    with cases.counted_usual() as found:
        world.evict({"x": 30})
    assert bool(found) == policies.get(policy).capturable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", cases.POLICIES)
def test_the_best_stay(policy: str, dtype: torch.dtype) -> None:
    cases.check_choice(policy, device="cuda", dtype=dtype)


@pytest.mark.parametrize("policy", cases.POLICIES)
def test_counts(policy: str) -> None:
    cases.check_counts(policy, device="cuda")


@pytest.mark.parametrize("policy", cases.POLICIES)
def test_counting_does_not_wait_for_the_device(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = cases.World("kernel", policy, device="cuda")
    world.grow("x", 50)
    world.grow("y", 30)
    world.evict({"x": 30, "y": 20})
    world.grow("x", 2)
    count = KernelCompactor._count

    def without_waiting(self: KernelCompactor, *args: Any) -> Any:
        with paged_cases.no_synchronisation():
            return count(self, *args)

    monkeypatch.setattr(KernelCompactor, "_count", without_waiting)
    assert len(world.count(["x", "y"], 0.5)) == 2


@pytest.mark.parametrize("policy", cases.POLICIES)
@pytest.mark.parametrize("grown", [2, 20], ids=["window-moved", "window-in-place"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_eviction_does_not_wait_for_the_device(
    policy: str, grown: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cases.World("kernel", policy, device="cuda", dtype=dtype)
    world.grow("x", 50)
    world.grow("y", 30)
    world.evict({"x": 30, "y": 20})
    world.grow("x", grown)
    world.grow("y", grown)
    compact = KernelCompactor._compact_group

    def without_waiting(self: KernelCompactor, *args: Any) -> None:
        with paged_cases.no_synchronisation():
            compact(self, *args)

    monkeypatch.setattr(KernelCompactor, "_compact_group", without_waiting)
    world.evict({"x": 30, "y": 20})
