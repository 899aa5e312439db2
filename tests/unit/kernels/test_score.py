"""Scores against their references, and against the policies that they replace."""

from __future__ import annotations

import math

import pytest
import score_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import _score, score, score_gravity, score_lagkv, score_mean, score_slots
from nitro.kernels.paged import PagedLayers, RaggedBatch

from .conftest import interpreted

SMALL = cases.Shape(num_layers=2, num_heads=2, block_size=8, head_dim=32, dtype=torch.float16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 slots, so that short requests have several."""
    monkeypatch.setattr(score_slots, "_TILE_BYTES", 1)
    monkeypatch.setattr(score_slots, "_SLOTS", 16)
    monkeypatch.setattr(score_mean, "_TILE_BYTES", 1)
    monkeypatch.setattr(_score, "WHOLE", 32)
    monkeypatch.setattr(_score, "CHUNK", 16)
    monkeypatch.setattr(score_gravity, "_TILE_BYTES", 0)
    monkeypatch.setattr(score_gravity, "_PULLED", 16)
    monkeypatch.setattr(score_lagkv, "_CAREFUL_BYTES", 1)


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
@given(
    any_case,
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from(cases.TABLE_DTYPES),
    st.sampled_from([1.0, 1.3]),
)
def test_keydiff_unrotated(case: cases.Case, part: int, interleaved: bool, dtype: torch.dtype, scale: float) -> None:
    rotary = case.shape.head_dim // part // 2 * 2
    cases.check_unrotated(case, rotary, interleaved=interleaved, dtype=dtype, scale=scale)


@pytest.mark.parametrize(("heads", "dtype"), [(3, torch.float16), (6, torch.float32), (4, torch.float8_e4m3fn)])
def test_keydiff_unrotated_of_heads_together(heads: int, dtype: torch.dtype) -> None:
    """Of wide keys, a program has several heads, each with positions and bad numbers of its own."""
    case = cases.make_case(cases.Shape(1, heads, 8, 80, dtype), [19, 1], moved=True, bad=0.05)
    cases.check_unrotated(case, 48, interleaved=heads == 3, dtype=torch.float32, scale=1.0)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 64, 80, 128, 256])
def test_no_thread_of_lagkv_lacks_a_token(dtype: torch.dtype, head_dim: int) -> None:
    """Triton 3.6 adds up wrongly where threads are left over, and no interpreter does: see `load_element_runs`."""
    for lag in (2, 16, 128, 256, 257, 1024):
        chosen = score_lagkv._choice(dtype, head_dim, lag)
        run = chosen["WIDTH"] // chosen["RUNS"]
        threads = 32 * chosen["num_warps"]
        assert chosen["RUNS"] == 1 or chosen["TILE"] * run * dtype.itemsize >= 16 * threads


@few
@given(any_case)
def test_vnorm_centred(case: cases.Case) -> None:
    cases.check_centred(case)


@few
@given(any_case, st.sampled_from([0.1, 1.0]))
def test_gravity(case: cases.Case, softening: float) -> None:
    cases.check_gravity(case, softening)


@settings(max_examples=5)
@given(any_case, st.integers(0, 4), st.sampled_from([2, 7, 16, 20]))
def test_lagkv(case: cases.Case, sinks: int, lag: int) -> None:
    cases.check_lagkv(case, sinks, lag)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout: str, moved: bool) -> None:
    shape = cases.Shape(1, 2, 8, 32, torch.bfloat16, layout)
    case = cases.make_case(shape, [21, 1], moved=moved, bad=0.05)
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
    layers, batch = PagedLayers.of([cache]), RaggedBatch.of([[0]], [8], [8], window=1)
    want = 60000.0 * math.sqrt(32)
    assert torch.allclose(score.vnorm(layers, batch), torch.full((1, 1, 8), want), rtol=1e-6)
    assert torch.allclose(score.keydiff(layers, batch), torch.full((1, 1, 8), -1.0), rtol=1e-6)
    assert torch.isfinite(score.gravity(layers, batch)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_square_beyond_float32_scores_nan(dtype: torch.dtype) -> None:
    case = cases.make_case(cases.Shape(1, 1, 8, 32, dtype), [20])
    case.layers.caches[0][int(case.batch.block_tables[0, 1]), 0, 3, [5, 40]] = 1e20  # of key and value
    for score_of in (score.knorm, score.vnorm, score.keydiff, score.vnorm_centred, score.gravity):
        got = score_of(case.layers, case.batch)
        assert got.isnan().nonzero().tolist() == [[0, 0, 11]]


@pytest.mark.parametrize("size", [1e18, 1e20, 1e30], ids=str)
@pytest.mark.parametrize("varies", [False, True])
def test_lagkv_of_numbers_whose_squares_overflow(varies: bool, size: float) -> None:
    """Also where the next part does not vary, so that a channel has no range, or varies as much."""
    case = cases.make_case(cases.Shape(1, 1, 8, 32, torch.bfloat16), [40])
    element = case.layers.caches[0][case.batch.block_tables[0].long()][:, 0, :, 5]
    element.zero_()
    if varies:
        element[2, 0] = 1e17
    element[1, 3] = size
    case.layers.caches[0][case.batch.block_tables[0].long(), 0, :, 5] = element
    got = cases.run(lambda: score.lagkv(case.layers, case.batch, sinks=0, lag=8, ranked=False))
    want = score.lagkv_ref(case.layers, case.batch, sinks=0, lag=8, ranked=False)
    cases.check(case, "lagkv", got, want)
    assert got.isnan().nonzero().tolist() == ([[0, 0, 11]] if size > 2e19 else [])


@pytest.mark.parametrize("score_of", [score.keydiff, score.vnorm_centred, score.gravity, score.knorm])
def test_a_request_scores_the_same_bits_in_every_batch(score_of: cases.Score) -> None:
    cases.check_same_bits_alone(cases.make_case(SMALL, [37, 45, 12], bad=0.1), score_of)


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
    for window in (33, 200):
        cases.check_gravity(cases.make_case(SMALL, [50, 40], moved=True, window=window, bad=0.05))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_gravity_of_keys_that_differ_little(dtype: torch.dtype) -> None:
    """Most of what is multiplied cancels; some models have such keys in some layers."""
    cases.check_gravity(cases.make_case(cases.Shape(1, 2, 16, 64, dtype), [60], window=32, offset=300.0))


def test_positions_beyond_the_table_are_not_read() -> None:
    case = cases.make_case(SMALL, [40])
    table = cases.rotary_table(32, 30)
    got = cases.run(lambda: score.keydiff_unrotated(case.layers, case.batch, table))
    assert torch.equal(got.isnan(), (torch.arange(40) >= 30).expand_as(got))
    ref = score.keydiff_unrotated_ref(case.layers, case.batch, table)
    cases.check(case, "keydiff_unrotated", got, ref)


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
    none = RaggedBatch.of([], [], [], window=1)
    for score_of in (score.knorm, score.keydiff, score.vnorm_centred, score.gravity):
        assert score_of(case.layers, none).shape == (2, 2, 0)
    assert score.lagkv(case.layers, none, sinks=4).shape == (2, 2, 0)


LAUNCHES = {
    "knorm": (1, score.knorm),
    "vnorm": (1, score.vnorm),
    "keydiff": (1, score.keydiff),
    "vnorm_centred": (1, score.vnorm_centred),
    "gravity": (1, score.gravity),
    "lagkv": (1, lambda layers, batch: score.lagkv(layers, batch, sinks=2, lag=8)),
    "rank_sum": (2, lambda layers, batch: score.rank_sum(batch, *_any_scores(layers, batch))),
    "zscore_sum": (2, lambda layers, batch: score.zscore_sum(batch, *_any_scores(layers, batch))),
    "neighbour_mean": (1, lambda layers, batch: score.neighbour_mean(batch, _any_scores(layers, batch)[0], 2)),
}


def _any_scores(layers: PagedLayers, batch: RaggedBatch) -> torch.Tensor:
    return torch.zeros(2, layers.num_layers, layers.num_kv_heads, batch.total)


@pytest.mark.parametrize("name", LAUNCHES)
def test_number_of_launches_is_constant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(_score, "WHOLE", 4096)
    launched: list[object] = []
    launch = GridExecutor.__call__

    def counted(self: object, *args: object, **kwargs: object) -> object:
        launched.append(self)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    want, score_of = LAUNCHES[name]
    for shape, lengths in ((cases.Shape(1, 1), [3]), (cases.Shape(2, 2), [20, 3, 9])):
        launched.clear()
        case = cases.make_case(shape, lengths)
        score_of(case.layers, case.batch)
        assert len(launched) == want


@pytest.mark.parametrize("wide", cases.WIDE_STRIDES)
def test_wide_caches(wide: str) -> None:
    for score_of, ref in (
        (score.vnorm, score.vnorm_ref),
        (score.keydiff, score.keydiff_ref),
        (score.gravity, score.gravity_ref),
    ):
        cases.check_wide(score_of, ref, wide)


def test_wide_scores() -> None:
    cases.check_wide_scores()


@interpreted
def test_gravity_is_refused_where_the_interpreter_multiplies_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = PagedLayers.of([torch.zeros(3, 1, 4, 16, dtype=torch.bfloat16)])
    batch = RaggedBatch.of([[1, 2]], [8], [8], window=2)
    score.gravity(layers, batch)
    monkeypatch.setattr(score_gravity, "INTERPRETER_MULTIPLIES_BFLOAT16", False)
    with pytest.raises(ValueError, match=r"the caches are bfloat16, .* convert them to float32, or call gravity_ref"):
        score.gravity(layers, batch)
