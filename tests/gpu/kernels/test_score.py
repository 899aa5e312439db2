"""Scores compiled, against references and policies."""

from __future__ import annotations

from collections.abc import Callable

import fp8_cases
import numpy as np
import pytest
import score_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import no_synchronisation

from nitro.kernels import score, score_combine
from nitro.kernels.fp8 import FP8

pytestmark = pytest.mark.gpu

# Each is compiled anew, so not every combination; every value of every property occurs.
SHAPES = [
    cases.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    cases.Shape(1, 8, 16, 128, torch.float16, "hnd"),
    cases.Shape(2, 3, 32, 80, torch.float16, "nhd"),
    cases.Shape(2, 2, 64, 96, torch.bfloat16, "hnd"),
    cases.Shape(2, 1, 128, 256, torch.float32, "nhd"),
    cases.Shape(2, 2, 8, 32, torch.float32, "odd"),
    cases.Shape(1, 2, 7, 64, torch.bfloat16, "strided"),
    cases.Shape(1, 8, 16, 128, torch.float8_e4m3fn, "hnd"),
    cases.Shape(2, 2, 32, 64, torch.float8_e4m3fn, "nhd"),
    cases.Shape(1, 2, 16, 256, torch.float8_e5m2, "nhd"),
    cases.Shape(2, 2, 8, 80, torch.float8_e5m2, "odd"),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
CHECKS: dict[str, cases.Check] = {
    "norms": cases.check_norms,
    "streaming": cases.check_streaming,
    "random": cases.check_random,
    "keydiff": cases.check_keydiff,
    "vnorm_centred": cases.check_centred,
    "gravity": cases.check_gravity,
    "lagkv": lambda case: cases.check_lagkv(case, 4, 32),
    "unrotated": lambda case: cases.check_unrotated(
        case, case.shape.head_dim, interleaved=False, dtype=torch.float32, scale=1.0
    ),
}
checks = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())


@shapes
@checks
@settings(max_examples=15)
@given(data=st.data())
def test_any_batch(shape: cases.Shape, check: cases.Check, data: st.DataObject) -> None:
    check(data.draw(cases.cases(longest=400, most=5, device="cuda", shape=shape)))


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_every_fp8_number_is_read_for_what_it_is(dtype: torch.dtype, stride: int) -> None:
    fp8_cases.check_numbers(dtype, stride, "cuda")


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_scales_of_fp8(dtype: torch.dtype) -> None:
    fp8_cases.check_scales(dtype, "cuda")


@pytest.mark.parametrize("lag", [128, 1000])
def test_lagkv_ranks_long_parts(lag: int) -> None:
    """Ranks are a permutation only if a score that is computed for several layouts has the same bits in each."""
    shape = cases.Shape(1, 2, 16, 128, torch.bfloat16, "nhd")
    cases.check_lagkv(cases.make_case(shape, [3000, 1500, 700], device="cuda"), 4, lag)


@pytest.mark.parametrize(
    ("shape", "rotary", "interleaved", "dtype", "scale"),
    [
        (SHAPES[0], 64, True, torch.bfloat16, 1.0),
        (SHAPES[1], 32, False, torch.float32, 1.2),
        (SHAPES[2], 40, False, torch.float16, 1.0),
        (SHAPES[3], 48, True, torch.float32, 1.2),
    ],
)
def test_rotary_variants(shape: cases.Shape, rotary: int, interleaved: bool, dtype: torch.dtype, scale: float) -> None:
    for moved in (False, True):
        case = cases.make_case(shape, [300, 1, 77], moved=moved, bad=0.02, device="cuda")
        cases.check_unrotated(case, rotary, interleaved=interleaved, dtype=dtype, scale=scale)


@settings(max_examples=40)
@given(cases.score_cases(longest=900, most=5, device="cuda"), st.sampled_from([0, 1, 4, 100]), st.booleans())
def test_combinations(x: cases.Scores, radius: int, evictable: bool) -> None:
    cases.check_neighbours(x, radius)
    cases.check_rank_sum(x, (1.0, 1.0), evictable=evictable)
    cases.check_zscore_sum(x, ("model", "layer"), (1.0, 1.0), evictable=evictable)
    cases.check_zscore_sum(x, ("head", "head"), (0.3, -1.7), evictable=evictable)


@settings(max_examples=25)
@given(cases.cases(longest=900, most=5, device="cuda", shape=SHAPES[0], share=False))
def test_logical_order(case: cases.Case) -> None:
    cases.check_order(case)


