"""What running requests hold: tokens, slots, and how many have a rule to keep to; counted about once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.request import Request

    from nitro.collector import Collector
    from nitro.integration.vllm.request_rules import RequestRules

INTERVAL = 1.0  # seconds between two counts: to look at all running requests is too much for each step,
PART = 128  # and for one: thousands take milliseconds, since their objects are far apart in memory


class SlotUse(NamedTuple):
    """Slots of running requests at one time, in each layer and KV head; a shared block counts for each that shares it.

    Attributes:
        allocated: slots of the blocks that they hold.
        live: slots in use, that is, tokens in the cache.
        worst_allocated: of the evicted request that holds the most for each slot in use; 0 if there is none.
        worst_live: what that one uses.
        logical: tokens that have been computed, evicted ones included.
        active: requests that have a budget, ratio or threshold to keep to.
        evicted: requests that have lost tokens.
    """

    allocated: int = 0
    live: int = 0
    worst_allocated: int = 0
    worst_live: int = 0
    logical: int = 0
    active: int = 0
    evicted: int = 0


class SlotWatch:
    """Counts slots where the last count is old enough, or nobody runs any more.

    A count of many requests takes several steps, a part of them in each.
    """

    def __init__(
        self,
        manager: FullAttentionManager,
        collector: Collector,
        rules: RequestRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a count.

        Args:
            manager: has the requests' block lists.
            collector: knows what was evicted.
            rules: knows what each request has to keep to.
            clock: in seconds.
        """
        self._manager, self._collector, self._rules, self._clock = manager, collector, rules, clock
        self._next = -float("inf")
        self._idle = False
        self._left: list[Request] = []  # of the count that is under way
        self._use = SlotUse()  # of those that it has looked at

    def look(self, running: Sequence[Request]) -> SlotUse | None:
        """Return the slots of the requests that run, or None if it is too early to count again, or more are to come."""
        idle = not running
        if idle > self._idle or (not self._left and self._clock() >= self._next):
            self._next, self._idle = self._clock() + INTERVAL, idle
            self._left, self._use = list(running), SlotUse()
        elif not self._left:
            return None
        self._use = self._with(self._left[:PART])
        del self._left[:PART]
        return None if self._left else self._use

    def _with(self, requests: Sequence[Request]) -> SlotUse:
        """Return what was counted, and these requests, except for those that do not run any more."""
        size, tables, evicted = self._manager.block_size, self._manager.req_to_blocks, self._collector.evicted
        total, live, worst_held, worst_used, logical, active, lost = self._use
        for request in requests:
            name = request.request_id
            # One that has finished since may have left its name to another one.
            if request.is_finished() or not (blocks := tables.get(name)):
                continue
            held, gone = len(blocks) * size, evicted(name)
            used = request.num_computed_tokens - gone
            total += held
            live += used
            logical += request.num_computed_tokens
            active += not self._rules.of(request).never
            lost += gone > 0
            # Others have no bound: of a request with one token, most of its block is free.
            if gone and held * worst_used >= worst_held * used:
                worst_held, worst_used = held, used
        return SlotUse(total, live, worst_held, worst_used, logical, active, lost)
