"""Selection against an independent implementation in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nitro.kernels.select import select_topk_ref

INTERESTING = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4028234663852886e38, 1.0000001]


def naive(scores: list[float], keep: int, protect: int, window: int) -> list[int]:
    """Takes the forced slots, then the best of the rest, one by one."""
    n = len(scores)
    chosen = set(range(protect)) | set(range(n - window, n))
    while len(chosen) < keep:
        best = -1
        for slot in range(n):
            if slot in chosen:
                continue
            if best < 0 or (math.isnan(scores[best]) and not math.isnan(scores[slot])) or scores[slot] > scores[best]:
                best = slot
        chosen.add(best)
    return sorted(chosen)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], int, int, int]:
    n = draw(st.integers(1, 40))
    rows = draw(st.integers(1, 3))
    values = st.one_of(st.sampled_from(INTERESTING), st.floats(width=32), st.integers(-3, 3).map(float))
    scores = draw(st.lists(st.lists(values, min_size=n, max_size=n), min_size=rows, max_size=rows))
    keep = draw(st.integers(0, n))
    protect = draw(st.integers(0, keep))
    window = draw(st.one_of(st.just(keep - protect), st.integers(0, keep - protect)))
    return scores, keep, protect, window


@given(cases())
def test_equals_naive(case: tuple[list[list[float]], int, int, int]) -> None:
    scores, keep, protect, window = case
    got = select_topk_ref(torch.tensor(scores, dtype=torch.float32), keep, protect, window)
    assert got.dtype == torch.int64
    assert got.tolist() == [naive(row, keep, protect, window) for row in scores]


@given(st.lists(st.floats(width=32), min_size=2, max_size=2))
def test_order_of_two_is_the_order_of_floats(pair: list[float]) -> None:
    a, b = pair
    better = 1 if b > a or (math.isnan(a) and not math.isnan(b)) else 0
    assert select_topk_ref(torch.tensor(pair, dtype=torch.float32), 1, 0, 0).tolist() == [better]


def test_every_nan_is_lowest_whatever_its_sign_and_payload() -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800000], dtype=np.uint32)  # four NaNs, -inf
    scores = torch.from_numpy(bits.view(np.float32))
    assert select_topk_ref(scores, 1, 0, 0).tolist() == [4]
    assert select_topk_ref(scores, 3, 0, 0).tolist() == [0, 1, 4]


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, -math.inf, 7.0])
def test_ties_go_to_the_lower_slot(value: float) -> None:
    scores = torch.full((1000,), value)
    assert select_topk_ref(scores, 10, 2, 3).tolist() == [*range(7), 997, 998, 999]


def test_zeros_of_both_signs_tie() -> None:
    assert select_topk_ref(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 2, 0, 0).tolist() == [0, 1]


def test_subnormal_scores_are_told_apart_even_where_floats_flush_them() -> None:
    scores = torch.tensor([0.0, 1e-45, 3e-45])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        assert select_topk_ref(scores, 1, 0, 0).tolist() == [2]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (3, 5, 97), (2, 3, 4, 33), (0, 3, 8), (2, 0, 8)])
def test_leading_dimensions_are_independent(shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    n = shape[-1]
    keep, protect, window = (n + 1) // 2, n // 6, n // 5
    got = select_topk_ref(scores, keep, protect, window)
    assert got.shape == (*shape[:-1], keep)
    for row, chosen in zip(scores.reshape(-1, n), got.reshape(-1, keep), strict=True):
        assert chosen.tolist() == naive(row.tolist(), keep, protect, window)


def test_strides_do_not_matter_and_input_stays() -> None:
    scores = torch.randn(7, 50, 3, generator=torch.Generator().manual_seed(2)).permute(0, 2, 1)
    before = scores.clone()
    assert not scores.is_contiguous()
    assert torch.equal(select_topk_ref(scores, 20, 4, 5), select_topk_ref(scores.contiguous(), 20, 4, 5))
    assert torch.equal(scores, before)


def test_keep_all_and_none() -> None:
    scores = torch.tensor([3.0, math.nan, 1.0])
    assert select_topk_ref(scores, 3, 0, 0).tolist() == [0, 1, 2]
    assert select_topk_ref(scores, 3, 1, 2).tolist() == [0, 1, 2]
    assert select_topk_ref(scores, 0, 0, 0).tolist() == []


@pytest.mark.parametrize(
    ("keep", "protect", "window", "said"),
    [
        (5, 3, 3, r"protect=3 \+ window=3 = 6 is above keep=5"),
        (9, 1, 1, "keep=9 is above the number of slots, 8"),
        (4, -1, 1, "protect=-1 and window=1 must not be negative"),
        (4, 1, -1, "protect=1 and window=-1 must not be negative"),
        (-1, 0, 0, r"protect=0 \+ window=0 = 0 is above keep=-1"),
    ],
)
def test_counts_out_of_bounds(keep: int, protect: int, window: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_topk_ref(torch.zeros(2, 8), keep, protect, window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_dtype_is_checked(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32"):
        select_topk_ref(torch.zeros(8, dtype=dtype), 4, 1, 1)


def test_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match="scalar"):
        select_topk_ref(torch.tensor(1.0), 0, 0, 0)
