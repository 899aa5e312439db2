"""What the benchmarks time is checked before it is timed; that these checks hold is tested here, on tiny shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import event_bench
import kernel_bench
import pytest
import score_bench
import torch

from nitro.kernels import compact, select

from .conftest import interpreted

Bench = Callable[[kernel_bench.Setup], Iterator[kernel_bench.Task]]

pytestmark = interpreted
TINY = kernel_bench.Shape(requests=2, length=37, keep=30, model_layers=2, layers=2, heads=2, head_dim=32, window=8)


@pytest.fixture(scope="module")
def setup() -> kernel_bench.Setup:
    return kernel_bench.make_setup(TINY, device="cpu")


@pytest.mark.parametrize(
    "bench",
    [
        score_bench.score_tasks,
        score_bench.combine_tasks,
        kernel_bench.select_tasks,
        kernel_bench.stitch_tasks,
        event_bench.rival_tasks,
    ],
)
def test_tasks_hold_what_they_promise(setup: kernel_bench.Setup, bench: Bench) -> None:
    for task in bench(setup):
        task.check()
        task.call()
        assert task.nbytes > 0
        assert task.passes_nbytes == 0 or task.nbytes < task.passes_nbytes


@pytest.mark.parametrize("bench", [score_bench.score_tasks, kernel_bench.stitch_tasks])
def test_tasks_of_fp8(bench: Bench) -> None:
    half, full = (kernel_bench.make_setup(TINY, dtype, device="cpu") for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    for task, of_bfloat16 in zip(bench(half), bench(full), strict=True):
        task.check()
        assert task.nbytes <= of_bfloat16.nbytes


def test_a_check_notices_a_wrong_result(setup: kernel_bench.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = score_bench.PAGED["knorm"]
    wrong = dataclasses.replace(scored, launch=lambda x, out: scored.launch(x, out).mul_(1.001))
    monkeypatch.setitem(score_bench.PAGED, "knorm", wrong)
    with pytest.raises(AssertionError):
        next(score_bench.score_tasks(setup)).check()


@pytest.mark.parametrize("name", event_bench.EVENTS)
def test_events_evict_by_their_score(name: str) -> None:
    ours, want = (kernel_bench.make_setup(TINY, device="cpu") for _ in range(2))
    scores = score_bench.PAGED[name].reference(score_bench.make_inputs(want))
    mask, _ = select.select_ragged_ref(scores, want.batch)
    compact.fill_ragged_ref(want.layers, want.batch, mask, want.positions)
    event_bench.event_task(ours, name).call()
    assert torch.equal(ours.positions, want.positions)
    assert all(map(torch.equal, ours.layers.caches, want.layers.caches))
