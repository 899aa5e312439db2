"""Where a thread's time goes: timers around methods, of which each counts only what no inner one counts.

So the sections' times are parts of a whole: they sum up to the time in all timed methods, and what is left of the time
that passed was spent in none of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

MARK = "_nitro_bench_original"


class Timers:
    """Seconds spent in each section, for one thread.

    Attributes:
        seconds: by section, without what inner sections took.
    """

    def __init__(self, sections: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(sections, 0.0)
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    def enter(self, section: str) -> None:
        """Begin a section; the one that is open pauses."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._open.append(section)
        self._since = now

    def leave(self) -> None:
        """End the section begun last; the one around it goes on."""
        now = self._clock()
        self.seconds[self._open.pop()] += now - self._since
        self._since = now

    def taken(self) -> tuple[float, ...]:
        """Return the seconds so far in the sections' order, those of open ones up to now included."""
        if self._open:
            now = self._clock()
            self.seconds[self._open[-1]] += now - self._since
            self._since = now
        return tuple(self.seconds.values())

    def wrap(self, owner: Any, name: str, section: str) -> bool:
        """Put a timer around ``owner.name`` (a class's method, or a module's function); False if there is none."""
        original = getattr(owner, name, None)
        if original is None or hasattr(original, MARK):
            return False

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(section)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        setattr(timed, MARK, original)
        setattr(owner, name, timed)
        return True
