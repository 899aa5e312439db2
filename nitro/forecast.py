"""How many blocks the evicted requests will take before they give some back."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple


class _Course(NamedTuple):
    """A request that holds ``keep`` tokens, grows by one in each step, and is cut back every ``slack`` steps.

    Attributes:
        start: the step in which it was cut back.
        keep: the tokens that it then held.
        slack: steps from one cut to the next.
        end: the first step in which it cannot grow any more.
    """

    start: int
    keep: int
    slack: int
    end: int

    def after(self) -> _Course:
        """Return the course from the next cut on."""
        return self._replace(start=self.start + self.slack)

    def takes(self, block_size: int) -> range:
        """Return the steps before the next cut in which it takes a block."""
        first = self.start + -self.keep % block_size
        return range(first, min(self.start + self.slack, self.end), block_size)


class Forecast:
    """What evicted requests take and give back in the steps to come, if each of them gets one token in each step.

    An evicted request takes a block every ``block_size`` tokens, until it has grown by its slack and is cut back. When
    the next ones are admitted, there has to be room for that: otherwise a request that is already running would be
    preempted, and what was computed for it would be computed again. All of them at their largest at once would be
    too much to set aside, since most of the time some grow while others are cut back. So this adds up who is where.

    Each request is foreseen up to the cut after the next. Where it does not keep to that (a step without a token for
    it, a ratio of a growing length), the forecast is a little wrong until it is cut back the next time.
    """

    def __init__(self, block_size: int) -> None:
        """Begin with no request, before the first step."""
        self._block_size = block_size
        self._step = 0
        self._changes: dict[int, int] = {}
        self._courses: dict[str, _Course] = {}
        self._most: int | None = None

    def begin_step(self) -> None:
        """Begin the next step."""
        self._step += 1
        if self._changes.pop(self._step, 0):
            self._most = None

    def cut(self, name: str, keep: int, slack: int, left: int) -> None:
        """Expect a request to grow from now on, since it is cut back in this step.

        Args:
            name: the request; whatever was expected of it is replaced.
            keep: tokens that it holds now.
            slack: tokens that it grows by until it is cut back again, at least 1.
            left: tokens that it can still grow by at all.
        """
        course = _Course(self._step, keep, slack, self._step + left)
        before = self._courses.get(name)
        if before is None or before.after() != course:  # otherwise it was foreseen up to the next cut
            self.drop(name)
            self._foresee(course, 1)
        self._foresee(course.after(), 1)
        self._courses[name] = course

    def drop(self, name: str) -> None:
        """Expect no more of a request: it has ended, or was preempted; does nothing if there is none."""
        course = self._courses.pop(name, None)
        if course is not None:
            self._foresee(course, -1)
            self._foresee(course.after(), -1)

    @property
    def most(self) -> int:
        """The most blocks that they will have taken after this step, and not given back, in any later step."""
        if self._most is None:
            self._most = max(accumulate((self._changes[step] for step in sorted(self._changes)), initial=0))
        return self._most

    def _foresee(self, course: _Course, sign: int) -> None:
        """Add, or take away, what is taken up to the next cut, and that it is given back then."""
        takes = course.takes(self._block_size)
        for step in takes:
            self._change(step, sign)
        if takes and (cut := course.after().start) < course.end:
            self._change(cut, -sign * len(takes))

    def _change(self, step: int, change: int) -> None:
        if step > self._step:
            self._most = None
            changed = self._changes.get(step, 0) + change
            if changed:
                self._changes[step] = changed
            else:
                self._changes.pop(step, None)
