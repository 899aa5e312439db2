"""Watches vLLM's scheduler from inside its process."""

from __future__ import annotations

import time
from typing import Any

from nitro.demo.records import Step


class Probe:
    """Samples a scheduler right after each ``schedule()``, when a step's blocks are all allocated.

    After the step it would be too late: the blocks of requests that finished in it are free again.

    Attributes:
        steps: one sample per step.
        last_blocks: blocks that each request (by vLLM's internal id) held when it was last seen running.
    """

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[Step] = []
        self.last_blocks: dict[str, int] = {}
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        self._start: float | None = None
        scheduler.schedule = self._sampled_schedule

    @property
    def pool_blocks(self) -> int:
        """Blocks that requests can own; one of the pool is the null block."""
        return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    def elapsed_s(self) -> float:
        """Return the time since the first step was scheduled, 0 before that."""
        return 0.0 if self._start is None else time.perf_counter() - self._start

    def _sampled_schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._start is None:
            self._start = time.perf_counter()
        started = self.elapsed_s()
        output = self._schedule(*args, **kwargs)
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        blocks = {r.request_id: sum(map(len, manager.get_block_ids(r.request_id))) for r in scheduler.running}
        self.last_blocks |= blocks
        self.steps.append(
            Step(
                time_s=started,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                blocks=self.pool_blocks - int(manager.block_pool.get_num_free_blocks()),
                preempted=len(output.preempted_req_ids or ()),
                tokens=int(output.total_num_scheduled_tokens),
                allocated=sum(blocks.values()) * int(scheduler.block_size),
                live=sum(int(r.num_computed_tokens) - self._evicted(r.request_id) for r in scheduler.running),
            )
        )
        return output

    def _evicted(self, request_id: str) -> int:
        side = getattr(self._scheduler, "nitro", None)
        return 0 if side is None else int(side.collector.evicted(request_id))
