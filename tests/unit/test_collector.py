"""The collector: each rule by itself, then random lives of a block pool beside a model made of dicts and sets."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ledger import adopt, commit

from nitro.collector import Collector, Committed, PoolView, TableEnds, dead_blocks
from nitro.errors import IntegrityError
from nitro.types import Counters, IntArray

BLOCK_SIZE = 4
NULL = 0


def blocks(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int32)


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


@pytest.fixture
def collector() -> Collector:
    """A pool of 16 blocks of 4 tokens; ``old`` owns [5, 2] after its table [1, 2, 3, 4] of 15 slots shrank to 6."""
    collector = Collector(num_blocks=16, block_size=BLOCK_SIZE, null_block=NULL)
    commit(collector, "old", blocks(1, 2, 3, 4), blocks(5, 2), physical=15, keep=6)
    return collector


def state_of(collector: Collector, *request_ids: str) -> object:
    return (
        len(collector),
        collector.counters,
        {r: (collector.evicted(r), collector.epoch(r), collector.owned(r).tolist()) for r in request_ids},
    )


def test_an_eviction_from_plan_to_release() -> None:
    collector = Collector(num_blocks=16, block_size=BLOCK_SIZE)
    table = blocks(1, 2, 3, 4)
    dst = collector.plan("a", table, flags(0, 1, 1, 1), physical=15, keep=6)
    assert dst.dtype == np.int32
    assert dst.tolist() == [-1, 2]
    assert len(collector) == 0, "a plan changes nothing"

    dst[0] = 5
    freed = commit(collector, "a", table, dst, physical=15, keep=6)
    assert freed.dtype == np.int32
    assert freed.tolist() == [4, 3, 1]
    assert state_of(collector, "a") == (1, Counters(1, 9, 2), {"a": (9, 1, [5, 2])})

    adopt(collector, "a", [7, 8])
    assert collector.owned("a").tolist() == [5, 2, 7, 8]
    assert collector.plan("a", collector.owned("a"), flags(1, 1, 1, 1), physical=16, keep=5).tolist() == [5, 2]
    assert commit(collector, "a", collector.owned("a"), blocks(5, 2), physical=16, keep=5).tolist() == [8, 7]
    assert state_of(collector, "a") == (1, Counters(2, 20, 4), {"a": (20, 2, [5, 2])})
    collector.check_integrity()

    assert collector.release("a") == 20
    assert state_of(collector, "a") == (0, Counters(2, 20, 4), {"a": (0, 0, [])})
    assert collector.release("a") == 0
    collector.check_integrity()


def test_results_outlive_the_collector() -> None:
    collector = Collector(num_blocks=16, block_size=BLOCK_SIZE)
    freed = commit(collector, "a", blocks(1, 2, 3), blocks(1), physical=12, keep=4)
    owned = collector.owned("a")
    owned[0] = 9
    assert collector.owned("a").tolist() == [1], "the caller's copy is not the ledger"
    del collector
    assert freed.tolist() == [3, 2]


def test_arrays_may_be_views_and_flags_may_be_bool() -> None:
    collector = Collector(num_blocks=16, block_size=BLOCK_SIZE)
    every_other = np.arange(1, 9, dtype=np.int32)[::2]
    dst = collector.plan("a", every_other, np.array([True, False, True, True]), physical=16, keep=8)
    assert dst.tolist() == [1, -1]


def test_handles_of_released_requests_are_used_again() -> None:
    collector = Collector(num_blocks=64, block_size=BLOCK_SIZE)
    for i in range(50):
        commit(collector, f"a{i}", blocks(1, 2), blocks(1), physical=8, keep=4)
        commit(collector, f"b{i}", blocks(3, 4), blocks(3), physical=8, keep=4)
        collector.release(f"a{i}")
        assert collector.owned(f"b{i}").tolist() == [3]
        collector.release(f"b{i}")
        collector.check_integrity()
    assert sorted(collector._spare) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), r"num_blocks=0 is outside \[1, "),
        ((2**31, 4, 0), r"num_blocks=2147483648"),
        ((16, 0, 0), r"block_size=0 is below 1"),
        ((16, 4, 16), r"null_block=16 is outside \[0, num_blocks=16\)"),
        ((16, 4, -1), r"null_block=-1"),
    ],
)
def test_impossible_pools_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector(*arguments)


TABLE = blocks(6, 8, 9)
ALL = flags(1, 1, 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.plan("new", TABLE, ALL, 12, 0), ValueError, r"keep=0 is outside \[1, physical=12\)"),
        (lambda c: c.plan("new", TABLE, ALL, 12, 12), ValueError, r"keep=12 is outside \[1, physical=12\)"),
        (lambda c: c.plan("new", TABLE, flags(1), 12, 5), ValueError, "reusable has 1 entries, but keep=5 .* need 2"),
        (lambda c: c.plan("new", TABLE.reshape(1, 3), ALL, 12, 4), ValueError, "blocks has 2 dimensions"),
        (lambda c: c.plan("new", TABLE.astype(np.int64), ALL, 12, 4), TypeError, "incompatible function arguments"),
        (lambda c: c.plan("new", TABLE, ALL, 13, 4), IntegrityError, "request 'new': physical=13 slots need 4 blocks"),
        (lambda c: c.plan("new", blocks(6, 16, 9), ALL, 12, 4), IntegrityError, r"block 16 is outside \[0, 16\)"),
        (lambda c: c.plan("new", blocks(6, -1, 9), ALL, 12, 4), IntegrityError, "block -1 is outside"),
        (lambda c: c.plan("new", blocks(6, NULL, 9), ALL, 12, 4), IntegrityError, "block 0 is the null block"),
        (lambda c: c.plan("new", blocks(6, 9, 9), ALL, 12, 4), IntegrityError, "block 9 is in its table twice"),
        (
            lambda c: c.plan("new", blocks(6, 5, 9), ALL, 12, 4),
            IntegrityError,
            "request 'new': table block 5 already belongs to request 'old'",
        ),
        (
            lambda c: c.plan("old", TABLE, ALL, 12, 4),
            IntegrityError,
            r"request 'old': its table of 3 blocks is not the 2 .* adopt_all\(\)",
        ),
        (lambda c: c.plan("old", blocks(5, 2), flags(1, 1), 5, 4), IntegrityError, "physical=5 .* left 6"),
        (lambda c: commit(c, "new", TABLE, blocks(6), 12, 8), ValueError, "dst has 1 blocks, but keep=8 .* need 2"),
        (lambda c: commit(c, "new", TABLE, blocks(6, -1), 12, 8), IntegrityError, "destination block -1 is outside"),
        (lambda c: commit(c, "new", TABLE, blocks(6, 16), 12, 8), IntegrityError, "destination block 16 is outside"),
        (lambda c: commit(c, "new", TABLE, blocks(6, NULL), 12, 8), IntegrityError, "destination block 0 is the null"),
        (lambda c: commit(c, "new", TABLE, blocks(10, 10), 12, 8), IntegrityError, "block 10 is in dst twice"),
        (lambda c: commit(c, "new", TABLE, blocks(6, 9), 12, 8), IntegrityError, "block 9, which is another block of"),
        (
            lambda c: commit(c, "new", TABLE, blocks(6, 2), 12, 8),
            IntegrityError,
            "request 'new': fresh block 2 already belongs to request 'old'",
        ),
        (lambda c: adopt(c, "old", [7, 7]), IntegrityError, "request 'old': block 7 is adopted twice"),
        (lambda c: adopt(c, "old", [7, 2]), IntegrityError, "adopted block 2 already belongs to request 'old'"),
        (lambda c: adopt(c, "old", [NULL]), IntegrityError, "adopted block 0 is the null block"),
        (lambda c: adopt(c, "old", [16]), IntegrityError, "adopted block 16 is outside"),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(
    collector: Collector, call: Callable[[Collector], object], error: type[Exception], message: str
) -> None:
    before = state_of(collector, "old", "new")
    with pytest.raises(error, match=message):
        call(collector)
    assert state_of(collector, "old", "new") == before
    collector.check_integrity()
    # The handle that a refused newcomer would have had is still free for the next one.
    commit(collector, "next", TABLE, blocks(6), physical=12, keep=4)
    collector.check_integrity()


def test_a_step_of_old_and_new_requests(collector: Collector) -> None:
    adopt(collector, "old", [1, 3])
    done = collector.commit_all(
        ["old", "new", "other"],
        [13, 12, 8],
        [4, 7, 2],
        TableEnds([4, 0, 0], [5, 0, 0], [3, 0, 0]),
        {1: (blocks(6, 8, 9, 10), blocks(11, 8)), 2: (blocks(6, 12), blocks(13))},
    )
    assert done.epochs == [1, 0, 0]
    assert done.src.tolist() == [5, 2, 1, 3, 6, 8, 9, 6, 12]
    assert done.moved.tolist() == [[4, 7], [11, 13]]
    assert done.freed.tolist() == [3, 1, 2, 10, 9, 6, 12, 6]
    assert [collector.owned(name).tolist() for name in ("old", "new", "other")] == [[5], [11, 8], [13]]
    assert [collector.evicted(name) for name in ("old", "new", "other")] == [18, 5, 6]
    collector.check_integrity()
    assert [collector.release(name) for name in ("old", "new", "other", "nobody")] == [18, 5, 6, 0]
    assert collector.releases == 3
    # Spare handles go to the newcomers of one step one by one.
    none = TableEnds([0, 0], [0, 0], [0, 0])
    collector.commit_all(["a", "b"], [8, 8], [4, 4], none, {0: (blocks(1, 2), blocks(1)), 1: (blocks(3, 4), blocks(3))})
    assert len(collector._spare) == 1
    collector.check_integrity()


@pytest.mark.parametrize(
    ("at_once", "error", "message"),
    [
        ({"new": None}, IntegrityError, "request 'new': its first eviction cannot be in place"),
        (
            {"old": (3, 5, 2)},
            IntegrityError,
            "request 'old': its table of 3 blocks, 5 to 2, is not the 2 blocks, 5 to 2,",
        ),
        ({"old": (2, 2, 5)}, IntegrityError, "request 'old': its table of 2 blocks, 2 to 5, is not"),
        ({"new": ([6, 8], [9]), "other": ([10, 11], [9])}, IntegrityError, "'other': block 9 is a destination of two"),
        ({"new": ([6, 8], [10]), "other": ([10, 11], [9])}, IntegrityError, "'new': fresh block 10 is in the table of"),
        ({"new": ([6, 8], [9]), "other": ([10, 11], [5])}, IntegrityError, "'other': fresh block 5 .* 'old'"),
    ],
)
def test_a_refused_step_says_why_and_changes_nothing(
    collector: Collector, at_once: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = state_of(collector, "old", "new", "other")
    ends: list[tuple[int, int, int]] = []
    moves = {}
    for index, what in enumerate(at_once.values()):
        ends.append(what if what and len(what) == 3 else (0, 0, 0))
        if what and len(what) == 2:
            moves[index] = (blocks(*what[0]), blocks(*what[1]))
    lengths = [8] * len(at_once), [4] * len(at_once)
    with pytest.raises(error, match=message):
        collector.commit_all(list(at_once), *lengths, TableEnds(*(list(x) for x in zip(*ends, strict=True))), moves)
    assert state_of(collector, "old", "new", "other") == before
    collector.check_integrity()


def test_columns_of_a_step_must_fit(collector: Collector) -> None:
    with pytest.raises(ValueError, match=r"a column has 1 entries, requests 2"):
        collector.commit_all(["old", "b"], [8, 8], [4], TableEnds([2, 2], [5, 5], [2, 2]), {})
    with pytest.raises(ValueError, match=r"moves has index 1, but there are 1 requests"):
        collector.commit_all(["old"], [8], [4], TableEnds([2], [5], [2]), {1: (blocks(6), blocks(6))})


@pytest.mark.parametrize(
    ("names", "counts", "new", "error", "message"),
    [
        (["old", "b"], [1, 2], [7, 8, 7], IntegrityError, "request 'b': block 7 is adopted twice"),
        (["old", "b"], [1, 1], [7, 2], IntegrityError, "request 'b': adopted block 2 already belongs to request 'old'"),
        (["old", "b"], [1, 1], [7, NULL], IntegrityError, "request 'b': adopted block 0 is the null block"),
        (["old", "b"], [1, 1], [7, 16], IntegrityError, r"request 'b': adopted block 16 is outside \[0, 16\)"),
        (["old", "b"], [2], [7, 8], ValueError, "counts has 1 entries, but there are 2 requests"),
        (["old", "b"], [1, 2], [7, 8], ValueError, "counts add up to 3, but there are 2 blocks"),
        (["old", "b"], [3, -1], [7, 8], ValueError, "a count of blocks is -1"),
    ],
)
def test_a_refused_batch_of_new_blocks_says_why_and_changes_nothing(
    collector: Collector, names: list[str], counts: list[int], new: list[int], error: type[Exception], message: str
) -> None:
    commit(collector, "b", blocks(10, 11), blocks(10), physical=8, keep=4)
    before = state_of(collector, "old", "b")
    with pytest.raises(error, match=message):
        collector.adopt_all(names, counts, new)
    assert state_of(collector, "old", "b") == before
    collector.check_integrity()
    # What unknown requests got is not looked at; a request may occur again.
    collector.adopt_all(["b", "unknown", "old", "b"], [1, 2, 1, 1], [7, 2, 99, 9, 8])
    assert [collector.owned(name).tolist() for name in ("old", "b", "unknown")] == [[5, 2, 9], [10, 7, 8], []]
    collector.adopt_all([], [], [])
    collector.check_integrity()


def test_requests_without_evictions_are_not_the_ledgers_business(collector: Collector) -> None:
    before = state_of(collector, "old", "unknown")
    adopt(collector, "unknown", [2, 99])  # not even looked at
    adopt(collector, "old", [])
    assert collector.release("unknown") == 0
    assert state_of(collector, "old", "unknown") == before


def test_check_integrity_compares_the_mirror_with_the_core(collector: Collector) -> None:
    collector._evicted["old"] += 1
    with pytest.raises(IntegrityError, match=r"'old': 9.*'old': 10"):
        collector.check_integrity()


@pytest.mark.parametrize(
    ("free", "live", "message"),
    [
        ([*range(1, 16)], [], r"block 2 is free, but request 'old' owns it"),
        ([1, 3, 4, *range(6, 16)], [2], r"13 free \+ 1 live \+ 1 null blocks are not the pool's 16: block 5 is lost"),
        ([1, 1, 3, 4, *range(6, 16)], [2, 5], "block 1 is free twice"),
        ([1, 3, 4, 5, *range(6, 16)], [2, 5], "block 5 is free and live at once"),
        ([NULL, 1, 3, 4, *range(6, 16)], [2, 5], "free block 0 is the null block"),
    ],
)
def test_check_integrity_compares_the_pool_with_the_ledger(
    collector: Collector, free: list[int], live: list[int], message: str
) -> None:
    collector.check_integrity(PoolView(blocks(1, 3, 4, *range(6, 16)), blocks(2, 5)))
    with pytest.raises(IntegrityError, match=message):
        collector.check_integrity(PoolView(blocks(*free), blocks(*live)))


def test_dead_blocks_are_those_that_requests_own_in_vain(collector: Collector) -> None:
    commit(collector, "new", blocks(6, 8, 9), blocks(6, 8), physical=12, keep=8)
    live = np.array([5 * BLOCK_SIZE + 3, 8 * BLOCK_SIZE, 8 * BLOCK_SIZE], np.int64)
    assert collector.dead_blocks(["old", "new", "unknown"], live).tolist() == [2, 6]
    assert collector.dead_blocks(["new"], live[1:]).tolist() == [6]
    assert collector.dead_blocks([], live[:0]).tolist() == []
    with pytest.raises(IntegrityError, match="slot 23 is live, but its block 5 is none of the 2 blocks"):
        collector.dead_blocks(["new"], live)


def test_the_sweep_refuses_what_it_cannot_mean() -> None:
    none = np.empty(0, np.int64)
    with pytest.raises(ValueError, match="block_size=0 is below 1"):
        dead_blocks(blocks(1), none, 0)
    with pytest.raises(ValueError, match="block -1 is negative"):
        dead_blocks(blocks(-1), none, 4)
    with pytest.raises(ValueError, match="live has 2 dimensions"):
        dead_blocks(blocks(1), none.reshape(0, 1), 4)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        dead_blocks(blocks(1).astype(np.int64), none, 4)


@given(data=st.data(), block_size=st.integers(1, 40))
def test_the_sweep_finds_what_two_nested_loops_find(data: st.DataObject, block_size: int) -> None:
    held = data.draw(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 30), max_size=40))
    slots = st.tuples(st.sampled_from(held or [0]), st.integers(0, block_size - 1))
    drawn = data.draw(st.lists(slots, max_size=60 if held else 0))
    live = [block * block_size + offset for block, offset in drawn]
    expected = [block for block in dict.fromkeys(held) if not any(slot // block_size == block for slot in live)]
    assert dead_blocks(blocks(*held), np.array(live, np.int64), block_size).tolist() == expected


def test_a_sweep_survives_that_its_arguments_are_written_to() -> None:
    """It runs without the GIL: what it finds may be wrong then, and nothing else."""
    held, live = np.arange(200_000, dtype=np.int32), np.arange(0, 800_000, 8, dtype=np.int64)
    others = np.random.default_rng(0).integers(0, 2**31 - 1, len(held)).astype(np.int32)
    running = threading.Event()
    running.set()

    def scribble() -> None:
        while running.is_set():
            held[:] = others
            held[:] = np.arange(len(held))

    writer = threading.Thread(target=scribble)
    writer.start()
    refused = 0
    try:
        for _ in range(100):
            dead_blocks(held, live[:0], BLOCK_SIZE)  # which looks twice at each block, and must not rely on the first
            try:
                dead_blocks(held, live, BLOCK_SIZE)
            except IntegrityError:
                refused += 1
    finally:
        running.clear()
        writer.join()
    assert refused > 0, "the arguments did change"
    assert len(dead_blocks(np.arange(200_000, dtype=np.int32), live, BLOCK_SIZE)) == 100_000


NUMBERS: st.SearchStrategy[Any] = st.integers(0, 16) | st.sampled_from(
    [-1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), 2**64, 1.5, None, "3", True, np.int64(4)]
)
ARRAYS: st.SearchStrategy[Any] = st.lists(st.integers(-1, 17), max_size=4).map(
    lambda ids: np.array(ids, np.int32)
) | st.sampled_from(
    [
        *(np.array([1, 3]).astype(kind) for kind in ("i1", "u1", "i8", "u4", "u8", "f4", "?", "O", ">i4")),
        np.array(3, np.int32),
        np.zeros((2, 2), np.int32),
        np.arange(16, dtype=np.int32)[::-5],
        np.lib.stride_tricks.as_strided(np.ones(1, np.int32), (5,), (0,)),
        np.array(["1"]),
        [1, 2],
        None,
    ]
)
NAMES = st.sampled_from(["old", "new", "a\0b", "#0", ""])


@st.composite
def hostile_calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    kind = draw(st.sampled_from(["plan", "commit_all", "adopt_all", "dead_blocks", "PoolView"]))
    if kind == "plan":
        return kind, (draw(NAMES), draw(ARRAYS), draw(ARRAYS), draw(NUMBERS), draw(NUMBERS))
    if kind in ("dead_blocks", "PoolView"):
        return kind, (draw(ARRAYS), draw(ARRAYS))
    size = draw(st.integers(0, 3))
    names = draw(st.lists(NAMES, min_size=size, max_size=size))  # the same one several times, too

    def column() -> list[Any]:
        return draw(st.lists(NUMBERS, min_size=size, max_size=size))

    if kind == "adopt_all":
        return kind, (names, draw(st.just([1] * size) | st.builds(column)), column())
    moves = draw(st.dictionaries(st.sampled_from([0, 1, 2, -1, 2**64]), st.tuples(ARRAYS, ARRAYS), max_size=3))
    return kind, (names, column(), column(), TableEnds(column(), column(), column()), moves)


@given(calls=st.lists(hostile_calls(), max_size=12))
def test_whatever_is_passed_the_ledger_stays_whole(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    collector = Collector(num_blocks=16, block_size=BLOCK_SIZE, null_block=NULL)
    commit(collector, "old", blocks(1, 2, 3, 4), blocks(5, 2), physical=15, keep=6)
    names = ("old", "new", "a\0b", "#0", "")
    for kind, arguments in calls:
        before = state_of(collector, *names)
        try:
            if kind == "dead_blocks":
                dead_blocks(*arguments, BLOCK_SIZE)
            elif kind == "PoolView":
                collector.check_integrity(PoolView(*arguments))
            else:
                getattr(collector, kind)(*arguments)
        except (ValueError, TypeError, IntegrityError):
            assert state_of(collector, *names) == before
        collector.check_integrity()
    for name in names:
        collector.release(name)
    assert len(collector) == 0
    collector.check_integrity(PoolView(np.arange(1, 16, dtype=np.int32), blocks()))


class Step:
    """The evictions of one engine step, as `commit_all` takes them."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.names: list[str] = []
        self.physical: list[int] = []
        self.keep: list[int] = []
        self.ends = TableEnds([], [], [])
        self.moves: dict[int, tuple[IntArray, IntArray]] = {}

    def add(self, name: str, table: list[int], physical: int, keep: int, dst: IntArray | None = None) -> None:
        if dst is not None:
            self.moves[len(self.names)] = (blocks(*table), dst)
        self.names.append(name)
        self.physical.append(physical)
        self.keep.append(keep)
        for column, value in zip(self.ends, (len(table), table[0], table[-1]), strict=True):
            column.append(value)

    def faults(self, at: int, epochs: dict[str, int]) -> list[str]:
        where = ["destination", "table"] if at in self.moves else ["size", "first", "last"]
        return ["physical", "keep", "twice", *where, *(["in place"] if self.names[at] not in epochs else [])]

    def spoilt(self, at: int, fault: str) -> Step:
        wrong = Step(self.collector)
        for name in ("names", "physical", "keep", "ends", "moves"):
            setattr(wrong, name, copy.deepcopy(getattr(self, name)))
        if fault == "physical":
            wrong.physical[at] += 1000
        elif fault == "keep":
            wrong.keep[at] = 0
        elif fault == "twice":
            wrong.names.append(wrong.names[at])
            wrong.physical.append(wrong.physical[at])
            wrong.keep.append(wrong.keep[at])
            for column in wrong.ends:
                column.append(column[at])
            if at in wrong.moves:
                wrong.moves[len(wrong.names) - 1] = wrong.moves[at]
        elif fault == "destination":
            wrong.moves[at][1][-1] = NULL
        elif fault == "table":
            wrong.moves[at][0][0] = NULL
        elif fault == "in place":
            del wrong.moves[at]
        else:
            getattr(wrong.ends, fault)[at] += 1
        return wrong

    def commit(self) -> Committed:
        return self.collector.commit_all(self.names, self.physical, self.keep, self.ends, self.moves)


