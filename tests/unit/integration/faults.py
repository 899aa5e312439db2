"""Faults to plant in the scheduler's side of Nitro, which the simulation and the state machine must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from nitro.collector import Collector
from nitro.integration.vllm.evictions import StepEvictions
from nitro.integration.vllm.manager import NitroFullAttentionManager
from nitro.integration.vllm.scheduler import SchedulerSide
from nitro.integration.vllm.work import PLAN
from nitro.types import Eviction, StepPlan

Plant = Callable[[pytest.MonkeyPatch], None]


def lose_a_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "attach", lambda *_: None)


def remember_the_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NitroFullAttentionManager, "pop_blocks_for_free", FullAttentionManager.pop_blocks_for_free)


def overwrite_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    plan = Collector.plan
    patch.setattr(
        Collector, "plan", lambda self, name, blocks, reusable, *rest: plan(self, name, blocks, reusable | 1, *rest)
    )


def free_before_the_batch_is_planned(patch: pytest.MonkeyPatch) -> None:
    def eager(self: SchedulerSide, requests: dict[str, Any]) -> StepPlan | None:
        self._releases = self.collector.releases
        evictions: list[Eviction] = []
        for request in requests.values():
            step = StepEvictions(self.manager, self.pool, self.collector)
            if request.status == RequestStatus.RUNNING and self._look(request, step):
                evictions += step.commit().evictions()
        return StepPlan.of(evictions, self.manager.block_size) if evictions else None

    patch.setattr(SchedulerSide, "plan", eager)


def free_before_the_plan_is_applied(patch: pytest.MonkeyPatch) -> None:
    """The scheduler frees at once, but the worker compacts one step later."""
    waiting: dict[int, StepPlan] = {}

    def late(self: SchedulerSide, plan: StepPlan, output: Any) -> None:
        if (before := waiting.pop(id(self), None)) is not None:
            setattr(output, PLAN, before)
        waiting[id(self)] = plan

    patch.setattr(SchedulerSide, "attach", late)


def ship_a_stale_epoch(patch: pytest.MonkeyPatch) -> None:
    """A request's second eviction, and each after it, says that it is the one before."""
    commit = StepEvictions.commit

    def stale(self: StepEvictions) -> StepPlan:
        plan = commit(self)
        counts = plan.counts.copy()
        counts[0] = np.maximum(counts[0] - 1, 0)
        return StepPlan(plan.request_ids, counts, plan.src_blocks, plan.moved, plan.block_size)

    patch.setattr(StepEvictions, "commit", stale)


def alias_a_destination(patch: pytest.MonkeyPatch) -> None:
    """Survivors go to a block that another running request reads, while the ledger books the right one."""
    plan = SchedulerSide.plan

    def aliasing(self: SchedulerSide, requests: Any) -> StepPlan | None:
        step = plan(self, requests)
        if step is None or not step.moved.size:
            return step
        tables = self.manager.req_to_blocks
        others = [blocks[0].block_id for name, blocks in tables.items() if blocks and name not in step.request_ids]
        moved = step.moved.copy()
        moved[1, 0] = others[0] if others else moved[1, 0]
        return StepPlan(step.request_ids, step.counts, step.src_blocks, moved, step.block_size)

    patch.setattr(SchedulerSide, "plan", aliasing)


def give_a_destination_away(patch: pytest.MonkeyPatch) -> None:
    """Fresh blocks of survivors stay in the pool's free list, from which others get them."""
    move = StepEvictions._move

    def leaky(self: StepEvictions, *arguments: Any) -> bool:
        before = len(self)
        made = move(self, *arguments)
        for _, block in self._fresh.get(before, ()):
            self._pool.free_blocks([block])
        return made

    patch.setattr(StepEvictions, "_move", leaky)


def remember_what_was_enough(patch: pytest.MonkeyPatch) -> None:
    """A request that was cut back is believed to have the blocks that it had before."""
    commit = StepEvictions.commit

    def forgetful(self: StepEvictions) -> StepPlan:
        before = dict(self._manager.nitro_enough)
        plan = commit(self)
        self._manager.nitro_enough.update({name: before[name] for name in self._names if name in before})
        return plan

    patch.setattr(StepEvictions, "commit", forgetful)


ALL: tuple[Plant, ...] = (
    lose_a_plan,
    remember_the_preempted,
    overwrite_shared_blocks,
    free_before_the_batch_is_planned,
    free_before_the_plan_is_applied,
    ship_a_stale_epoch,
    alias_a_destination,
    give_a_destination_away,
    remember_what_was_enough,
)