@pytest.mark.parametrize("moved", [False, True])
def test_many_requests(moved: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 40).tolist()
    case = cases.make_case(SHAPES[0], lengths, moved=moved, window=32, device="cuda")
    for check in CHECKS.values():
        check(case)
    cases.check_order(case)


def test_long_request() -> None:
    """Many tiles, several programs a row, several sorted tiles."""
    case = cases.make_case(cases.Shape(1, 1, 16, 64), [20_000], moved=True, window=64, bad=0.001, device="cuda")
    for check in CHECKS.values():
        check(case)
    cases.check_order(case)
    x = cases.make_scores([20_000], (1, 1), "ties", np.random.default_rng(0), moved=True, device="cuda")
    cases.check_rank_sum(x, (1.0, 1.0), evictable=True)
    cases.check_zscore_sum(x, ("head", "model"), (1.0, 1.0), evictable=True)
    cases.check_neighbours(x, 4)


@pytest.mark.parametrize("name", ["norms", "keydiff", "vnorm_centred", "unrotated", "gravity"])
def test_chunks_of_long_requests(name: str) -> None:
    """Several programs share a row, and some of them have nothing to do for the requests beside it."""
    CHECKS[name](cases.make_case(SHAPES[0], [9000, 3, 1024, 1025], moved=True, bad=0.01, device="cuda"))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_gravity_of_keys_that_differ_little(dtype: torch.dtype) -> None:
    """Most of what is multiplied cancels; some models have such keys in some layers."""
    for head_dim in (64, 128, 256):
        shape = cases.Shape(1, 2, 16, head_dim, dtype)
        cases.check_gravity(cases.make_case(shape, [600, 40], window=32, offset=100.0, device="cuda"))


@pytest.mark.parametrize("sort", [16, 128, 1024])
def test_other_sorted_tiles(sort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_combine, "SORTS", (sort,))
    for length in (1, sort - 1, sort, sort + 1, 3000):
        x = cases.make_scores([length, 3], (1, 2), "ties", np.random.default_rng(length), moved=True, device="cuda")
        cases.check_rank_sum(x, (1.0, 1.0), evictable=True)
        cases.check_order(cases.make_case(SHAPES[0], [length], moved=True, device="cuda"))


ALL: dict[str, Callable[[cases.Case], torch.Tensor]] = {
    "knorm": lambda c: score.knorm(c.layers, c.batch),
    "keydiff": lambda c: score.keydiff(c.layers, c.batch),
    "vnorm_centred": lambda c: score.vnorm_centred(c.layers, c.batch),
    "gravity": lambda c: score.gravity(c.layers, c.batch, order=c.order),
    "lagkv": lambda c: score.lagkv(c.layers, c.batch, sinks=2, lag=16, order=c.order),
    "streaming": lambda c: score.streaming(c.layers, c.batch, c.logical_lengths, c.positions),
    "order": lambda c: score.logical_order(c.layers, c.batch, c.positions),
}


@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_the_device(name: str) -> None:
    case = cases.make_case(SHAPES[0], [100, 20], moved=True, device="cuda")
    ALL[name](case)  # compiles
    with no_synchronisation():
        ALL[name](case)


def test_combinations_do_not_wait_for_the_device() -> None:
    x = cases.make_scores([100, 20], (2, 2), "normal", np.random.default_rng(0), moved=True, device="cuda")

    def combine() -> None:
        score.neighbour_mean(x.batch, x.a, 4, order=x.order)
        score.rank_sum(x.batch, x.a, x.b, order=x.order)
        score.zscore_sum(x.batch, x.a, x.b, order=x.order)

    combine()
    with no_synchronisation():
        combine()


@pytest.mark.parametrize("score_of", [score.keydiff, score.vnorm_centred, score.gravity, score.knorm])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_request_scores_the_same_bits_in_every_batch(shape: cases.Shape, score_of: cases.Score) -> None:
    cases.check_same_bits_alone(cases.make_case(shape, [370, 45, 9000], bad=0.1, device="cuda"), score_of)


@pytest.mark.parametrize("wide", cases.WIDE_STRIDES)
@pytest.mark.parametrize("name", ["vnorm", "keydiff", "gravity"])
def test_wide_caches(name: str, wide: str) -> None:
    cases.check_wide(getattr(score, name), getattr(score, f"{name}_ref"), wide, "cuda")


def test_wide_scores() -> None:
    cases.check_wide_scores("cuda")
