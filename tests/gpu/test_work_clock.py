"""A worker's clock on a real GPU: the device's time is its own, and nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from nitro.work_clock import WorkClock

pytestmark = pytest.mark.gpu

CYCLES = 10**8  # some 50 ms


@pytest.fixture
def clock() -> Iterator[WorkClock]:
    """A clock on a GPU whose kernels are loaded, with an error on whatever synchronises."""
    made = WorkClock(torch.device("cuda"), depth=2)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield made
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def waited(clock: WorkClock, steps: int) -> list[int]:
    found: list[int] = []
    end = time.monotonic() + 30
    while len(found) < steps and time.monotonic() < end:
        report = clock.take()
        found += report.device_ns if report is not None else ()
    return found


def test_the_host_does_not_wait_and_the_device_is_timed(clock: WorkClock) -> None:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    with clock:
        torch.cuda._sleep(CYCLES)
    after.record()
    report = clock.take()
    assert report is not None
    assert len(report.host_ns) == 1
    assert not report.device_ns, "it is still under way"
    (device,) = waited(clock, 1)
    assert report.host_ns[0] < device / 4
    torch.cuda.set_sync_debug_mode("default")
    after.synchronize()
    assert device == pytest.approx(before.elapsed_time(after) * 1e6, rel=0.05)


def test_a_device_that_is_far_behind_has_steps_without_a_time(clock: WorkClock) -> None:
    for _ in range(5):
        with clock:
            torch.cuda._sleep(CYCLES)
    report = clock.take()
    assert report is not None
    assert len(report.host_ns) == 5
    assert len(waited(clock, 2)) == 2
    with clock:
        torch.cuda._sleep(1000)
    assert len(waited(clock, 1)) == 1, "its events are used again"


def test_what_it_costs(clock: WorkClock) -> None:
    taken = []
    for _ in range(200):
        began = time.perf_counter()
        with clock:
            pass
        clock.take()
        taken.append(time.perf_counter() - began)
    print(f"\n{sorted(taken)[100] * 1e6:.1f} us for an empty step")  # docs/serving.md
    assert sorted(taken)[100] < 200e-6
