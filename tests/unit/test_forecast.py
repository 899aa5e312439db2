"""The forecast beside requests that are followed step by step."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nitro.forecast import Forecast

SIZE = 4


@dataclass
class Grower:
    """Holds ``held`` tokens, of which it may get ``left`` more, and is cut to ``keep`` when it has ``slack`` more."""

    keep: int
    slack: int
    left: int
    held: int

    def step(self) -> bool:
        """Begin a step: cut if that is due (then return True), and get a token."""
        cut = self.held - self.keep >= self.slack and self.left > 0
        if cut:
            self.held = self.keep
        if self.left > 0:
            self.held += 1
            self.left -= 1
        return cut

    @property
    def blocks(self) -> int:
        return -(-self.held // SIZE)


REQUESTS = st.tuples(st.integers(1, 20), st.integers(1, 15), st.integers(0, 60))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.integers(0, 20)), min_size=1, max_size=6))
def test_the_most_blocks_are_foreseen(requests: list[tuple[tuple[int, int, int], int]]) -> None:
    """Of all that were cut by now, until the cut after the next of any of them."""
    forecast, growers = Forecast(SIZE), {}
    for step in range(21):
        forecast.begin_step()
        for name, ((keep, slack, left), start) in enumerate(requests):
            if start == step:
                growers[name] = Grower(keep, slack, left + 1, keep + slack)  # due in this step
        for name, grower in growers.items():
            left = grower.left
            if grower.step():
                forecast.cut(str(name), grower.keep, grower.slack, left)
        held = sum(grower.blocks for grower in growers.values())
        horizon = min((request[1] for request, start in requests if start <= step), default=0)
        later = [Grower(g.keep, g.slack, g.left, g.held) for g in growers.values()]
        most = 0
        for _ in range(horizon):
            for grower in later:
                grower.step()
            most = max(most, sum(grower.blocks for grower in later) - held)
        assert forecast.most >= most
        if len({request for request, _ in requests}) == 1 and growers:  # then it ends within two rounds
            for _ in range(horizon):
                for grower in later:
                    grower.step()
                most = max(most, sum(grower.blocks for grower in later) - held)
            assert forecast.most <= most


class Machine(RuleBasedStateMachine):
    """Whatever is cut and dropped, in and out of time: nothing is left of what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.forecast = Forecast(SIZE)
        self.names: set[str] = set()

    @rule(name=st.sampled_from("abcd"), request=REQUESTS)
    def cut(self, name: str, request: tuple[int, int, int]) -> None:
        self.forecast.cut(name, *request)
        self.names.add(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.forecast.drop(name)
        self.names.discard(name)

    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.forecast.begin_step()

    @invariant()
    def nothing_is_left_of_none(self) -> None:
        assert self.forecast.most >= 0
        if not self.names:
            assert self.forecast.most == 0
            assert not self.forecast._changes


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
