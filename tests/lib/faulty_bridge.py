"""A bridge that is late, loses messages, and brings some twice or in another order."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from nitro.ipc import MESSAGE, Messages, Producer


class FaultyProducer(Producer):
    """In place of a worker's end of the ring; its faults are drawn from one generator, for all ends."""

    random = random.Random(0)
    lost = late = repeated = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: list[tuple[int, npt.NDArray[np.void]]] = []
        self._published = 0

    def publish(self, messages: Messages | None = None) -> int:
        """Send what is due, and hold back, drop or repeat what is new."""
        cls, draw = type(self), self.random
        self._published += 1
        for message in messages if messages is not None else ():
            if draw.random() < 0.2:
                cls.lost += 1
                continue
            for _ in range(1 + (draw.random() < 0.2)):
                delay = draw.choice((0, 0, 1, 3, 12, 40))
                cls.late += delay > 0
                self._waiting.append((self._published + delay, message.copy()))
            cls.repeated += len(self._waiting) > 1 and self._waiting[-1][1] == self._waiting[-2][1]
        due = [message for when, message in self._waiting if when <= self._published]
        self._waiting = [(when, message) for when, message in self._waiting if when > self._published]
        draw.shuffle(due)
        return super().publish(np.array(due, MESSAGE) if due else np.empty(0, MESSAGE))
