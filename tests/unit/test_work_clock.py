"""A worker's clock on the host; on a GPU, tests/gpu/test_work_clock.py."""

from __future__ import annotations

import time

import pytest
import torch

from nitro.types import WorkReport
from nitro.work_clock import MOST, WorkClock


def test_each_step_is_told_once() -> None:
    clock = WorkClock(torch.device("cpu"))
    assert clock.take() is None
    with clock:
        time.sleep(0.002)
    with clock:
        pass
    report = clock.take()
    assert report is not None
    first, second = report.host_ns
    assert 2_000_000 <= first < 2_000_000_000
    assert 0 <= second < first
    assert report == WorkReport((first, second)), "a CPU has no events"
    assert clock.take() is None


def test_what_nobody_takes_does_not_grow() -> None:
    clock = WorkClock(torch.device("cpu"))
    for _ in range(10 * MOST):
        with clock:
            pass
    report = clock.take()
    assert report is not None
    assert len(report.host_ns) == MOST


def test_a_step_that_fails_is_timed_and_raises() -> None:
    clock = WorkClock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock:
        raise ZeroDivisionError
    assert clock.take() is not None
