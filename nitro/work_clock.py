"""What a worker's evictions take: by its own clock, and on a GPU by events that nothing waits for."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Self

import torch

from nitro.types import WorkReport

if TYPE_CHECKING:
    from types import TracebackType

MOST = 16  # times that may wait to be told; a step adds one, and nearly each step is told of


class WorkClock:
    """Times a worker's part of one step after the other: ``with clock: ...``; ``take()`` returns what is known.

    Args:
        device: where the work is done.
        depth: steps whose events may be under way. A device that is further behind has steps without a time.
    """

    def __init__(self, device: torch.device, depth: int = 8) -> None:
        on_gpu = device.type == "cuda"
        self._free = [
            (torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True))
            for _ in range(depth if on_gpu else 0)
        ]
        self._pair: tuple[torch.Event, torch.Event] | None = None
        self._under_way: deque[tuple[torch.Event, torch.Event]] = deque()
        self._host: deque[int] = deque(maxlen=MOST)
        self._started = 0

    def __enter__(self) -> Self:
        """Begin: the events are on the current stream."""
        self._pair = self._free.pop() if self._free else None
        if self._pair is not None:
            self._pair[0].record()
        self._started = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End; after an error, too, which ends the engine."""
        self._host.append(time.perf_counter_ns() - self._started)
        if self._pair is not None:
            self._pair[1].record()
            self._under_way.append(self._pair)

    def take(self) -> WorkReport | None:
        """Return the times that have become known since the last call; None if there are none."""
        device = []
        while self._under_way and self._under_way[0][1].query():
            pair = self._under_way.popleft()
            device.append(round(pair[0].elapsed_time(pair[1]) * 1e6))
            self._free.append(pair)
        if not self._host and not device:
            return None
        report = WorkReport(tuple(self._host), tuple(device))
        self._host.clear()
        return report
