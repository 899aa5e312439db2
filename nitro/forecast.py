"""How many blocks the requests that are cut back will take before they give some back."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class _Round:
    """What requests do from one cut to the next, while they grow by a token in each step.

    Attributes:
        start: the step in which each holds ``held`` tokens, and gets its next.
        held: tokens.
        cut: the step in which it is cut back, before it gets a token.
        kept: the tokens that it then holds.
        end: the first step in which it gets no token any more; ``cut + 1`` if that is later.
        more: how many more requests (if negative: fewer) do so than is added up.
    """

    start: int
    held: int
    cut: int
    kept: int
    end: int
    more: int = field(default=0, compare=False)


_Course = tuple[_Round, _Round]  # up to the next cut, and from there to the one after


class Forecast:
    """What requests take and give back in the steps to come, if each of them gets one token in each step.

    A request takes a block every ``block_size`` tokens, until it has grown by its slack and is cut back. When
    the next ones are admitted, there has to be room for that: otherwise a request that is already running would be
    preempted, and what was computed for it would be computed again. All of them at their largest at once would be
    too much to set aside, since most of the time some grow while others are cut back. So this adds up who is where.

    Each request is foreseen up to the cut after the next. Where it does not keep to that (a step without a token for
    it, an early end), the forecast is a little wrong until it is expected anew, at the latest at its next cut.

    Of the requests that are cut back in a step most are under the same rule, and then do the same: they share their
    rounds, which are added up once for all of them.
    """

    def __init__(self, block_size: int) -> None:
        """Begin with no request, before the first step."""
        self._block_size = block_size
        self._step = 0
        self._courses: dict[str, _Course] = {}
        self._same: dict[tuple[int, ...], _Course] = {}  # those that begin in this step
        self._touched: list[_Round] = []  # rounds that may not be added up
        self._base = 0  # the step of the first of ...
        self._changes = np.zeros(256, np.int64)  # the blocks taken less those given back in a step, step by step
        self._last = 0  # no later step has a change
        self._most: int | None = 0

    def begin_step(self) -> None:
        """Begin the next step."""
        self._step += 1
        self._most = None
        if self._touched:
            self._add_up()

    def expect(self, name: str, held: int, gap: int, kept: int, slack: int, left: int) -> None:
        """Expect a request to grow, from this step's token on.

        Args:
            name: the request; whatever was expected of it is replaced.
            held: tokens that it holds now.
            gap: steps until it is cut back, at least 1.
            kept: tokens that it then keeps.
            slack: steps from there to the next cut, at least 1.
            left: tokens that it can still get at all.
        """
        horizon = gap + slack
        key = (held, gap, kept, slack, left if left <= horizon else horizon + 1)
        before = self._courses.get(name)
        course = self._same.get(key) or self._course(key, before)
        self._courses[name] = course
        now, then = course
        if before is None:
            now.more += 1
        elif before[1] is not now and before[1] != now:  # otherwise it was foreseen up to the next cut
            self._forget(before)
            now.more += 1
        then.more += 1

    def drop(self, name: str) -> None:
        """Expect no more of a request: it has ended, or was preempted; does nothing if there is none."""
        course = self._courses.pop(name, None)
        if course is not None:
            self._forget(course)

    @property
    def most(self) -> int:
        """The most blocks that they will have taken after this step, and not given back, in any later step."""
        if self._touched:
            self._add_up()
        if self._most is None:
            changes = self._changes[self._step + 1 - self._base : self._last + 1 - self._base]
            self._most = int(np.maximum.reduce(np.add.accumulate(changes), initial=0))
        return self._most

    @property
    def names(self) -> Set[str]:
        """Those of whom something is expected."""
        return self._courses.keys()

    def _course(self, key: tuple[int, int, int, int, int], before: _Course | None) -> _Course:
        """Return a new course that begins in this step, and goes on with the round that was foreseen if it is that."""
        held, gap, kept, slack, left = key
        step = self._step
        cut, end = step + gap, step + left
        after = cut + slack
        now = _Round(step, held, cut, kept, min(end, cut + 1))
        then = _Round(cut, kept, after, kept, min(end, after + 1))
        if before is not None and before[1] == now:
            now = before[1]
        self._same[key] = now, then
        self._touched += now, then
        return now, then

    def _forget(self, course: _Course) -> None:
        for round_ in course:
            round_.more -= 1
        self._touched += course

    def _add_up(self) -> None:
        for round_ in self._touched:
            if round_.more:
                self._add(round_)
                round_.more = 0
        self._touched.clear()
        self._same.clear()  # nobody else may join a course that is added up
        self._most = None

    def _add(self, round_: _Round) -> None:
        """Add what requests take in the steps of a round that are to come, and give back at its end."""
        size, now = self._block_size, self._step
        cut, end = round_.cut, round_.end
        cuts = cut < end
        last = cut if cuts else end - 1
        if last <= now:
            return
        if last - self._base >= len(self._changes):
            self._move(last)
        if last > self._last:
            self._last = last
        first = round_.start + -round_.held % size
        if first <= now:
            first += ((now - first) // size + 1) * size  # what was taken by now is no change to come
        base, changes = self._base, self._changes
        stop = cut if cuts else end
        if first < stop:
            changes[first - base : stop - base : size] += round_.more
        if cuts:
            largest = round_.held + cut - round_.start
            changes[cut - base] -= round_.more * (-(-largest // size) - -(-round_.kept // size))

    def _move(self, last: int) -> None:
        """Let the array begin with this step, and reach a step at least."""
        known = self._changes[self._step - self._base :]
        changes = np.zeros(max(256, 1 << (2 * (last - self._step)).bit_length()), np.int64)
        known = known[: len(changes)]
        changes[: len(known)] = known
        self._changes, self._base = changes, self._step
