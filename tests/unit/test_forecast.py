"""The forecast beside requests that are followed by hand, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nitro.forecast import Forecast

SIZE = 4


@dataclass
class Course:
    """A request that gets a token a step, is cut back to ``kept`` twice, and is not foreseen after that."""

    start: int
    held: int
    gap: int
    kept: int
    slack: int
    left: int

    @property
    def cuts(self) -> tuple[int, int]:
        return self.start + self.gap, self.start + self.gap + self.slack

    def blocks(self, step: int) -> int:
        """Return what it holds at the end of a step, from its start on."""
        held = self.held
        for now in range(self.start, step + 1):
            if now >= self.start + self.left:
                break  # its last token has come
            if now in self.cuts:
                held = self.kept
            if now == self.cuts[1]:
                break
            held += 1
        return -(-held // SIZE)


NAMES, GAPS, LEFT = st.sampled_from("abcdef"), st.integers(1, 15), st.one_of(st.integers(0, 40), st.just(10_000))


class Machine(RuleBasedStateMachine):
    """Whatever is expected and dropped, in and out of time: the forecast is what the courses add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.forecast = Forecast(SIZE)
        self.step = 0
        self.courses: dict[str, Course] = {}

    def follow(self, name: str, course: Course) -> None:
        self.forecast.expect(name, course.held, course.gap, course.kept, course.slack, course.left)
        self.courses[name] = course

    @rule(names=st.sets(NAMES, min_size=1), kept=st.integers(1, 20), gap=GAPS, slack=GAPS, left=LEFT)
    def cut_together(self, names: set[str], kept: int, gap: int, slack: int, left: int) -> None:
        for name in names:
            self.follow(name, Course(self.step, kept, gap, kept, slack, left))

    @rule(
        name=st.sampled_from("abcdef"),
        kept=st.integers(1, 20),
        over=st.integers(-5, 9),
        gap=GAPS,
        slack=GAPS,
        left=LEFT,
    )
    def join_on_the_way(self, name: str, kept: int, over: int, gap: int, slack: int, left: int) -> None:
        """It holds more than it is to keep, or less, since that grows with it."""
        self.follow(name, Course(self.step, max(kept + over, 1), gap, kept, slack, left))

    @precondition(lambda self: self.courses)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.courses)))
        self.forecast.drop(name)
        del self.courses[name]

    @rule(steps=st.integers(1, 20), keep_to_it=st.booleans())
    def go_on(self, steps: int, keep_to_it: bool) -> None:
        """Let steps begin, in which requests are cut back as foreseen, or nothing is heard of any."""
        for _ in range(steps):
            self.step += 1
            self.forecast.begin_step()
            for name, course in list(self.courses.items()) if keep_to_it else ():
                left = course.left - course.gap
                if course.cuts[0] == self.step and left > 0:
                    self.follow(name, Course(self.step, course.kept, course.slack, course.kept, course.slack, left))

    @invariant()
    def all_is_foreseen(self) -> None:
        horizon = max((min(course.cuts[1], course.start + 60) for course in self.courses.values()), default=0)
        held = [
            sum(course.blocks(step) for course in self.courses.values())
            for step in range(self.step, max(horizon, self.step) + 1)
        ]
        assert self.forecast.most == max(held) - held[0]
        assert self.courses or not self.forecast._changes[self.step + 1 - self.forecast._base :].any()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_nothing_is_foreseen_before_the_first_step_and_of_nobody() -> None:
    forecast = Forecast(SIZE)
    assert forecast.most == 0
    forecast.drop("unknown")
    forecast.begin_step()
    assert forecast.most == 0


@pytest.mark.parametrize("slack", [1, 50, 10**9])
def test_it_does_not_grow_with_time_nor_beyond_the_tokens_to_come(slack: int) -> None:
    """Also where nobody ever asks, and where a client asks for any slack."""
    forecast = Forecast(SIZE)
    names = [str(number) for number in range(10)]
    for step in range(5000):
        forecast.begin_step()
        if step % min(slack, 100) == 0:
            for name in names:
                forecast.expect(name, 10, slack, 10, slack, 700)
    assert len(forecast._changes) <= 2048
    assert len(forecast._touched) <= 2 * len(names)
    for name in names:
        forecast.drop(name)
    assert forecast.most == 0
    assert not forecast._changes[5000 + 1 - forecast._base :].any()
    assert not forecast.names
