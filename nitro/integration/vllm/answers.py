"""A worker's answers to the scheduler: how many of a request's tokens reach the threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from nitro.device_counts import AsyncCounts
from nitro.errors import BridgeError
from nitro.ipc import MESSAGE, Messages, Producer

if TYPE_CHECKING:
    import torch

    from nitro.compactor import Compactor
    from nitro.types import IntArray, StepAsks

logger = init_logger("vllm.plugins.nitro")


class Answers:
    """Counts on the device, copies to the host behind an event, and publishes once the copy is there. Never waits.

    Attributes:
        silent: questions that were left out, since the device is too far behind.
    """

    def __init__(self, compactor: Compactor, device: torch.device, most_requests: int) -> None:
        """Begin without the shared memory, which the first question names.

        Args:
            compactor: counts.
            device: where it counts.
            most_requests: questions in a step at most.
        """
        self._compactor = compactor
        self._counts: AsyncCounts[StepAsks] = AsyncCounts(most_requests, device)
        self._producer: Producer | None = None
        self._mute = False
        self._replaced = 0  # by a producer that is closed
        self.silent = 0

    @property
    def replaced(self) -> int:
        """Return how many answers waited for room in the ring until a newer one of their request took their place."""
        return self._replaced if self._producer is None else self._producer.counters.replaced

    def step(self, asks: StepAsks | None) -> None:
        """Send what the device has counted since the last step, and let it count what is asked now.

        To be called in each step, after its evictions were applied, and before its tokens are written.
        """
        arrived = [messages_of(asked, counts) for asked, counts in self._counts.finished()]
        if self._producer is not None:
            self._producer.publish(np.concatenate(arrived) if arrived else np.empty(0, MESSAGE))
            if self._producer.broken:
                self._fall_silent("something has written over the shared memory")
        if asks is None or self._mute:
            return
        if self._producer is None:
            try:
                self._producer = Producer(asks.ring)
            except BridgeError as error:
                # It was there when the engine started. Somebody has removed it; requests need not suffer for that.
                self._fall_silent(str(error))
                return
        if not self._counts.submit(self._compactor.count(asks.slots, asks.threshold), asks):
            self.silent += len(asks)
            logger.warning_once("the GPU is so far behind that an answer was left out; the scheduler will ask again")

    def _fall_silent(self, why: str) -> None:
        """Answer nothing any more, and keep nothing that waits to be sent."""
        self._mute = True
        if self._producer is not None:
            self._replaced = self._producer.counters.replaced
            self._producer.close()
            self._producer = None
        logger.warning(
            "no more answers to the scheduler, so that thresholds evict nothing, only max_keep does, until the engine "
            "is started again: %s",
            why,
        )


def messages_of(asked: StepAsks, counts: IntArray) -> Messages:
    """Return the answers to a step's questions, given each request's count, int32 ``[R]``."""
    found = np.zeros(len(asked), MESSAGE)
    slots = asked.slots
    found["request"], found["run"], found["step"] = asked.numbers, asked.runs, asked.step
    found["epoch"], found["logical_len"], found["physical_len"] = slots.epoch, slots.logical_len, slots.physical_len
    found["keep"] = counts
    return found
