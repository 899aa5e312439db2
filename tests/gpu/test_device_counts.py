"""Counts from a real GPU: nothing waits for the device, and CUDA graphs may write them again at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from nitro.device_counts import AsyncCounts

pytestmark = pytest.mark.gpu

LONG = 10**9  # cycles, half a second


@pytest.fixture
def made() -> Iterator[torch.Tensor]:
    """Counts on the GPU, whose kernels are loaded, with an error on whatever synchronises."""
    counts = torch.zeros(5, dtype=torch.int32, device="cuda")
    counts.add_(1).sub_(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield counts
    finally:
        torch.cuda.set_sync_debug_mode("default")


def collected(counts: AsyncCounts[int], batches: int) -> list[tuple[int, list[int]]]:
    found: list[tuple[int, list[int]]] = []
    end = time.monotonic() + 30
    while len(found) < batches and time.monotonic() < end:
        found += [(tag, batch.tolist()) for tag, batch in counts.finished()]
    return found


def test_the_host_runs_ahead_of_the_counts(made: torch.Tensor) -> None:
    counts = AsyncCounts[int](8, made.device, depth=2)
    torch.cuda._sleep(LONG)
    for step in (1, 2):
        made.add_(1)
        assert counts.submit(made, step)
    made.fill_(-1)  # later on the stream than both copies
    assert not counts.submit(made, 3), "both buffers are under way"
    assert counts.finished() == [], "the GPU sleeps before the first"
    assert collected(counts, 2) == [(1, [1] * 5), (2, [2] * 5)]
    assert counts.submit(made, 4)
    assert collected(counts, 1) == [(4, [-1] * 5)]


def test_a_replayed_graph_may_write_its_counts_again_at_once(made: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("default")  # capturing synchronises
    with torch.cuda.graph(graph):
        made.add_(1)
    torch.cuda.set_sync_debug_mode("error")
    counts = AsyncCounts[int](8, made.device)
    for step in (1, 2, 3):
        graph.replay()
        assert counts.submit(made, step)
    assert collected(counts, 3) == [(step, [step] * 5) for step in (1, 2, 3)]
