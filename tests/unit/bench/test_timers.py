"""Timers: sections are parts of a whole, whatever is nested in what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro.bench.timers import Timers

Tree = list[tuple[str, float, "Tree"]]


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_inner_sections_do_not_count_twice() -> None:
    clock = Clock()
    timers = Timers(("outer", "inner"), clock)
    timers.enter("outer")
    clock.now = 1.0
    timers.enter("inner")
    clock.now = 3.0
    timers.leave()
    clock.now = 7.0
    assert timers.taken() == (5.0, 2.0)  # up to now, although it goes on
    clock.now = 8.0
    timers.leave()
    clock.now = 100.0
    assert timers.seconds == {"outer": 6.0, "inner": 2.0}


TREES = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), inner), max_size=3),
    max_leaves=12,
)


@given(TREES)
def test_sections_sum_up_to_the_time_in_any_of_them(tree: Tree) -> None:
    clock = Clock()
    timers, expected = Timers(tuple("abc"), clock), dict.fromkeys("abc", 0.0)

    def walk(nodes: Tree) -> None:
        for name, own, inner in nodes:
            timers.enter(name)
            clock.now += own
            expected[name] += own
            walk(inner)
            timers.leave()

    walk(tree)
    assert timers.seconds == expected
    assert sum(timers.taken()) == clock.now


def test_methods_are_wrapped_once_and_end_with_their_errors() -> None:
    clock = Clock()

    class Owner:
        def works(self) -> str:
            clock.now += 2.0
            return "done"

        def fails(self) -> None:
            clock.now += 1.0
            raise ValueError("no")

    timers = Timers(("a", "b"), clock)
    assert timers.wrap(Owner, "works", "a")
    assert not timers.wrap(Owner, "works", "b")
    assert not timers.wrap(Owner, "missing", "a")
    assert timers.wrap(Owner, "fails", "b")
    assert Owner().works() == "done"
    with pytest.raises(ValueError, match="no"):
        Owner().fails()
    clock.now += 50.0
    assert timers.taken() == (2.0, 1.0)
