"""vLLM's schedulers with eviction: how many tokens stay is decided here, and the freed blocks are free at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

import nitro
from nitro.collector import Collector
from nitro.due import DueCalendar
from nitro.errors import UnsupportedError
from nitro.integration.vllm import compat
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.admission import Admission
from nitro.integration.vllm.asks import PATIENCE, Asks
from nitro.integration.vllm.early import NitroKVCacheManager
from nitro.integration.vllm.evictions import StepEvictions
from nitro.integration.vllm.manager import NitroFullAttentionManager
from nitro.integration.vllm.reporter import Reporter
from nitro.integration.vllm.request_rules import RequestRules
from nitro.integration.vllm.slots import SlotWatch
from nitro.integration.vllm.work import ASKS, PLAN
from nitro.planner import ThresholdRule
from nitro.types import Counters, StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from nitro.config import Settings
    from nitro.integration.vllm.asks import Answer
    from nitro.planner import BudgetRule, Rule

logger = init_logger("vllm.plugins.nitro")


class SchedulerSide:
    """The part of a scheduler that is Nitro's: the budget rules, the block ledger, and the plans of a step."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        """Take over the block manager of a stock scheduler.

        Raises:
            UnsupportedError: the model's KV cache is not one group of full attention.
            BridgeError: there is a threshold, but no shared memory.
        """
        self.rules = RequestRules(settings)
        self.manager = _only_manager(scheduler)
        self.pool: BlockPool = scheduler.kv_cache_manager.block_pool
        self.collector = Collector(
            num_blocks=self.pool.num_gpu_blocks,
            block_size=self.manager.block_size,
            null_block=self.pool.null_block.block_id,
        )
        chunk = scheduler.max_num_scheduled_tokens

        def peak(request_id: str, tokens: int) -> int:
            return self._rule(scheduler.requests[request_id]).peak(tokens, chunk)

        self.growing: dict[str, None] = {}  # running requests that may get several tokens in a step
        self.admission = Admission(scheduler, self.manager, self.collector, peak, self.growing)
        NitroFullAttentionManager.adopt(self.manager, self.collector, peak, self.admission)
        NitroKVCacheManager.adopt(scheduler.kv_cache_manager, self.manager)
        self.asks = None if settings.threshold is None else Asks(settings.threshold, self.manager.block_size)
        self.calendar = DueCalendar()
        self.reporter = Reporter(SlotWatch(self.manager, self.collector, self.rules), self.asks)
        self.counters = Counters()
        self._net_freed = 0
        self._releases = 0  # of the ledger, when this step's evictions were made
        logger.info(
            "Nitro %s is active on vLLM %s: %s; %d blocks of %d tokens",
            nitro.__version__,
            compat.vllm_version(),
            ", ".join(f"{key}={value}" for key, value in settings.to_dict().items()),
            self.pool.num_gpu_blocks - 1,
            self.manager.block_size,
        )
        budget, size = settings.budget, self.manager.block_size
        if budget is not None and cdiv(budget, size) == cdiv(budget + settings.slack, size):
            logger.info(
                "budget=%d plus slack=%d ends in the same block of %d tokens as the budget alone: evictions keep a "
                "request from growing, but free blocks only at the end of its prefill",
                budget,
                settings.slack,
                size,
            )

    def plan(self, requests: Mapping[str, Request]) -> StepPlan | None:
        """Evict from every running request that is due, and free what it gives up; return None if none was.

        Args:
            requests: vLLM's, by id; those that cannot be due yet are not looked at.
        """
        free = self.pool.get_num_free_blocks()
        self.admission.begin_step()
        step = StepEvictions(self.manager, self.pool, self.collector)
        up = dict.fromkeys([*self.calendar.begin_step(), *self.growing])
        due = self._answered(requests, step, up)
        for name in up:
            request = requests.get(name)
            if request is None or request.status != RequestStatus.RUNNING:
                self.growing.pop(name, None)  # it is noticed again when it is scheduled again
            elif self._look(request, step):
                due.append((request, 0))
        if not due:
            return None
        plan = step.commit()
        for request, unjudged in due:
            self._file_again(request, unjudged)
        self._releases = self.collector.releases
        self._net_freed += self.pool.get_num_free_blocks() - free
        self._count(len(step), step.tokens)
        return plan

    def _answered(
        self, requests: Mapping[str, Request], step: StepEvictions, up: dict[str, None]
    ) -> list[tuple[Request, int]]:
        """Add what workers' answers lead to; take all requests that were answered out of ``up``.

        Returns:
            The requests that are evicted, each with its tokens that came too late for the answer.
        """
        due = []
        for answer in self.asks.begin_step() if self.asks is not None else ():
            request = requests.get(answer.request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            up.pop(answer.request_id, None)
            rule, since = self._rule(request), request.num_computed_tokens - answer.logical_len
            if isinstance(rule, ThresholdRule) and self._use(answer, request, rule, step):
                due.append((request, since))
            else:
                self._file_again(request, since)
        return due

    def _use(self, answer: Answer, request: Request, rule: ThresholdRule, step: StepEvictions) -> bool:
        """Add the eviction that an answer asks for, if it frees a block; return whether it was added."""
        name, computed, prompt = request.request_id, request.num_computed_tokens, request.num_prompt_tokens
        physical = computed - self.collector.evicted(name)
        # If the bounds have led to an eviction since, it took those with the lowest scores: the answer still holds.
        keep = rule.answered(answer.keep, computed - answer.logical_len, computed, prompt)
        size = self.manager.block_size
        worth_it = cdiv(keep, size) < cdiv(physical, size) or rule.target(computed, physical, prompt) is not None
        return worth_it and step.add(name, computed, physical, keep, rule.protect(computed, prompt))

    def _rule(self, request: Request) -> Rule:
        """Return the rule that a request is under."""
        return self.rules.of(request)

    def _look(self, request: Request, step: StepEvictions) -> bool:
        """Add a request's eviction to the step if it is due and can be made; otherwise file it, and return False."""
        name, computed, prompt = request.request_id, request.num_computed_tokens, request.num_prompt_tokens
        physical = computed - self.collector.evicted(name)
        rule = self._rule(request)
        keep = rule.target(computed, physical, prompt)
        if keep is not None and isinstance(rule, ThresholdRule) and self._asks_first(request):
            keep = None
        if keep is not None and step.add(name, computed, physical, keep, rule.protect(computed, prompt)):
            return True
        gap = None if rule.never else rule.gap(computed, physical, prompt)
        if isinstance(rule, ThresholdRule) and gap is not None and gap <= 0:
            gap = self._question(request, rule, computed, physical)
        self._file(request, gap)
        if not isinstance(rule, ThresholdRule) and not rule.never:
            self._expect(request, rule, physical)
        return False

    def _expect(self, request: Request, rule: BudgetRule, physical: int) -> None:
        """Foresee a request that was just filed, unless it may get several tokens in a step."""
        if request.request_id not in self.growing:
            self.admission.expect(request, rule, physical)

    def _question(self, request: Request, rule: ThresholdRule, computed: int, physical: int) -> int:
        """Ask about a request if that is due; return how many tokens later it is to be looked at again."""
        assert self.asks is not None, "there is a threshold, so there are questions"
        name = request.request_id
        room = rule.room(computed, physical, request.num_prompt_tokens)
        gap = PATIENCE  # an answer comes up by itself
        if not self.asks.waits(name):
            before = self.asks.asked_at(name)  # None if that question was just given up as lost
            left = 0 if before is None else rule.left(room, computed - before)
            if left > 0:
                gap = left
            elif (later := self.asks.later()) > 0:
                gap = later
            else:
                self._ask(request, rule, computed, physical)
        return gap if room is None else max(min(gap, room), 1)

    def _asks_first(self, request: Request) -> bool:
        """Return whether the bounds wait for a step, so that a worker is asked about what they would evict.

        Only while it decodes: what a prompt may hold at once has been promised to vLLM.
        """
        decodes = request.num_tokens - request.num_computed_tokens <= 1
        return decodes and self.asks is not None and not self.asks.waits(request.request_id)

    def _ask(self, request: Request, rule: ThresholdRule, computed: int, physical: int) -> None:
        """Ask a worker how many tokens a request shall keep."""
        assert self.asks is not None
        name = request.request_id
        blocks = self.manager.req_to_blocks[name][: cdiv(physical, self.manager.block_size)]
        protect = rule.protect(computed, request.num_prompt_tokens)
        ids = [block.block_id for block in blocks]
        self.asks.ask(name, self.collector.epoch(name), computed, physical, protect, ids)

    def notice(self, output: SchedulerOutput) -> None:
        """Book what the step has given out, and see who finished, and who begins to run, or to run again.

        Requests that begin are looked at in the next step.
        """
        self.manager.nitro_book()
        for name in output.finished_req_ids:
            self.calendar.drop(name)
            self.growing.pop(name, None)
        if self.asks is not None:
            for name in output.finished_req_ids:
                self.asks.finished(name)
            for name in output.preempted_req_ids or ():
                self.asks.preempted(name)
            if (asks := self.asks.take()) is not None:
                setattr(output, ASKS, asks)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in (*(data.req_id for data in output.scheduled_new_reqs), *resumed):
            self.calendar.drop(name)
            self.growing[name] = None

    def _file_again(self, request: Request, unjudged: int) -> None:
        """File a request that was just evicted, or of which it was just decided that it is not.

        Args:
            request: the request.
            unjudged: tokens that came too late for the answer that this follows.
        """
        rule, name, computed = self._rule(request), request.request_id, request.num_computed_tokens
        physical = computed - self.collector.evicted(name)
        if not isinstance(rule, ThresholdRule):
            self._file(request, rule.slack)  # which is what it may grow by after an eviction
            self._expect(request, rule, physical)
            return
        self._file(request, rule.pause(computed, physical, request.num_prompt_tokens, unjudged=unjudged))

    def _file(self, request: Request, gap: int | None) -> None:
        """Decide when to look at a request again: not before it has grown by ``gap`` tokens; None: not at all."""
        name = request.request_id
        if request.num_tokens - request.num_computed_tokens > 1:  # more than one token may come in a step
            self.growing[name] = None
            return
        self.growing.pop(name, None)
        if gap is not None:
            self.calendar.file(name, gap)

    def attach(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Ship the plan with the step, except for requests that were preempted while it was scheduled."""
        if self.collector.releases != self._releases:
            evictions = plan.evictions()
            alive = [e for e in evictions if self.collector.epoch(e.request_id) == e.epoch + 1]
            dropped = [e for e in evictions if e not in alive]
            self._count(-len(dropped), -sum(e.physical_len - e.keep for e in dropped))
            if not alive:
                return
            plan = StepPlan.of(alive, plan.block_size)
        setattr(output, PLAN, plan)

    def _count(self, evictions: int, tokens: int) -> None:
        self.counters = Counters(
            evictions=self.counters.evictions + evictions,
            tokens_evicted=self.counters.tokens_evicted + tokens,
            # Survivors of a shared prefix take fresh blocks while the shared ones stay with the others, so a step may
            # cost more than it frees; a counter must not fall.
            blocks_freed=max(self.counters.blocks_freed, self._net_freed),
        )

    def report(self, scheduler_stats: SchedulerStats, running: Sequence[Request]) -> None:
        """Add what happened since the last report to what goes to vLLM's front-end."""
        self.reporter.put(scheduler_stats, self.counters, running)


def _only_manager(scheduler: Scheduler) -> FullAttentionManager:
    groups = scheduler.kv_cache_config.kv_cache_groups
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        raise UnsupportedError(
            f"Nitro evicts from one KV cache group of full attention, this model has: {kinds}; serve it without Nitro"
        )
    spec = groups[0].kv_cache_spec
    windowed = isinstance(spec, FullAttentionSpec) and (spec.sliding_window or spec.attention_chunk_size)
    if type(spec) is not FullAttentionSpec or windowed:
        raise UnsupportedError(
            f"Nitro cannot evict from a KV cache of {spec}: it needs plain full attention in all layers; serve this "
            "model without Nitro"
        )
    return managers[0]


class _NitroSchedulerMixin(Scheduler):
    """Evicts before a step is scheduled, so that the step itself can use the freed blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = settings_in(self.vllm_config.additional_config)
        assert settings is not None, "Nitro's scheduler is only installed together with its settings"
        self.nitro = SchedulerSide(self, settings)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan this step's evictions, schedule the step, and attach the plans to it."""
        paused = self.pause_state == PauseState.PAUSED_ALL
        began = time.perf_counter_ns()
        plan = None if paused else self.nitro.plan(self.requests)
        planned = time.perf_counter_ns()
        output = super().schedule(*args, **kwargs)
        resumed = time.perf_counter_ns()
        self.nitro.notice(output)
        if plan is not None:
            self.nitro.attach(plan, output)
        self.nitro.reporter.planned(planned - began + time.perf_counter_ns() - resumed)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take what the worker says of its own work before vLLM makes its statistics of the step."""
        self.nitro.reporter.heard(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with Nitro's counters in them."""
        found = super().make_stats(*args, **kwargs)
        if found is not None:
            self.nitro.report(found, self.running)
        return found

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Shut vLLM's scheduler down, and give up what Nitro has in shared memory.

        An engine process that was forked ends without the interpreter's own clean-up.
        """
        super().shutdown(*args, **kwargs)
        if self.nitro.asks is not None:
            self.nitro.asks.close()


class NitroScheduler(_NitroSchedulerMixin, Scheduler):
    """vLLM's scheduler with eviction."""


class NitroAsyncScheduler(_NitroSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with eviction."""
