"""Ledger, plans and vLLM's pool under Hypothesis, beside dicts that know only what the engine's steps said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.output import SchedulerOutput

import nitro
from nitro.integration.vllm.work import PLAN

from . import faults
from .lives import MIXED, prompt
from .simulation import BLOCK, Simulation

NULL = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests live on a simulated engine, whose shadow cache checks each read.

    The model: each request's block table, its tokens, what it lost and how often, put together from the steps' outputs
    alone. Between any two calls, the pool and the ledger must be what the tables say.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.evicted: Counter[str] = Counter()
        self.epochs: Counter[str] = Counter()
        self.due: list[str] = []  # evicted from in the last step
        self.stuck = False  # within a step, whose failure is to be reported, and not what follows from it

    @initialize(lag=st.sampled_from([0, 1]), num_blocks=st.integers(13, 30), seed=st.integers(0, 2**16))
    def start(self, lag: int, num_blocks: int, seed: int) -> None:
        self.config.scheduler_config.async_scheduling = lag > 0
        self.num_blocks = num_blocks
        self.sim = Simulation(self.config, num_blocks, seed=seed, lag=lag)
        self.scheduler: Any = self.sim.scheduler

    @precondition(lambda self: len(self.scheduler.requests) < 14)
    @rule(
        shared=st.sampled_from([0, 16, 32, 48]),
        prefix=st.integers(0, 1),
        own=st.integers(1, 70),
        text=st.integers(2, 9),
        answer=st.integers(1, 60),
        asked=st.sampled_from(MIXED),
    )
    def arrive(self, shared: int, prefix: int, own: int, text: int, answer: int, asked: object) -> None:
        self.sim.add([*prompt(shared, prefix), *prompt(own, text)], answer, asked)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.stop(data.draw(st.sampled_from(sorted(self.scheduler.requests))))

    @precondition(lambda self: any(name in self.scheduler.requests for name in self.due))
    @rule()
    def abort_what_was_just_evicted(self) -> None:
        for name in self.due:
            if name in self.scheduler.requests:
                self.stop(name)

    @precondition(lambda self: len(self.scheduler.requests) > 4)
    @rule(data=st.data())
    def abort_many(self, data: st.DataObject) -> None:
        for name in data.draw(st.sets(st.sampled_from(sorted(self.scheduler.requests)), min_size=3)):
            self.stop(name)

    @precondition(lambda self: self.scheduler.running and not self.sim.in_flight)
    @rule()
    def preempt_all(self) -> None:
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        for name in list(self.tables):
            self.forget(name)

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_requests():
                self.one_step(self.follow)

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(data=st.data())
    def step_while_aborting(self, data: st.DataObject) -> None:
        """A request is aborted when its step is scheduled, and the worker has not begun."""

        def during(output: SchedulerOutput) -> None:
            self.follow(output)
            names = sorted(name for name in output.num_scheduled_tokens if name in self.scheduler.requests)
            if names:
                self.stop(data.draw(st.sampled_from(names)))

        self.one_step(during)

    def one_step(self, during: Callable[[SchedulerOutput], None]) -> None:
        self.stuck = True
        self.sim.step(during)
        self.stuck = False
        for name in self.tables.keys() - self.scheduler.requests.keys():
            self.forget(name)

    def follow(self, output: SchedulerOutput) -> None:
        """Book what a step says."""
        for name in output.preempted_req_ids or ():
            self.forget(name)
        plan = getattr(output, PLAN, None)
        self.due = list(plan.request_ids) if plan else []
        for e in plan.evictions() if plan else ():
            name, table = e.request_id, self.tables[e.request_id]
            assert (e.epoch, e.logical_len) == (self.epochs[name], self.computed[name])
            assert e.physical_len == e.logical_len - self.evicted[name]
            assert e.src_blocks.tolist() == table[: len(e.src_blocks)]
            assert len(e.dst_blocks) == -(-e.keep // BLOCK)
            self.tables[name] = e.dst_blocks.tolist()
            self.evicted[name] += e.physical_len - e.keep
            self.epochs[name] += 1
        cached = output.scheduled_cached_reqs
        for data in output.scheduled_new_reqs:
            self.tables[data.req_id] = list(data.block_ids[0])
            self.computed[data.req_id] = data.num_computed_tokens
        for name, new, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            resumed = name in cached.resumed_req_ids
            self.tables[name] = [*([] if resumed else self.tables[name]), *(new[0] if new else ())]
            self.computed[name] = computed
        for name, count in output.num_scheduled_tokens.items():
            self.computed[name] += count

    def stop(self, name: str) -> None:
        self.sim.abort(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        for known in (self.tables, self.computed, self.evicted, self.epochs):
            known.pop(name, None)

    @invariant()
    def the_pool_is_what_the_tables_say(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        references = Counter(block for table in self.tables.values() for block in table)
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert {
            block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null
        } == references
        assert sorted([*free, *references, NULL]) == list(range(self.num_blocks)), "free + live + null, each once"

    @invariant()
    def the_ledger_is_what_the_tables_say(self) -> None:
        collector = self.scheduler.nitro.collector
        held = Counter(block for table in self.tables.values() for block in table)
        for name, table in self.tables.items():
            assert (collector.evicted(name), collector.epoch(name)) == (self.evicted[name], self.epochs[name])
            assert collector.owned(name).tolist() == (table if self.epochs[name] else [])
            assert not self.epochs[name] or all(held[block] == 1 for block in table), "evicted, and still shared"
            assert self.computed[name] - self.evicted[name] <= len(table) * BLOCK
        assert len(collector) == sum(epoch > 0 for epoch in self.epochs.values())
        self.sim.check()

    def teardown(self) -> None:
        if not self.stuck:
            self.sim.drain()


@pytest.fixture
def machine(simulate: Callable[..., Simulation]) -> Callable[[], SchedulerMachine]:
    config = simulate().scheduler.vllm_config
    return lambda: SchedulerMachine(config)


def test_scheduler_ledger_and_pool_agree(machine: Callable[[], SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=max(settings().max_examples, 150)))


@pytest.mark.parametrize("plant", faults.ALL)
def test_planted_faults_are_caught(
    machine: Callable[[], SchedulerMachine], monkeypatch: pytest.MonkeyPatch, plant: faults.Plant
) -> None:
    plant(monkeypatch)
    once = settings(
        max_examples=200, stateful_step_count=50, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, nitro.IntegrityError, KeyError)):
        run_state_machine_as_test(machine, settings=once)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_scheduler_ledger_and_pool_agree_for_long(machine: Callable[[], SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=150))
