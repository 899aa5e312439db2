"""Scores against their references, and against the policies that they replace."""

from __future__ import annotations

import math

import pytest
import score_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import score, score_gravity, score_lagkv, score_mean, score_slots
from nitro.kernels.paged import PagedLayers, RaggedBatch

from .conftest import interpreted

SMALL = cases.Shape(num_layers=2, num_heads=2, block_size=8, head_dim=32, dtype=torch.float16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 slots, so that short requests have several."""
    monkeypatch.setattr(score_slots, "_TILE_BYTES", 1)
    monkeypatch.setattr(score_slots, "_SLOTS", 16)
    monkeypatch.setattr(score_mean, "_TILE_BYTES", 1)
    monkeypatch.setattr(score_gravity, "_TILE_BYTES", 0)
    monkeypatch.setattr(score_gravity, "_PULLED", 4)
    monkeypatch.setattr(score_lagkv, "_TILE_BYTES", 1)


pytestmark = [interpreted, pytest.mark.usefixtures("small_tiles")]
few = settings(max_examples=8)
any_case = cases.cases(longest=45)


@few
@given(any_case)
def test_norms(case: cases.Case) -> None:
    cases.check_norms(case)


@few
@given(any_case)
def test_streaming(case: cases.Case) -> None:
    cases.check_streaming(case)


@few
@given(any_case)
def test_random(case: cases.Case) -> None:
    cases.check_random(case)


@few
@given(any_case)
def test_keydiff(case: cases.Case) -> None:
    cases.check_keydiff(case)


@few
@given(any_case, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(cases.DTYPES), st.sampled_from([1.0, 1.3]))
def test_keydiff_unrotated(case: cases.Case, part: int, interleaved: bool, dtype: torch.dtype, scale: float) -> None:
    rotary = case.shape.head_dim // part // 2 * 2
    cases.check_unrotated(case, rotary, interleaved=interleaved, dtype=dtype, scale=scale)


@few
@given(any_case)
def test_vnorm_centred(case: cases.Case) -> None:
    cases.check_centred(case)


@few
@given(any_case, st.sampled_from([0.1, 1.0]))
def test_gravity(case: cases.Case, softening: float) -> None:
    cases.check_gravity(case, softening)


@few
@given(any_case, st.integers(0, 4), st.sampled_from([2, 7, 16, 20]))
def test_lagkv(case: cases.Case, sinks: int, lag: int) -> None:
    cases.check_lagkv(case, sinks, lag)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout: str, moved: bool) -> None:
    shape = cases.Shape(1, 2, 8, 32, torch.bfloat16, layout)
    case = cases.make_case(shape, [37, 1], moved=moved, bad=0.05)
    cases.check_norms(case)
    cases.check_keydiff(case)
    cases.check_centred(case)
    cases.check_gravity(case)
    cases.check_lagkv(case, 2, 8)
    cases.check_unrotated(case, 16, interleaved=False, dtype=torch.float32, scale=1.0)


@pytest.mark.parametrize("check", [cases.check_norms, cases.check_keydiff, cases.check_centred, cases.check_gravity])
def test_shared_blocks(check: cases.Check) -> None:
    check(cases.make_case(SMALL, [20, 9, 33, 1], share=True))


def test_norms_of_float16_do_not_overflow() -> None:
    cache = torch.full((1, 1, 8, 64), 60000.0, dtype=torch.float16)
    layers, batch = PagedLayers.of([cache]), RaggedBatch.of([[0]], [8], [8])
    want = 60000.0 * math.sqrt(32)
    assert torch.allclose(score.vnorm(layers, batch), torch.full((1, 1, 8), want), rtol=1e-6)
    assert torch.allclose(score.keydiff(layers, batch), torch.full((1, 1, 8), -1.0), rtol=1e-6)
    assert torch.isfinite(score.gravity(layers, batch)).all()


@pytest.mark.parametrize("score_of", [score.keydiff, score.vnorm_centred, score.gravity, score.knorm])
def test_a_request_scores_the_same_bits_in_every_batch(score_of: cases.Score) -> None:
    """Whatever else is in the batch, in whatever blocks the tokens lie."""
    case = cases.make_case(SMALL, [37, 45, 12], bad=0.1)
    together = score_of(case.layers, case.batch)
    for number, columns in enumerate(case.columns):
        length = columns.stop - columns.start
        alone = RaggedBatch.of([case.batch.block_tables[number].tolist()], [length], [length], window=case.batch.window)
        assert torch.equal(score_of(case.layers, alone).view(torch.int32), together[..., columns].view(torch.int32))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_changes_no_other_score(where: str, value: float) -> None:
    """The other tokens score as if it were not there, bit for bit where sums are not reordered."""
    case = cases.make_case(SMALL, [40])
    element = 3 if where == "key" else SMALL.head_dim + 3
    spoilt = case.layers.caches[0].clone()
    block, head, offset = int(case.batch.block_tables[0, 1]), 1, 4
    slot = SMALL.block_size + offset
    spoilt[block, head, offset, element] = value
    zeroed = case.layers.caches[0].clone()
    zeroed[block, head, offset] = 0.0
    layers = [PagedLayers.of([x, *case.layers.caches[1:]]) for x in (spoilt, zeroed)]
    others = torch.arange(40) != slot
    if where == "key":
        got, want = (score.keydiff(x, case.batch) for x in layers)  # a zero key has no direction either
        assert bool(got[0, 1, slot].isnan())
        assert torch.equal(got[..., others], want[..., others])
    for score_of in (score.gravity, lambda x, batch: score.lagkv(x, batch, sinks=0, lag=8)):
        got = score_of(layers[0], case.batch)
        assert torch.isnan(got).nonzero().tolist() == [[0, 1, slot]]


def test_gravity_over_several_parts_of_the_window() -> None:
    for window in (33, 64, 200):
        cases.check_gravity(cases.make_case(SMALL, [70, 50], moved=True, window=window, bad=0.05))


def test_gravity_without_a_window_is_zero() -> None:
    case = cases.make_case(SMALL, [20], window=0)
    assert torch.equal(cases.run(lambda: score.gravity(case.layers, case.batch)), torch.zeros(2, 2, 20))


def test_positions_beyond_the_table_are_not_read() -> None:
    case = cases.make_case(SMALL, [40])
    table = cases.rotary_table(32, 30)
    got = cases.run(lambda: score.keydiff_unrotated(case.layers, case.batch, table))
    assert torch.equal(got.isnan(), (torch.arange(40) >= 30).expand_as(got))
    ref = score.keydiff_unrotated_ref(case.layers, case.batch, table)
    cases.check(case, "keydiff_unrotated", got, ref)


@pytest.mark.usefixtures("monkeypatch")
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_every_width(dtype: torch.dtype, head_dim: int) -> None:
    case = cases.make_case(cases.Shape(1, 1, 16, head_dim, dtype), [19])
    cases.check_norms(case)
    cases.check_keydiff(case)
    cases.check_gravity(case)
    cases.check_lagkv(case, 1, 8)


def test_scores_go_where_they_are_told() -> None:
    case = cases.make_case(SMALL, [20])
    out = torch.full((2, 2, 20), math.nan)
    assert score.knorm(case.layers, case.batch, out=out) is out
    assert torch.equal(out, score.knorm(case.layers, case.batch))


def test_no_requests() -> None:
    case = cases.make_case(SMALL, [20])
    none = RaggedBatch.of([], [], [])
    for score_of in (score.knorm, score.keydiff, score.vnorm_centred, score.gravity):
        assert score_of(case.layers, none).shape == (2, 2, 0)
    assert score.lagkv(case.layers, none, sinks=4).shape == (2, 2, 0)
