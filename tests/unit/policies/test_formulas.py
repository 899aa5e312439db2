"""Each formula against an independent implementation in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nitro import policies
from nitro.errors import SettingsError
from nitro.policies import gravity as gravity_module
from nitro.policies.base import ScoreInput

MakeInput = Callable[..., ScoreInput]
Rows = npt.NDArray[np.float64]  # [N, D]


def expect(name: str, x: ScoreInput, formula: Callable[[Rows, Rows], list[float]], **options: object) -> None:
    scores = policies.get(name, **options).score(x)
    for layer in range(x.keys.shape[0]):
        for head in range(x.keys.shape[1]):
            want = formula(x.keys[layer, head].double().numpy(), x.values[layer, head].double().numpy())
            torch.testing.assert_close(
                scores[layer, head].double(), torch.tensor(want, dtype=torch.float64), rtol=2e-5, atol=1e-6
            )


def norm(row: Rows) -> float:
    return math.sqrt(sum(float(c) ** 2 for c in row))


def test_knorm(make_input: MakeInput) -> None:
    expect("knorm", make_input(), lambda keys, values: [-norm(k) for k in keys])


def test_vnorm(make_input: MakeInput) -> None:
    expect("vnorm", make_input(), lambda keys, values: [norm(v) for v in values])


def test_keydiff(make_input: MakeInput) -> None:
    def formula(keys: Rows, values: Rows) -> list[float]:
        anchor = sum(k / norm(k) for k in keys) / len(keys)
        return [-float(k @ anchor) / (norm(k) * norm(anchor)) for k in keys]

    expect("keydiff", make_input(), formula)


def test_keydiff_prefers_the_key_that_differs(make_input: MakeInput) -> None:
    keys = torch.ones(1, 1, 10, 8)
    keys[0, 0, 4] = -1.0
    assert policies.get("keydiff").score(make_input(keys)).argmax() == 4


def test_keydiff_ignores_the_length_of_keys(make_input: MakeInput) -> None:
    x = make_input()
    lengths = torch.rand(x.keys.shape[:3], generator=torch.Generator().manual_seed(1)).unsqueeze(-1) * 100 + 0.1
    score = policies.get("keydiff").score
    torch.testing.assert_close(score(replace(x, keys=x.keys * lengths)), score(x), rtol=1e-4, atol=1e-6)


def naive_ranks(row: list[float]) -> list[float]:
    """0 for the lowest, 1 for the highest; equal ones share the mean of their places."""
    return [(sum(b < a for b in row) + (sum(b == a for b in row) - 1) / 2) / max(len(row) - 1, 1) for a in row]


def naive_undone(row: Rows, positions: list[int], theta: float, interleaved: bool) -> Rows:
    """Keys as complex numbers, turned back by their positions."""
    dim = row.shape[1]
    a, b = (row[:, 0::2], row[:, 1::2]) if interleaved else (row[:, : dim // 2], row[:, dim // 2 :])
    angles = np.outer(positions, [theta ** -(2 * i / dim) for i in range(dim // 2)])
    turned = (a + 1j * b) * np.exp(-1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def naive_differences(values: Rows) -> list[float]:
    return [norm(v - values.mean(axis=0)) for v in values]


def naive_means(row: list[float], radius: int) -> list[float]:
    near = [row[max(i - radius, 0) : i + radius + 1] for i in range(len(row))]
    return [sum(some) / len(some) for some in near]


@pytest.mark.parametrize(("recency", "radius"), [(0.0, 0), (0.75, 0), (0.0, 4), (0.75, 1)])
def test_kvdiff(make_input: MakeInput, recency: float, radius: int) -> None:
    positions = torch.arange(50, dtype=torch.int32) * 3 + 1
    x = make_input(positions=positions.expand(3, 2, 50))
    scores = policies.get("kvdiff", recency=recency, radius=radius).score(x)
    for layer, rotation in enumerate(x.rotations):
        for head in range(2):
            keys = x.keys[layer, head].double().numpy()
            if rotation is not None:
                keys = naive_undone(keys, positions.tolist(), 100.0, rotation.interleaved)
            anchor = sum(k / norm(k) for k in keys) / len(keys)
            differ = [-float(k @ anchor) / (norm(k) * norm(anchor)) for k in keys]
            values = naive_differences(x.values[layer, head].double().numpy())
            ranks = (naive_ranks(naive_means(differ, radius)), naive_ranks(values), naive_ranks(positions.tolist()))
            want = [a + b * (1 + 2**-12) + recency * c for a, b, c in zip(*ranks, strict=True)]
            torch.testing.assert_close(scores[layer, head], torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_kvdiff_without_a_rotation_takes_keys_as_they_are(make_input: MakeInput) -> None:
    x = make_input()
    score = policies.get("kvdiff").score
    assert torch.equal(score(replace(x, rotations=()))[2], score(x)[2])
    assert not torch.equal(score(replace(x, rotations=()))[0], score(x)[0])


@pytest.mark.parametrize("radius", [0, 1, 4, 64])
def test_vdiff(make_input: MakeInput, radius: int) -> None:
    def formula(_: Rows, values: Rows) -> list[float]:
        return naive_means(naive_differences(values), radius)

    expect("vdiff", make_input(), formula, radius=radius)


@pytest.mark.parametrize("policy", ["kvdiff", "vdiff"])
@pytest.mark.parametrize("radius", [-1, 65, 1.0, True, "4"])
def test_bad_radius(policy: str, radius: object) -> None:
    with pytest.raises(SettingsError, match=r"option radius=.* must be an integer between 0 and 64"):
        policies.get(policy, radius=radius)


def test_bad_recency() -> None:
    with pytest.raises(SettingsError, match=r"option recency=-1 of policy 'kvdiff' must be a number between 0 and 10"):
        policies.get("kvdiff", recency=-1)


@pytest.mark.parametrize("name", ["knorm", "vnorm", "keydiff"])
def test_order_of_slots_does_not_matter(name: str, make_input: MakeInput) -> None:
    x = make_input()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    mixed = replace(x, keys=x.keys[:, :, order], values=x.values[:, :, order])
    score = policies.get(name).score
    torch.testing.assert_close(score(mixed), score(x)[:, :, order], rtol=1e-5, atol=1e-6)


def test_streaming_prefers_the_newest_also_beyond_what_float32_counts(make_input: MakeInput) -> None:
    positions = torch.tensor([0, 1, 7, 2**24, 2**24 + 1, 2**30 - 1, 2**30, 2**30 + 1], dtype=torch.int32)
    x = make_input(shape=(1, 2, 8, 4), positions=positions.expand(1, 2, 8))
    scores = policies.get("streaming").score(x)
    assert scores[0, 0, -4:].diff().gt(0).all()
    assert scores[0, 0].diff().ge(0).all()
    assert scores[0, 0, -3:].tolist() == [-3.0, -2.0, -1.0]
    assert torch.equal(scores[0, 0], scores[0, 1])


def naive_gravity(keys: Rows, values: Rows, window: int, softening: float) -> list[float]:
    n = len(keys)
    mass = [norm(v) for v in values]
    mass = [m * n / sum(mass) for m in mass]
    scale = sum(norm(a - b) ** 2 for a in keys for b in keys) / n**2
    pulls = []
    for i in range(n):
        others = [j for j in range(max(0, n - window), n) if j != i]
        pulls.append(mass[i] * sum(mass[j] / (norm(keys[i] - keys[j]) ** 2 / scale + softening**2) for j in others))
    return [pull * n / sum(pulls) for pull in pulls]


@pytest.mark.parametrize("window", [1, 8, 50, 1000])
@pytest.mark.parametrize("softening", [0.1, 1, 10.0])
def test_gravity(make_input: MakeInput, window: int, softening: float) -> None:
    x = make_input(shape=(2, 2, 30, 8), window=window)
    expect("gravity", x, lambda keys, values: naive_gravity(keys, values, window, softening), softening=softening)


def test_gravity_in_chunks_is_the_same(make_input: MakeInput, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_input(shape=(2, 2, 1001, 64), window=32)
    whole = policies.get("gravity").score(x)
    monkeypatch.setattr(gravity_module, "_PAIRS_PER_CHUNK", 32 * 96)
    torch.testing.assert_close(policies.get("gravity").score(x), whole, rtol=1e-6, atol=0)


def test_gravity_has_no_unit_and_no_origin(make_input: MakeInput) -> None:
    x = make_input()
    score = policies.get("gravity").score
    for moved in (replace(x, keys=x.keys * 3.0), replace(x, values=x.values * 1e-3), replace(x, keys=x.keys + 100.0)):
        torch.testing.assert_close(score(moved), score(x), rtol=1e-3, atol=1e-5)


def test_gravity_favours_mass_and_nearness(make_input: MakeInput) -> None:
    keys, values = torch.zeros(1, 1, 12, 4), torch.ones(1, 1, 12, 4)
    keys[0, 0, :8, 0] = torch.arange(1.0, 9.0)  # the window lies at the origin; slot 0 is nearest to it
    values[0, 0, 5] *= 100.0
    scores = policies.get("gravity").score(make_input(keys, values, window=4))[0, 0]
    assert scores[:5].diff().lt(0).all()
    assert scores[5] > scores[4]


def test_gravity_of_a_single_slot_is_zero(make_input: MakeInput) -> None:
    assert policies.get("gravity").score(make_input(shape=(1, 1, 1, 4))).tolist() == [[[0.0]]]


def test_gravity_scores_have_mean_one(make_input: MakeInput) -> None:
    mean = policies.get("gravity").score(make_input()).mean(dim=-1)
    torch.testing.assert_close(mean, torch.ones_like(mean))


@pytest.mark.parametrize("softening", [0, -1.0, 1e-4, 11, math.nan, math.inf, "1", True, None, [1]])
def test_gravity_refuses_bad_softening(softening: object) -> None:
    with pytest.raises(SettingsError, match=r"option softening=.* must be a number between 0\.001 and 10"):
        policies.get("gravity", softening=softening)


def test_gravity_of_keys_with_a_large_common_part(make_input: MakeInput) -> None:
    """A large common offset, as real keys have in some channels, costs no accuracy in half precision storage."""
    offset = torch.tensor([300.0, -200.0, 0.0, 0.0])
    keys = (torch.randn(1, 1, 40, 4, generator=torch.Generator().manual_seed(5)) + offset).half()
    x = make_input(keys, torch.ones(1, 1, 40, 4), window=8)
    expect("gravity", x, lambda k, v: naive_gravity(k, v, 8, 0.1))
