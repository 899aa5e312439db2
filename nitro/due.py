"""When which request is looked at next, so that a step does not have to look at all that are running."""

from __future__ import annotations

from collections.abc import Iterable


class DueCalendar:
    """Names by the step in which they come up.

    A request that grows by at most one token a step and has ``gap`` tokens to go cannot be due before ``gap`` more
    steps have begun. It is filed there, and looked at then; if it skipped some steps, it is filed again. Each step
    costs what comes up in it, whatever the number of requests that are filed.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self._step = 0
        self._filed: dict[int, dict[str, None]] = {}
        self._where: dict[str, int] = {}

    def file(self, name: str, gap: int) -> None:
        """Let a name come up ``gap`` steps from now, at least one, and not before; moves one that is filed already."""
        if name in self._where:
            self.drop(name)
        self._where[name] = step = self._step + (gap if gap > 1 else 1)
        filed = self._filed.get(step)
        if filed is None:
            self._filed[step] = filed = {}
        filed[name] = None

    def drop(self, name: str) -> None:
        """Take a name out; does nothing if it is not filed."""
        step = self._where.pop(name, None)
        if step is not None:
            filed = self._filed[step]
            del filed[name]
            if not filed:  # else a far step that nobody waits for any longer would be kept until it begins
                del self._filed[step]

    def begin_step(self) -> Iterable[str]:
        """Begin the next step, and take out and return the names that come up in it, in the order they were filed."""
        self._step += 1
        names = self._filed.pop(self._step, {})
        for name in names:
            del self._where[name]
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)
