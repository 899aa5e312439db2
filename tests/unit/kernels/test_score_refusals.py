"""What launchers refuse, each with a message that says what to do; nothing here launches a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import score_cases as cases
import torch

from nitro.kernels import score
from nitro.kernels.paged import PagedLayers, RaggedBatch

CASE = cases.make_case(cases.Shape(num_layers=2, num_heads=2, block_size=8, head_dim=32), [20, 9])
SHAPE = (2, 2, 29)
POSITIONS = CASE.positions
IDS = torch.arange(2)


def caches(dtype: torch.dtype = torch.float16, head_dim: int = 32, device: str = "cpu") -> PagedLayers:
    return PagedLayers.of([torch.zeros(9, 2, 8, 2 * head_dim, dtype=dtype, device=device)] * 2)


@pytest.mark.parametrize("score_of", [score.knorm, score.vnorm, score.keydiff, score.vnorm_centred, score.gravity])
def test_caches(score_of: Any) -> None:
    with pytest.raises(TypeError, match=r"caches of torch.uint8 can't be scored: use float16"):
        score_of(caches(torch.uint8), CASE.batch)
    with pytest.raises(ValueError, match="head_dim=288 must be 2 to 256"):
        score_of(caches(head_dim=288), CASE.batch)
    with pytest.raises(ValueError, match="the batch is on cpu, the caches on meta"):
        score_of(replace(caches(), caches=caches(device="meta").caches), CASE.batch)
    with pytest.raises(ValueError, match=r"block_tables has 1 blocks of 8, room for 8 slots, below max_length=20"):
        score_of(caches(), replace(CASE.batch, block_tables=CASE.batch.block_tables[:, :1].contiguous()))


@pytest.mark.parametrize(
    ("out", "error", "said"),
    [
        (torch.zeros(SHAPE, dtype=torch.float64), TypeError, r"out must be torch.float32, got torch.float64"),
        (torch.zeros(2, 2, 28), ValueError, r"out must be \[2, 2, 29\], got \[2, 2, 28\]"),
        (torch.zeros(29, 2, 2).permute(1, 2, 0), ValueError, "out has strides .*: make it contiguous"),
        (torch.zeros(SHAPE, device="meta"), ValueError, "out is on meta, must be on cpu"),
    ],
)
def test_out(out: torch.Tensor, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nitro.kernels._score.check_device", lambda *_: None)
    with pytest.raises(error, match=said):
        score.knorm(CASE.layers, CASE.batch, out=out)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: score.streaming_ref(CASE.layers, CASE.batch, CASE.logical_lengths.long()),
            TypeError,
            "logical_lengths must be torch.int32",
        ),
        (
            lambda: score.random_ref(CASE.layers, CASE.batch, CASE.states[:1], IDS, IDS),
            ValueError,
            r"states must be \[2\], got \[1\]",
        ),
        (
            lambda: score.random_ref(CASE.layers, CASE.batch, CASE.states, IDS.int(), IDS),
            TypeError,
            "layer_ids must be torch.int64",
        ),
        (
            lambda: score.random_ref(CASE.layers, CASE.batch, CASE.states, IDS, torch.arange(6)[::3]),
            ValueError,
            r"head_ids has strides \(3,\): make it contiguous",
        ),
        (
            lambda: score.keydiff_unrotated_ref(CASE.layers, CASE.batch, torch.zeros(9, 33)),
            ValueError,
            "rotary_dim=33, which must be even and 2 to head_dim=32",
        ),
        (
            lambda: score.keydiff_unrotated_ref(CASE.layers, CASE.batch, torch.zeros(9, 32, dtype=torch.float64)),
            TypeError,
            "cos_sin must be float16, bfloat16 or float32, got torch.float64",
        ),
        (
            lambda: score.keydiff_unrotated_ref(CASE.layers, CASE.batch, torch.zeros(9, 32), POSITIONS.long()),
            TypeError,
            "positions must be torch.int32",
        ),
        (lambda: score.gravity_ref(CASE.layers, CASE.batch, softening=0.0), ValueError, "softening=0.0 must be above"),
        (
            lambda: score.gravity_ref(CASE.layers, replace(CASE.batch, window=0)),
            ValueError,
            "window=0 must be at least 1",
        ),
        (
            lambda: score.gravity_ref(CASE.layers, CASE.batch, order=CASE.order.long()),
            TypeError,
            "order must be torch.int32",
        ),
        (lambda: score.lagkv_ref(CASE.layers, CASE.batch, sinks=-1), ValueError, "sinks=-1 must not be negative"),
        (lambda: score.lagkv_ref(CASE.layers, CASE.batch, sinks=0, lag=1), ValueError, "lag=1 must be 2 to 1024"),
    ],
)
def test_arguments(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nitro.kernels.score_combine.check_device", lambda *_: None)
    a, batch = torch.zeros(SHAPE), CASE.batch
    with pytest.raises(ValueError, match="out is b, which is read while out is written"):
        score.rank_sum(batch, a, b := a + 1, out=b)
    with pytest.raises(ValueError, match=r"b must be \[2, 2, 29\], got \[1, 2, 29\]"):
        score.zscore_sum(batch, a, a[:1])
    with pytest.raises(ValueError, match="radius=-1 must not be negative"):
        score.neighbour_mean(batch, a, -1)
    with pytest.raises(ValueError, match=r"a must be .* got \[2, 2, 28\]"):
        score.rank_sum(batch, a[..., :28], a)


def test_where_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="set it before the process imports triton, or call keydiff_ref"):
        score.keydiff(caches(), RaggedBatch.of([[0]], [8], [8]))
