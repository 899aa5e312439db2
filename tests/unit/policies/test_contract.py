"""What every policy must do, run for every policy of Nitro."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nitro import policies
from nitro.errors import SettingsError
from nitro.policies.base import Policy, ScoreInput, checked_score

READS: dict[str, set[str]] = {
    "gravity": {"keys", "values"},
    "keydiff": {"keys"},
    "knorm": {"keys"},
    "kvdiff": {"keys", "values"},
    "random": set(),
    "streaming": set(),
    "vdiff": {"values"},
    "vnorm": {"values"},
}
REACH = {"vdiff": 8}  # slots on either side that see it when one is gone
ALONE = {"kvdiff": {"radius": 0, "recency": 0.0}}  # otherwise all ranks move a little where one slot is gone

MakeInput = Callable[..., ScoreInput]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.fixture(params=list(READS))
def policy(request: pytest.FixtureRequest) -> Policy:
    return policies.get(request.param)


def test_the_matrix_is_complete() -> None:
    assert set(READS) == set(policies._BUILT_IN)
    assert set(READS) <= set(policies.available())


def test_documentation_names_every_policy_and_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in READS:
        assert f"\n## {name}\n" in text
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for option in fields(policies.policy_class(name)):  # type: ignore[arg-type]
            assert f"`{option.name}`" in section


@pytest.mark.parametrize("slots", [1, 2, 50])
def test_no_score_is_above_the_highest(policy: Policy, make_input: MakeInput, slots: int) -> None:
    assert float(policy.score(make_input(shape=(2, 2, slots, 8))).max()) <= policy.highest + 1e-6


def test_another_formula_has_no_highest_of_its_parents() -> None:
    class Own(policies.policy_class("keydiff")):  # type: ignore[misc]
        __slots__ = ()

        def score(self, x: ScoreInput) -> Tensor:
            return 10 * super().score(x)

    assert Own().highest == float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 8), (1, 2, 33, 1), (3, 1, 65, 80)])
def test_shape_dtype_and_finite(
    policy: Policy, make_input: MakeInput, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = make_input(shape=shape)
    scores = checked_score(policy, replace(x, keys=x.keys.to(dtype), values=x.values.to(dtype)))
    assert scores.isfinite().all()


def test_scores_discriminate(policy: Policy, make_input: MakeInput) -> None:
    scores = policy.score(make_input())
    for row in scores.flatten(0, 1):
        assert len(row.unique()) > 45  # of 50


def test_deterministic_and_without_side_effects(policy: Policy, make_input: MakeInput) -> None:
    x = make_input()
    before = [t.clone() for t in (x.keys, x.values, x.positions)]
    first, second = policy.score(x), policies.get(policy.name).score(x)
    assert torch.equal(bits(first), bits(second))
    assert all(torch.equal(a, b) for a, b in zip(before, (x.keys, x.values, x.positions), strict=True))


@pytest.mark.parametrize(("num_slots", "window"), [(1, 8), (5, 1), (131, 1), (131, 8), (700, 8)])
def test_layers_and_heads_are_independent_bit_for_bit(
    policy: Policy, make_input: MakeInput, num_slots: int, window: int
) -> None:
    x = make_input(shape=(4, 3, num_slots, 64), layers=[2, 5, 6, 9], heads=[4, 5, 6], window=window)
    whole = policy.score(x)
    for layer, head in itertools.product(range(4), range(3)):
        part = slice(layer, layer + 1), slice(head, head + 1)
        alone = replace(
            x,
            keys=x.keys[part],
            values=x.values[part],
            positions=x.positions[part],
            layers=x.layers[part[0]],
            heads=x.heads[part[1]],
            rotations=x.rotations[part[0]],
        )
        assert torch.equal(bits(policy.score(alone)), bits(whole[part]))


def test_strides_do_not_matter_bit_for_bit(policy: Policy, make_input: MakeInput) -> None:
    x = make_input(shape=(2, 3, 70, 64))
    strided = replace(
        x,
        keys=x.keys.transpose(2, 3).contiguous().transpose(2, 3),  # as vLLM's CPU cache stores keys
        values=x.values.repeat_interleave(2, dim=2)[:, :, ::2],
        positions=x.positions.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    assert not any(t.is_contiguous() for t in (strided.keys, strided.values, strided.positions))
    assert torch.equal(bits(policy.score(strided)), bits(policy.score(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_scored_in_float32(policy: Policy, make_input: MakeInput, dtype: torch.dtype) -> None:
    x = make_input()
    half = replace(x, keys=x.keys.to(dtype), values=x.values.to(dtype))
    same = replace(x, keys=half.keys.float(), values=half.values.float())
    assert torch.equal(bits(policy.score(half)), bits(policy.score(same)))


def test_largest_float16_does_not_overflow(policy: Policy, make_input: MakeInput) -> None:
    x = make_input(shape=(1, 2, 40, 128))
    scores = policy.score(replace(x, keys=(x.keys.sign() * 65504).half(), values=(x.values.sign() * 65504).half()))
    assert scores.isfinite().all()


@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-30])
def test_identical_and_vanishing_slots_give_finite_scores(policy: Policy, make_input: MakeInput, fill: float) -> None:
    x = make_input()
    same = torch.full_like(x.keys, fill)
    assert policy.score(replace(x, keys=same, values=same)).isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "where"), [(name, where) for name, reads in READS.items() for where in sorted(reads)])
def test_a_slot_that_is_not_finite_goes_first_and_harms_no_other(
    make_input: MakeInput, name: str, where: str, poison: float
) -> None:
    score = policies.get(name, **ALONE.get(name, {})).score
    x = make_input()
    rows: Tensor = getattr(x, where).clone()
    rows[1, 0, 20, 3] = poison
    scores = score(replace(x, keys=rows) if where == "keys" else replace(x, values=rows))
    assert scores.isnan().nonzero().tolist() == [[1, 0, 20]]
    rest = [slot for slot in range(50) if slot != 20]
    without = replace(x, keys=x.keys[:, :, rest], values=x.values[:, :, rest], positions=x.positions[:, :, rest])
    far = [abs(slot - 20) > REACH.get(name, 0) for slot in rest]
    torch.testing.assert_close(scores[1, 0, rest][far], score(without)[1, 0][far], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for name, reads in READS.items() for where in sorted({"keys", "values"} - reads)]
)
def test_scores_do_not_depend_on_what_the_policy_does_not_read(make_input: MakeInput, name: str, where: str) -> None:
    x = make_input()
    nothing = torch.full_like(x.keys, float("nan"))
    changed = replace(x, keys=nothing) if where == "keys" else replace(x, values=nothing)
    score = policies.get(name).score
    assert torch.equal(bits(score(changed)), bits(score(x)))


def test_is_a_frozen_dataclass(policy: Policy) -> None:
    assert is_dataclass(type(policy))
    assert vars(type(policy))["__dataclass_params__"].frozen
    assert not hasattr(policy, "__dict__"), "slots"
    assert policy == policies.get(policy.name)
    assert hash(policy) == hash(policies.get(policy.name))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": torch.zeros(3, 2, 49, 8)}, r"keys and values must be \[L, H, N, D\]"),
        ({"keys": torch.zeros(3, 2, 50)}, r"keys and values must be \[L, H, N, D\]"),
        ({"keys": torch.zeros(3, 2, 50, 0)}, "must not be empty"),
        ({"positions": torch.zeros(3, 2, 1, dtype=torch.int32)}, r"positions must be \[3, 2, 50\]"),
        ({"layers": torch.zeros(2, dtype=torch.int64)}, r"layers must be \[3\]"),
        ({"heads": torch.zeros(3, dtype=torch.int64)}, r"heads must be \[2\]"),
        ({"request_key": 2**64}, "request_key=18446744073709551616"),
        ({"request_key": -1}, "request_key=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"window": 0}, "window=0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"logical_len": 49}, "logical_len=49"),
    ],
)
def test_inputs_are_checked(make_input: MakeInput, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(make_input(), **change)


@dataclass(frozen=True, slots=True)
class Wrong(Policy):
    name: ClassVar[str] = "wrong"
    dtype: torch.dtype = torch.float32
    slots: int = 50

    def score(self, x: ScoreInput) -> Tensor:
        return torch.zeros(3, 2, self.slots, dtype=self.dtype)


def test_results_are_checked(make_input: MakeInput) -> None:
    assert checked_score(Wrong(), make_input()).shape == (3, 2, 50)
    for wrong in (Wrong(dtype=torch.float64), Wrong(slots=49)):
        with pytest.raises(SettingsError, match=r"policy 'wrong' returned scores of .*Wrong\.score"):
            checked_score(wrong, make_input())
