"""Arithmetic on scores, and logical order, against their references and plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import score_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import score, score_combine

from .conftest import interpreted


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_combine, "SORTS", (16,))
    monkeypatch.setattr(score_combine, "_TILE", 32)


pytestmark = [interpreted, pytest.mark.usefixtures("small_tiles")]
few = settings(max_examples=6)
any_scores = cases.score_cases(longest=40)
scopes = st.sampled_from(["head", "layer", "model"])
weights = st.sampled_from([(1.0, 1.0), (0.3, -1.7)])


@few
@given(cases.cases(longest=50, share=False))
def test_logical_order(case: cases.Case) -> None:
    cases.check_order(case)


@few
@given(any_scores, st.sampled_from([0, 1, 4, 50]))
def test_neighbour_mean(x: cases.Scores, radius: int) -> None:
    cases.check_neighbours(x, radius)


@few
@given(any_scores, weights, st.booleans())
def test_rank_sum(x: cases.Scores, weights: tuple[float, float], evictable: bool) -> None:
    cases.check_rank_sum(x, weights, evictable=evictable)


@few
@given(any_scores, scopes, scopes, weights, st.booleans())
def test_zscore_sum(
    x: cases.Scores, of_a: score.Scope, of_b: score.Scope, weights: tuple[float, float], evictable: bool
) -> None:
    cases.check_zscore_sum(x, (of_a, of_b), weights, evictable=evictable)


def test_ranks_by_hand() -> None:
    batch = cases.RaggedBatch.of([[]], [6], [6])
    a = torch.tensor([[[3.0, 1.0, torch.nan, 1.0, torch.inf, -torch.inf]]])
    b = torch.zeros_like(a)
    got = score.rank_sum(batch, a, b, evictable=False)[0, 0]
    # -inf 0, the two ones 1.5, 3.0 third, inf fourth, of 0..4; six equal scores are all in the middle.
    want = [3 / 4 + 0.5, 1.5 / 4 + 0.5, np.nan, 1.5 / 4 + 0.5, 1.5, 0.5]
    assert np.array_equal(got.numpy(), np.float32(want), equal_nan=True)


def test_forced_tokens_are_not_ranked() -> None:
    batch = cases.RaggedBatch.of([[]], [7], [7], protect=2, window=2)
    a = torch.tensor([[[100.0, 90.0, 1.0, 3.0, 2.0, 80.0, -80.0]]])
    got = score.rank_sum(batch, a, a)[0, 0].tolist()
    assert got == [np.inf, np.inf, 0.0, 2.0, 1.0, np.inf, np.inf]
    z = score.zscore_sum(batch, a, a, weights=(1.0, 0.0))[0, 0].tolist()
    assert z[:2] == z[5:] == [np.inf, np.inf]
    assert np.allclose(z[2:5], [-np.sqrt(1.5), np.sqrt(1.5), 0.0], atol=1e-6)


def test_scores_that_do_not_vary_have_no_zscore() -> None:
    batch = cases.RaggedBatch.of([[]], [50], [50])
    a = torch.full((2, 3, 50), 0.1)
    for scope in ("head", "layer", "model"):
        assert torch.equal(score.zscore_sum(batch, a, a, scopes=(scope, scope)), torch.zeros(2, 3, 50))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_edges_of_sorted_tiles(length: int) -> None:
    rng = np.random.default_rng(length)
    x = cases.make_scores([length, 3], (1, 2), "ties", rng, moved=True, protect=0, window=0)
    cases.check_rank_sum(x, (1.0, 1.0), evictable=True)
    cases.check_order(cases.make_case(cases.Shape(1, 2), [length], moved=True))


def test_default_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of them: sorting thousands takes the interpreter a minute."""
    monkeypatch.undo()
    assert score_combine._sort_shape(300) == (512, 2)
    assert score_combine._sort_shape(600) == score_combine._sort_shape(100_000) == (2048, 8)
    x = cases.make_scores([300], (1, 1), "ties", np.random.default_rng(0), moved=False)
    cases.check_rank_sum(x, (1.0, 1.0), evictable=True)
