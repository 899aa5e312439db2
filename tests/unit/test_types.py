"""Plans as columns: what goes in as evictions comes out as the same, also on the other side of a pickle."""

from __future__ import annotations

import pickle
from dataclasses import asdict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nitro.types import Eviction, StepPlan

BLOCK = 4


@st.composite
def evictions(draw: st.DrawFn) -> list[Eviction]:
    found = []
    block = 1
    for number in range(draw(st.integers(1, 6))):
        physical = draw(st.integers(2, 40))
        keep = draw(st.integers(1, physical - 1))
        src = np.arange(block, block + -(-physical // BLOCK), dtype=np.int32)
        block += len(src)
        dst = src[: -(-keep // BLOCK)].copy()
        moved = draw(st.lists(st.booleans(), min_size=len(dst), max_size=len(dst)))
        dst[moved] += 1000
        evicted = draw(st.integers(0, 9))
        found.append(Eviction(f"r{number}", evicted, physical + evicted, physical, keep, min(2, keep), dst, src))
    return found


def plain(items: list[Eviction] | tuple[Eviction, ...]) -> list[dict[str, object]]:
    return [{key: getattr(value, "tolist", lambda v=value: v)() for key, value in asdict(e).items()} for e in items]


@given(evictions())
def test_a_plan_holds_its_evictions(given: list[Eviction]) -> None:
    plan = StepPlan.of(given, BLOCK)
    for each in (plan, pickle.loads(pickle.dumps(plan, protocol=5))):
        assert plain(each.evictions()) == plain(given)
        assert len(each) == len(given)
        assert {array.dtype for array in (each.counts, each.src_blocks, each.moved)} == {np.dtype(np.int32)}
        assert each.moved.shape[1] == sum((e.dst_blocks >= 1000).sum() for e in given)
        requests, columns = each.moved_cells()
        for request, column, block in zip(requests, columns, each.moved[1], strict=True):
            assert given[request].dst_blocks[column] == block != given[request].src_blocks[column]


def test_destinations_in_place_are_not_shipped() -> None:
    src = np.arange(25, dtype=np.int32)
    in_place = [Eviction(f"cmpl-{n:032x}-0-{n:08x}", 3, 1000, 394, 330, 4, src[:21], src) for n in range(30)]
    size = len(pickle.dumps(StepPlan.of(in_place, 16), protocol=5))
    assert size < 30 * (4 * (25 + 5) + 70)


def test_a_plan_that_arrived_read_only_can_be_used() -> None:
    src = np.arange(6, dtype=np.int32)
    plan = StepPlan.of([Eviction("r", 0, 20, 20, 9, 2, np.array([0, 8, 2], np.int32), src)], BLOCK)
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(plan, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(sent, buffers=[bytes(buffer) for buffer in buffers])
    with pytest.raises(ValueError, match="read-only"):
        arrived.src_blocks[0] = 7
    assert arrived.stitched_blocks().tolist() == [0, 8, 2, 3, 4, 5]
    assert plain(arrived.evictions()) == plain(plan.evictions())
