"""Gates on the kernels' speed: alone on a quiet GPU, with `pytest -m perf tests/perf`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from event_bench import NAIVE, event_task, rival_tasks
from gpu_timing import copy_bandwidths, gpu_micros, host_micros
from kernel_bench import SHAPES, Setup, Task, make_setup, stitch_tasks
from perf_judge import Judge
from score_bench import score_tasks

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

LEAST_OVER_NAIVE = 20.0


@pytest.fixture(scope="module")
def copy() -> float:
    """Bytes read and written a second."""
    return max(copy_bandwidths().values())


@pytest.fixture(scope="module")
def medium() -> Setup:
    return make_setup(SHAPES["medium"])


@pytest.mark.parametrize("name", ["knorm", "vnorm"])
def test_scores_read_as_fast_as_a_copy(perf: Judge, medium: Setup, copy: float, name: str) -> None:
    _require(perf, _named(score_tasks(medium), f"score {name}"), copy)


@pytest.mark.parametrize("name", ["keydiff", "vnorm_centred"])
def test_scores_in_two_passes_read_as_fast_as_a_copy(perf: Judge, medium: Setup, copy: float, name: str) -> None:
    """The mean is needed before the first score, and a row of this length does not stay on the chip."""
    _require(perf, _named(score_tasks(medium), f"score {name}"), copy)


@pytest.mark.parametrize("name", ["pack", "fill"])
def test_moves_are_as_fast_as_a_copy(perf: Judge, medium: Setup, copy: float, name: str) -> None:
    _require(perf, _named(stitch_tasks(medium), f"moves of {name}"), copy)


@pytest.mark.parametrize("name", ["pack", "fill"])
def test_listing_the_moves_takes_little(perf: Judge, medium: Setup, copy: float, name: str) -> None:
    _require(perf, _named(stitch_tasks(medium), f"stitch {name}"), copy)


def test_an_event_is_much_faster_than_indexing_request_by_request() -> None:
    setup = make_setup(SHAPES["essay"])
    naive, ours = _named(rival_tasks(setup), NAIVE), event_task(setup, "keydiff")
    naive.check()
    # Both as an engine would run them, launching included; the graph that leaves it out flatters the naive way.
    times = {task.name: host_micros(task.call, 5, finished=True) for task in (naive, ours)}
    assert times[naive.name] >= LEAST_OVER_NAIVE * times[ours.name], times


def _named(tasks: Iterator[Task], name: str) -> Task:
    return next(task for task in tasks if task.name == name)


def _require(perf: Judge, task: Task, copy: float) -> None:
    """Check a task, and hold its share of the copy against the gate of its name in targets/."""
    task.check()
    micros = gpu_micros(task.call)
    share = (task.passes_nbytes or task.nbytes) / (micros * 1e-6) / copy
    print(f"{task.name}: {micros:.1f} µs, {100 * share:.1f} % of {copy / 1e9:.0f} GB/s")
    perf.require({f"kernel.{task.name}": [share]})
