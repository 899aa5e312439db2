"""Long random lives of requests on vLLM's real scheduler and pool (simulation.py), and faults that they must reveal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

import nitro
from nitro.collector import Collector
from nitro.integration.vllm.evictions import StepEvictions
from nitro.integration.vllm.manager import NitroFullAttentionManager
from nitro.integration.vllm.scheduler import PLAN, SchedulerSide
from nitro.types import Eviction, StepPlan

from .lives import MIXED, WILD, Happened, mingle
from .simulation import Simulation

Make = Callable[..., Simulation]


def live(sim: Simulation, steps: int) -> Happened:
    """Let requests live until the engine has made so many steps."""
    total = Happened()
    while sim.steps < steps:
        happened = mingle(sim, 500, MIXED, WILD)
        for name in ("aborts", "storms", "in_plan", "ended_in_plan", "resets"):
            setattr(total, name, getattr(total, name) + getattr(happened, name))
    return total


def check_lives(sim: Simulation, happened: Happened) -> None:
    """Everything that may happen has happened, in proportion to the steps; what was read was checked on the way."""
    thousands = sim.steps / 1000
    counted = sim.scheduler.nitro.counters  # type: ignore[attr-defined]
    assert counted.evictions == sim.evictions, "plans that were dropped with their request are not counted"
    assert sim.evictions > 100 * thousands
    assert sim.reads > 50_000 * thousands
    assert sim.preemptions > 10 * thousands
    assert sim.hits > 10 * thousands
    assert happened.aborts > 10 * thousands
    assert happened.storms > 2 * thousands
    assert happened.in_plan > thousands
    assert happened.ended_in_plan > thousands
    assert happened.resets > thousands / 2 or sim.lag


@pytest.mark.parametrize(("seed", "lag", "num_blocks"), [(1, 0, 13), (2, 1, 13), (3, 1, 24)])
def test_every_read_finds_the_requests_own_kept_tokens(simulate: Make, seed: int, lag: int, num_blocks: int) -> None:
    sim = simulate(num_blocks=num_blocks, seed=seed, lag=lag)
    check_lives(sim, live(sim, 2_000))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "lag", "num_blocks"), [(11, 0, 13), (12, 1, 13), (13, 1, 24)])
def test_long_lives(simulate: Make, seed: int, lag: int, num_blocks: int) -> None:
    started = time.perf_counter()
    sim = simulate(num_blocks=num_blocks, seed=seed, lag=lag)
    happened = live(sim, 200_000)
    print(
        f"seed {seed}, lag {lag}, {num_blocks} blocks: {sim.steps:,} steps, {sim.reads:,} reads, {sim.evictions:,} "
        f"evictions, {sim.preemptions:,} preemptions, {sim.hits:,} prefix hits, {happened.aborts:,} aborts, "
        f"{happened.storms:,} storms, {happened.in_plan:,} aborts and {happened.ended_in_plan:,} ends in the step of a "
        f"plan, {happened.resets:,} resets, {time.perf_counter() - started:.0f} s"
    )
    check_lives(sim, happened)


def test_the_same_seed_lives_the_same_life(simulate: Make) -> None:
    def figures(seed: int) -> tuple[int, ...]:
        sim = simulate(num_blocks=13, seed=seed, lag=1)
        live(sim, 300)
        return sim.steps, sim.reads, sim.evictions, sim.preemptions, sim.hits

    assert figures(5) == figures(5) != figures(6)


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


# Where reads alone must notice, neither the ledger nor the pool is looked at in between.
@pytest.mark.parametrize("watched", [True, False], ids=["ledger and reads", "reads alone"])
@pytest.mark.parametrize(
    "plant",
    [
        lose_a_plan,
        remember_the_preempted,
        overwrite_shared_blocks,
        free_before_the_batch_is_planned,
        free_before_the_plan_is_applied,
        ship_a_stale_epoch,
        alias_a_destination,
        give_a_destination_away,
    ],
)
def test_planted_faults_are_caught(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, plant: Plant, watched: bool
) -> None:
    plant(monkeypatch)

    def run() -> None:
        for seed in range(12):
            sim = simulate(num_blocks=18, seed=seed, lag=1, chunk=128)
            sim.watched = watched
            mingle(sim, 300)

    # A read may notice first, or the ledger, or vLLM's own pool.
    with pytest.raises((AssertionError, nitro.IntegrityError, KeyError)):
        run()
