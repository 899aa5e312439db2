"""Faults that a second review has found: memory at start-up, and policies of other packages."""

from __future__ import annotations

from dataclasses import dataclass

import compactor_cases as cases
import pytest
import torch
from torch import Tensor

from nitro import kernel_compactor, policies
from nitro.kernels import score_combine
from nitro.policies.base import Policy, ScoreInput
from nitro.policies.knorm import KNorm
from nitro.policies.ragged import RaggedInput

from .conftest import interpreted

pytestmark = [interpreted, pytest.mark.usefixtures("small_sorts")]


@pytest.fixture
def small_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds to sort the tiles that GPUs sort in microseconds."""
    monkeypatch.setattr(score_combine, "SORTS", (64,))


@dataclass(frozen=True)
class Plain(Policy):
    name = "plain"

    def score(self, x: ScoreInput) -> Tensor:
        return policies.get("random").score(x)


@pytest.mark.parametrize("slots", [False, True])
def test_a_new_formula_does_not_inherit_the_kernels_of_the_old_one(slots: bool) -> None:
    @dataclass(frozen=True, slots=slots)
    class Mine(KNorm):
        name = "mine"

        def score(self, x: ScoreInput) -> Tensor:
            return policies.get("random").score(x)

    kept = []
    for policy in (policies.get("random"), Mine()):
        world = cases.World("kernel", "random")
        world.compactor.set_policy(policy)
        world.grow("x", 45)
        kept.append(world.evict({"x": 30}))
    assert kept[0] == kept[1]


def test_an_unchanged_formula_inherits_its_kernels() -> None:
    @dataclass(frozen=True, slots=True)
    class Renamed(KNorm):
        name = "renamed"

    assert Renamed.score_ragged is KNorm.score_ragged


def test_start_up_takes_no_more_scratch_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest request may need more than there is, e.g. where prompts of 128k tokens are not evicted."""
    monkeypatch.setattr(cases, "LAYERS", 6)
    per_layer = kernel_compactor._BYTES_PER_SLOT * cases.HEADS * 100  # longest is 100
    monkeypatch.setattr(kernel_compactor, "SCRATCH_BYTES", 2 * per_layer)
    select, largest = kernel_compactor.select_ragged, 0

    def watch(scores: Tensor, *args: object) -> object:
        nonlocal largest
        largest = max(largest, scores.numel() * kernel_compactor._BYTES_PER_SLOT)
        return select(scores, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_compactor, "select_ragged", watch)
    cases.World("kernel", "gravity")
    assert 0 < largest <= 2 * per_layer


def test_a_trial_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window of 4,096 and the shape of Llama-3.1-8B, K and V in float32 would take 2.1 GB."""
    seen = []

    @dataclass(frozen=True)
    class Watching(Plain):
        def score(self, x: ScoreInput) -> Tensor:
            seen.append(x.keys.shape[0])
            return super().score(x)

    monkeypatch.setattr(cases, "LAYERS", 6)
    cases.World("kernel", "random").compactor.set_policy(Watching())
    assert seen
    assert max(seen) <= 2


def test_scores_are_float32_whatever_the_default_is() -> None:
    world = cases.World("kernel", "random")
    torch.set_default_dtype(torch.bfloat16)
    try:
        world.compactor.set_policy(Plain())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scratch", [2**28, 3000], ids=["at-once", "in-parts"])
@pytest.mark.parametrize("garbage", [torch.inf, torch.nan, -torch.inf, None], ids=["inf", "nan", "-inf", "bits"])
def test_garbage_for_scores_costs_no_sink_and_no_new_token(
    garbage: float | None, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a policy returns, exact counts, sinks and window stay, and nothing is lost or doubled (``check``)."""

    @dataclass(frozen=True)
    class Garbage(KNorm):
        name = "garbage"

        def score_ragged(self, x: RaggedInput) -> Tensor:
            shape = x.layers.num_layers, x.layers.num_kv_heads, x.batch.total
            if garbage is not None:
                return torch.full(shape, garbage)
            generator = torch.Generator().manual_seed(x.batch.total)
            bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
            return bits.view(torch.float32)

    world = cases.World("kernel", "random")
    world.compactor.set_policy(Garbage())
    monkeypatch.setattr(kernel_compactor, "SCRATCH_BYTES", scratch)
    world.grow("a:1", 40)
    world.fork("a:1", "a:2")
    world.grow("b", 33)
    for grown, keep in ((1, 20), (3, 12), (0, 8), (7, 9), (1, 9)):
        for name in ("a:1", "a:2", "b"):
            world.grow(name, grown)
        world.evict({"a:1": keep, "a:2": keep, "b": keep})


@pytest.mark.parametrize("policy", ["gravity", "streaming", "keydiff"])
@pytest.mark.parametrize(
    ("layers", "heads", "dim", "block", "sinks", "window", "blocks", "longest"),
    [
        (1, 1, 80, 8, 0, 1, 4, 24),
        (1, 1, 96, 128, 4, 300, 1, 100),
        (3, 1, 32, 8, 4, 32, 2, 3),
        (1, 2, 256, 16, 0, 1, 3, 1),
    ],
)
def test_small_shapes_start_and_evict(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    layers: int,
    heads: int,
    dim: int,
    block: int,
    sinks: int,
    window: int,
    blocks: int,
    longest: int,
) -> None:
    """Pools below sinks + window, requests shorter than these, one layer, one head, a window of one token."""
    for name, value in (("LAYERS", layers), ("HEADS", heads), ("DIM", dim), ("BLOCK", block), ("SINKS", sinks)):
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setattr(cases, "WINDOW", window)
    monkeypatch.setattr(cases, "LONGEST", longest)
    world = cases.World("kernel", policy, num_blocks=blocks)
    if (blocks - 1) * block <= sinks + window + 2:
        return
    world.grow("x", sinks + window + 2)
    for _ in range(3):
        world.evict({"x": sinks + window}, protect=sinks)
        world.grow("x", 1)
