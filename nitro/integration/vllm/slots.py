"""Fragmentation of the running engine: slots that requests hold over slots that they use, looked at once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.request import Request

    from nitro.collector import Collector

INTERVAL = 1.0  # seconds; all running requests are looked at, which is too much for each step and nothing in a second


class SlotUse(NamedTuple):
    """Slots of running requests at one time, in each layer and KV head; a shared block counts for each that shares it.

    Attributes:
        allocated: slots of the blocks that they hold.
        live: slots in use.
        worst_allocated: of the evicted request that holds the most for each slot in use; 0 if there is none.
        worst_live: what that one uses.
    """

    allocated: int = 0
    live: int = 0
    worst_allocated: int = 0
    worst_live: int = 0


class SlotWatch:
    """Counts slots where the last count is old enough, or nobody runs any more."""

    def __init__(
        self, manager: FullAttentionManager, collector: Collector, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without a count.

        Args:
            manager: has the requests' block lists.
            collector: knows what was evicted.
            clock: in seconds.
        """
        self._manager, self._collector, self._clock = manager, collector, clock
        self._next = -float("inf")
        self._idle = False

    def look(self, running: Sequence[Request]) -> SlotUse | None:
        """Return the slots of the requests that run, or None if it is too early to count again."""
        idle = not running
        if self._clock() < self._next and idle <= self._idle:
            return None
        self._next, self._idle = self._clock() + INTERVAL, idle
        size, tables, evicted = self._manager.block_size, self._manager.req_to_blocks, self._collector.evicted
        total = live = worst_held = worst_used = 0
        for request in running:
            name = request.request_id
            held, gone = len(tables[name]) * size, evicted(name)
            used = request.num_computed_tokens - gone
            total += held
            live += used
            # Others have no bound: of a request with one token, most of its block is free.
            if gone and held * worst_used >= worst_held * used:
                worst_held, worst_used = held, used
        return SlotUse(total, live, worst_held, worst_used)
