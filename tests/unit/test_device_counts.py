"""Counts on their way to the host. What only a GPU can show is in tests/gpu/test_device_counts.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nitro.device_counts import AsyncCounts

CPU = torch.device("cpu")


def counts_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def as_lists(batches: list[tuple[str, np.ndarray]]) -> list[tuple[str, list[int]]]:
    return [(tag, counts.tolist()) for tag, counts in batches]


def test_batches_come_back_once_in_order_with_their_tags() -> None:
    counts = AsyncCounts[str](capacity=4, device=CPU)
    assert counts.finished() == []
    source = counts_of(1, 2, 3, 4)
    for tag, batch in [("a", source), ("b", counts_of()), ("c", source[1::2])]:
        assert counts.submit(batch, tag)
    source.zero_()
    found = counts.finished()
    assert all(batch.dtype == np.int32 for _, batch in found)
    assert as_lists(found) == [("a", [1, 2, 3, 4]), ("b", []), ("c", [2, 4])]
    assert counts.finished() == []


def test_results_are_not_the_buffers() -> None:
    counts = AsyncCounts[str](capacity=2, device=CPU, depth=1)
    counts.submit(counts_of(1, 2), "a")
    ((_, first),) = counts.finished()
    counts.submit(counts_of(3, 4), "b")
    assert first.tolist() == [1, 2]
    assert as_lists(counts.finished()) == [("b", [3, 4])]


def test_without_a_free_buffer_nothing_is_taken() -> None:
    counts = AsyncCounts[str](capacity=1, device=CPU, depth=2)
    assert counts.submit(counts_of(1), "a")
    assert counts.submit(counts_of(2), "b")
    assert not counts.submit(counts_of(3), "c")
    assert as_lists(counts.finished()) == [("a", [1]), ("b", [2])]
    assert counts.submit(counts_of(4), "d")
    assert as_lists(counts.finished()) == [("d", [4])]


def test_a_batch_that_is_late_keeps_later_ones_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = AsyncCounts[str](capacity=1, device=CPU, depth=3)
    for number, tag in enumerate("abc"):
        assert counts.submit(counts_of(number), tag)
    slots = {copy.tag: copy.slot for copy in counts._under_way}
    done: set[int] = {slots["a"], slots["c"]}
    monkeypatch.setattr(counts, "_is_done", done.__contains__)
    assert as_lists(counts.finished()) == [("a", [0])]
    assert counts.finished() == []
    done.add(slots["b"])
    assert as_lists(counts.finished()) == [("b", [1]), ("c", [2])]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), r"counts are torch.int32 of shape \[3\]: pass .* R <= capacity=2"),
        (torch.zeros(2, dtype=torch.int64), r"counts are torch.int64 of shape \[2\]: pass int32"),
        (torch.zeros((1, 2), dtype=torch.int32), r"of shape \[1, 2\]: pass int32 \[R\]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "counts are on meta, the buffers are for cpu"),
    ],
)
def test_other_counts_are_refused(batch: torch.Tensor, message: str) -> None:
    counts = AsyncCounts[str](capacity=2, device=CPU, depth=1)
    with pytest.raises(ValueError, match=message):
        counts.submit(batch, "a")
    assert counts.submit(counts_of(1), "b"), "a refused batch takes no buffer"


@pytest.mark.parametrize(("capacity", "depth"), [(0, 4), (8, 0)])
def test_no_room_is_refused(capacity: int, depth: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity} and depth={depth} must both be at least 1"):
        AsyncCounts[str](capacity, CPU, depth)
