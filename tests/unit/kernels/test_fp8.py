"""FP8 caches: every number that there is, and the scales that K and V are divided by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import compactor_cases
import fp8_cases
import pytest
import torch

from nitro.kernels.fp8 import FP8
from nitro.kernels.paged import PagedLayers
from nitro.policies.base import Policy, ScoreInput

from .conftest import interpreted

dtypes = pytest.mark.parametrize("dtype", FP8, ids=str)


@interpreted
@dtypes
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of a signalling NaN
def test_every_number_is_read_for_what_it_is(dtype: torch.dtype, stride: int) -> None:
    fp8_cases.check_numbers(dtype, stride)


@interpreted
@dtypes
def test_scales_of_the_scores_that_depend_on_them(dtype: torch.dtype) -> None:
    fp8_cases.check_scales(dtype)


@dtypes
def test_rows_and_numbers(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 8, 6).to(dtype)
    scales = torch.tensor([[[9.0, 9.0], [9.0, 9.0]], [[0.5, 3.0], [7.0, 1.0]]])
    layers, table = PagedLayers.of([cache, cache], scales), torch.tensor([2, 0], dtype=torch.int32)
    rows = layers.rows(1, table, 11)
    assert rows.dtype == dtype
    numbers = layers.numbers(1, table, 11)
    assert torch.equal(numbers[0, :, :3], rows[0, :, :3].float() * 0.5)
    assert torch.equal(numbers[1, :, :3], rows[1, :, :3].float() * 3.0)
    assert torch.equal(numbers[0, :, 3:], rows[0, :, 3:].float() * 7.0)
    assert torch.equal(numbers[1, :, 3:], rows[1, :, 3:].float())
    assert torch.equal(layers.part(1, 2).numbers(0, table, 11), numbers)
    plain = PagedLayers.of([cache.half()])
    assert plain.numbers(0, table, 11).dtype == torch.float16


@pytest.mark.parametrize(
    ("cache", "scales", "error", "said"),
    [
        (torch.float16, torch.ones(1, 2, 2), TypeError, "these are torch.float16: pass none, or view them as FP8"),
        (torch.float8_e5m2, torch.ones(1, 2, 2).double(), TypeError, "scales must be float32, got torch.float64"),
        (torch.float8_e5m2, torch.ones(2, 2), ValueError, r"num_kv_heads\] = \[1, 2, 2\], .* got \[2, 2\]"),
        (torch.float8_e5m2, torch.ones(1, 2, 2).mT, ValueError, r"got \[1, 2, 2\] with strides \(4, 1, 2\)"),
        (torch.float8_e5m2, torch.ones(1, 2, 2, device="meta"), ValueError, "on cpu, got .* on meta"),
    ],
)
def test_wrong_scales(cache: torch.dtype, scales: torch.Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        PagedLayers.of([torch.zeros(3, 2, 8, 6, dtype=cache)], scales)


@dataclass(frozen=True, slots=True)
class _Seen(Policy):
    """Has no kernel: it is given gathered keys and values."""

    name: ClassVar[str] = "seen"
    inputs: list[ScoreInput] = field(default_factory=list, compare=False)

    def score(self, x: ScoreInput) -> torch.Tensor:
        self.inputs.append(x)
        return x.positions.float()


@interpreted
@dtypes
def test_a_policy_without_a_kernel_gets_the_numbers(dtype: torch.dtype) -> None:
    world, policy = compactor_cases.World("kernel", "streaming", dtype=dtype), _Seen()
    compactor = world.compactor
    compactor.layers = PagedLayers.of(world.caches, torch.full((2, 2, 2), 3.0))
    compactor.set_policy(policy)
    world.grow("x", 40)
    policy.inputs.clear()
    world.evict({"x": 20})
    (x,) = policy.inputs
    want = torch.stack([compactor_cases.content("x", position) for position in range(40)], dim=2).to(dtype).float() * 3
    assert torch.equal(torch.cat([x.keys, x.values], -1), want)
