"""The calendar beside a plain model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nitro.due import DueCalendar

NAMES = st.sampled_from("abcdefgh")


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.calendar = DueCalendar()
        self.model: dict[str, int] = {}  # name → steps to go

    @rule(name=NAMES, gap=st.integers(-3, 9))
    def file(self, name: str, gap: int) -> None:
        self.calendar.file(name, gap)
        self.model[name] = max(gap, 1)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.calendar.drop(name)
        self.model.pop(name, None)

    @rule()
    def step(self) -> None:
        names = list(self.calendar.begin_step())
        assert len(set(names)) == len(names)
        assert set(names) == {name for name, left in self.model.items() if left == 1}
        self.model = {name: left - 1 for name, left in self.model.items() if left > 1}

    @invariant()
    def agrees(self) -> None:
        assert len(self.calendar) == len(self.model)
        assert all((name in self.calendar) == (name in self.model) for name in "abcdefgh")


TestCalendar = Machine.TestCase
TestCalendar.settings = settings(max_examples=60, stateful_step_count=60)


def test_nothing_is_left_behind() -> None:
    calendar = DueCalendar()
    for number in range(1000):
        calendar.file("x", 5 + number % 3)
        calendar.begin_step()
    calendar.drop("x")
    assert len(calendar) == 0
    assert not any(calendar._filed.values())
    for _ in range(10):
        list(calendar.begin_step())
    assert not calendar._filed


def test_far_steps_leave_nothing_behind() -> None:
    calendar = DueCalendar()
    for number in range(100):
        calendar.file(f"r{number}", 10**9 + number)
        calendar.drop(f"r{number}")
    assert not calendar._filed