class PoolMachine(RuleBasedStateMachine):
    """A block pool with prefix sharing; the model is a free list, reference counts and block tables."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 24
        self.collector = Collector(self.num_blocks, BLOCK_SIZE, NULL)
        self.free = list(range(1, self.num_blocks))
        self.references: Counter[int] = Counter()  # of live blocks
        self.tables: dict[str, list[int]] = {}
        self.slots: dict[str, int] = {}
        self.evicted: dict[str, int] = {}  # of requests that have had an eviction
        self.epochs: dict[str, int] = {}
        self.totals = Counters()
        self.started = 0

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tables)))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        self.references.update(taken)
        return taken

    def put(self, freed: list[int]) -> None:
        for block in freed:
            assert self.references[block] > 0, f"block {block} is freed twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                self.free.append(block)

    @rule()
    def start(self) -> None:
        request_id = f"r{self.started}"
        self.started += 1
        self.tables[request_id], self.slots[request_id] = [], 0

    @precondition(lambda self: any(r not in self.epochs and t for r, t in self.tables.items()))
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        sharable = sorted(r for r, table in self.tables.items() if r not in self.epochs and table)
        origin = data.draw(st.sampled_from(sharable))
        full = self.slots[origin] // BLOCK_SIZE
        self.start()
        newest = f"r{self.started - 1}"
        self.tables[newest] = self.tables[origin][:full]
        self.slots[newest] = full * BLOCK_SIZE
        self.references.update(self.tables[newest])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(1, 3 * BLOCK_SIZE + 1))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        request_id = self.pick(data)
        slots = self.slots[request_id] + tokens
        needed = -(-slots // BLOCK_SIZE) - len(self.tables[request_id])
        if needed > len(self.free):
            self.stop(request_id)  # as vLLM preempts
            return
        new = self.take(needed)
        adopt(self.collector, request_id, new)
        self.tables[request_id] += new
        self.slots[request_id] = slots

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow_together(self, data: st.DataObject) -> None:
        """One engine step's new blocks in one call; half of the batches are spoilt first, and must change nothing."""
        given: dict[str, list[int]] = {}
        for request_id in data.draw(st.lists(st.sampled_from(sorted(self.tables)), min_size=1, unique=True)):
            slots = self.slots[request_id] + data.draw(st.integers(1, 2 * BLOCK_SIZE + 1))
            needed = -(-slots // BLOCK_SIZE) - len(self.tables[request_id])
            if needed <= len(self.free):
                given[request_id] = self.take(needed)
                self.slots[request_id] = slots
        names, counts = list(given), [len(new) for new in given.values()]
        flat = [block for new in given.values() for block in new]
        booked = [i for i, name in enumerate(names) if name in self.epochs for _ in given[name]]
        if booked and data.draw(st.booleans()):
            at = data.draw(st.sampled_from(booked))
            name, place = names[at], sum(counts[:at])
            owned = data.draw(st.sampled_from(self.tables[data.draw(st.sampled_from(sorted(self.epochs)))]))
            wrong = {
                "the null block": (names, counts, [*flat[:place], NULL, *flat[place + 1 :]]),
                "is outside": (names, counts, [*flat[:place], self.num_blocks, *flat[place + 1 :]]),
                "already belongs to": (names, counts, [*flat[:place], owned, *flat[place + 1 :]]),
                "is adopted twice": (
                    names,
                    [*counts[:at], counts[at] + 1, *counts[at + 1 :]],
                    [*flat[:place], flat[place], *flat[place:]],
                ),
                "counts has": (names, counts[:-1], flat),
                "counts add up": (names, counts, [*flat, NULL]),
            }
            fault = data.draw(st.sampled_from(sorted(wrong)))
            with pytest.raises((IntegrityError, ValueError), match=fault) as raised:
                self.collector.adopt_all(*wrong[fault])
            assert isinstance(raised.value, IntegrityError) == (not fault.startswith("counts"))
            assert name in str(raised.value) or not isinstance(raised.value, IntegrityError)
            self.the_ledger_is_the_model(booked_only=True)
        if len(flat) > 1 and data.draw(st.booleans()):  # one block a line, so that requests occur several times
            names = [name for name, new in given.items() for _ in new]
            counts = [1] * len(flat)
        self.collector.adopt_all(names, counts, flat)
        for request_id, new in given.items():
            self.tables[request_id] += new

    @precondition(lambda self: any(slots > 1 for slots in self.slots.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(r for r, slots in self.slots.items() if slots > 1)))
        table, slots = self.tables[request_id], self.slots[request_id]
        keep = data.draw(st.integers(1, slots - 1))
        reusable = [int(self.references[block] == 1) for block in table]
        arguments = (request_id, blocks(*table))
        dst = self.collector.plan(*arguments, flags(*reusable), slots, keep)
        expected = [block if own else -1 for block, own in zip(table, reusable, strict=True)]
        assert dst.tolist() == expected[: -(-keep // BLOCK_SIZE)]

        holes = dst == -1
        if holes.sum() > len(self.free):
            return
        dst[holes] = self.take(int(holes.sum()))
        freed = commit(self.collector, *arguments, dst, slots, keep).tolist()
        assert freed == [block for block in reversed(table) if block not in dst]
        self.put(freed)
        self.tables[request_id], self.slots[request_id] = dst.tolist(), keep
        self.evicted[request_id] = self.evicted.get(request_id, 0) + slots - keep
        self.epochs[request_id] = self.epochs.get(request_id, 0) + 1
        self.totals = Counters(
            self.totals.evictions + 1,
            self.totals.tokens_evicted + slots - keep,
            self.totals.blocks_freed + len(freed) - int(holes.sum()),
        )

    @precondition(lambda self: any(slots > 1 for slots in self.slots.values()))
    @rule(data=st.data())
    def evict_together(self, data: st.DataObject) -> None:
        """One engine step: in place where it can be; half of the steps are spoilt first, and must change nothing."""
        step = Step(self.collector)
        evictable = sorted(r for r, slots in self.slots.items() if slots > 1)
        for request_id in data.draw(st.lists(st.sampled_from(evictable), min_size=1, unique=True)):
            table, slots = self.tables[request_id], self.slots[request_id]
            keep = data.draw(st.integers(1, slots - 1))
            if request_id in self.epochs and data.draw(st.booleans()):
                step.add(request_id, table, slots, keep)
                continue
            reusable = flags(*(self.references[block] == 1 for block in table))
            dst = self.collector.plan(request_id, blocks(*table), reusable, slots, keep)
            holes = dst == -1
            if holes.sum() <= len(self.free):
                dst[holes] = self.take(int(holes.sum()))
                step.add(request_id, table, slots, keep, dst)
        if step.names and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(step.names) - 1))
            wrong = step.spoilt(at, data.draw(st.sampled_from(step.faults(at, self.epochs))))
            with pytest.raises((IntegrityError, ValueError)) as raised:
                wrong.commit()
            assert step.names[at] in str(raised.value) or not isinstance(raised.value, IntegrityError)
            self.the_ledger_is_the_model(booked_only=True)
        done = step.commit()
        assert done.epochs == [self.epochs.get(request_id, 0) for request_id in step.names]
        stitched = done.src.copy()
        stitched[done.moved[0]] = done.moved[1]
        assert (done.src[done.moved[0]] != done.moved[1]).all()
        freed: list[int] = []
        first = 0
        for index, (request_id, slots, keep) in enumerate(zip(step.names, step.physical, step.keep, strict=True)):
            table, used, count = self.tables[request_id], -(-slots // BLOCK_SIZE), -(-keep // BLOCK_SIZE)
            dst = step.moves[index][1].tolist() if index in step.moves else table[:count]
            assert done.src[first : first + used].tolist() == table[:used]
            assert stitched[first : first + count].tolist() == dst
            first += used
            freed += [block for block in reversed(table) if block not in dst]
            self.totals = Counters(
                self.totals.evictions + 1,
                self.totals.tokens_evicted + slots - keep,
                self.totals.blocks_freed + len(table) - count,
            )
            self.tables[request_id], self.slots[request_id] = dst, keep
            self.evicted[request_id] = self.evicted.get(request_id, 0) + slots - keep
            self.epochs[request_id] = self.epochs.get(request_id, 0) + 1
        assert done.freed.tolist() == freed
        self.put(freed)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt_and_restart(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.stop(request_id)
        self.tables[request_id], self.slots[request_id] = [], 0

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.stop(self.pick(data))

    def stop(self, request_id: str) -> None:
        assert self.collector.release(request_id) == self.evicted.pop(request_id, 0)
        self.epochs.pop(request_id, None)
        self.put(self.tables.pop(request_id)[::-1])
        del self.slots[request_id]

    @precondition(lambda self: self.epochs and self.free)
    @rule(data=st.data())
    def a_wrong_table_is_noticed(self, data: st.DataObject) -> None:
        """The engine gave a request a block and did not report it."""
        request_id = data.draw(st.sampled_from(sorted(self.epochs)))
        table = blocks(*self.tables[request_id], self.free[0])
        with pytest.raises(IntegrityError, match=f"request '{request_id}': its table"):
            self.collector.plan(request_id, table, np.ones(len(table), np.uint8), 2, 1)

    @precondition(lambda self: any(slots > 1 for slots in self.slots.values()) and self.epochs)
    @rule(data=st.data())
    def a_stolen_destination_is_noticed(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.epochs)))
        thieves = sorted(r for r, slots in self.slots.items() if slots > 1 and r != victim)
        if not thieves:
            return
        thief = data.draw(st.sampled_from(thieves))
        table = self.tables[thief]
        with pytest.raises(IntegrityError, match=f"belongs to request '{victim}'"):
            commit(self.collector, thief, blocks(*table), blocks(self.tables[victim][0]), self.slots[thief], 1)

    @invariant()
    def free_and_live_and_null_are_the_pool(self) -> None:
        assert len(self.free) + len(self.references) + 1 == self.num_blocks
        assert {*self.free, *self.references, NULL} == set(range(self.num_blocks))
        self.collector.check_integrity(PoolView(blocks(*self.free), blocks(*self.references)))

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        """Some of the slots of some evicted requests are still alive: which of their blocks are not?"""
        names = data.draw(st.lists(st.sampled_from(sorted(self.epochs)), unique=True))
        tables = [(name, block) for name in names for block in self.tables[name]]
        alive = data.draw(st.sets(st.sampled_from(tables))) if tables else set()
        live = [block * BLOCK_SIZE + data.draw(st.integers(0, BLOCK_SIZE - 1)) for _, block in sorted(alive)]
        dead = self.collector.dead_blocks(names, np.array(live, np.int64)).tolist()
        assert dead == [block for name, block in tables if (name, block) not in alive]

    @invariant()
    def the_ledger_is_the_model(self, *, booked_only: bool = False) -> None:
        """Within a rule, a request may hold blocks already that are not booked yet."""
        owners: Counter[int] = Counter()
        for request_id, table in self.tables.items():
            assert self.collector.evicted(request_id) == self.evicted.get(request_id, 0)
            assert self.collector.epoch(request_id) == self.epochs.get(request_id, 0)
            owned = self.collector.owned(request_id).tolist()
            assert owned == (table if request_id in self.epochs else [])
            owners.update(owned)
        assert not owners or max(owners.values()) == 1, "a block has two private owners"
        assert not set(owners) & set(self.free) or booked_only, "a free block has an owner"
        assert all(self.references[block] == 1 for block in owners), "a private block is shared"
        assert len(self.collector) == len(self.epochs)
        assert self.collector.counters == self.totals
        self.collector.check_integrity()

    def teardown(self) -> None:
        for request_id in list(self.tables):
            self.stop(request_id)
        assert len(self.collector) == 0, "the ledger is empty when all requests are gone"
        assert len(self.free) + 1 == self.num_blocks
        self.collector.check_integrity()


def test_the_ledger_lives_like_the_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=max(settings().max_examples, 150)))


@pytest.mark.slow
def test_the_ledger_lives_like_the_model_for_long() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=2000, stateful_step_count=200))
