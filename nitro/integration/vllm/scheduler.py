"""vLLM's schedulers with eviction: how many tokens stay is decided here, and the freed blocks are free at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
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
from nitro.errors import IntegrityError, UnsupportedError
from nitro.integration.vllm import compat, stats
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.early import NitroKVCacheManager
from nitro.integration.vllm.manager import NitroFullAttentionManager
from nitro.integration.vllm.request_rules import RequestRules
from nitro.types import Counters, Eviction, StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from nitro.config import Settings
    from nitro.planner import BudgetRule

logger = init_logger("vllm.plugins.nitro")
PLAN = "nitro_plan"


@dataclass(slots=True)
class _Pending:
    """An eviction whose destination is fixed but whose blocks are not freed yet."""

    request: Request
    blocks: list[KVCacheBlock]
    block_ids: np.ndarray[Any, np.dtype[np.int32]]
    destination: np.ndarray[Any, np.dtype[np.int32]]
    physical: int
    keep: int


class SchedulerSide:
    """The part of a scheduler that is Nitro's: the budget rules, the block ledger, and the plans of a step."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        """Take over the block manager of a stock scheduler.

        Raises:
            UnsupportedError: the model's KV cache is not one group of full attention.
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

        NitroFullAttentionManager.adopt(self.manager, self.collector, peak)
        NitroKVCacheManager.adopt(scheduler.kv_cache_manager, self.manager)
        self.calendar = DueCalendar()
        self.growing: dict[str, None] = {}  # running requests that may get several tokens in a step
        self.counters = Counters()
        self.reported = Counters()
        self._net_freed = 0
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

    def _rule(self, request: Request) -> BudgetRule:
        return self.rules.of(request)

    def plan(self, requests: Mapping[str, Request]) -> list[Eviction]:
        """Evict from every running request that is due, and free what it gives up.

        All destinations are fixed before the first block is freed: a freed block is the first to be reused, so that
        otherwise one request's destination could be another one's source within the same step.

        Args:
            requests: vLLM's, by id; those that cannot be due yet are not looked at.
        """
        free = self.pool.get_num_free_blocks()
        pending: list[_Pending] = []
        for name in dict.fromkeys([*self.calendar.begin_step(), *self.growing]):
            request = requests.get(name)
            if request is None or request.status != RequestStatus.RUNNING:
                self.growing.pop(name, None)  # it is noticed again when it is scheduled again
            elif (found := self._prepare(request)) is not None:
                pending.append(found)
            else:
                self._file(request)
        evictions: list[Eviction] = []
        freed: list[KVCacheBlock] = []
        for item in pending:
            evictions.append(self._commit(item, freed))
            self._file(item.request)
        if freed:
            self.pool.free_blocks(freed)
        self._net_freed += self.pool.get_num_free_blocks() - free
        return evictions

    def notice(self, output: SchedulerOutput) -> None:
        """Forget requests that finished, and look at those that begin to run, or to run again, in the next step."""
        for name in output.finished_req_ids:
            self.calendar.drop(name)
            self.growing.pop(name, None)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in (*(data.req_id for data in output.scheduled_new_reqs), *resumed):
            self.calendar.drop(name)
            self.growing[name] = None

    def _file(self, request: Request) -> None:
        """Decide when to look at a request again."""
        name, computed = request.request_id, request.num_computed_tokens
        if request.num_tokens - computed > 1:  # more than one token may come in a step
            self.growing[name] = None
            return
        self.growing.pop(name, None)
        rule = self._rule(request)
        if not rule.never:
            physical = computed - self.collector.evicted(name)
            self.calendar.file(name, rule.gap(computed, physical, request.num_prompt_tokens))

    def _prepare(self, request: Request) -> _Pending | None:
        name, computed = request.request_id, request.num_computed_tokens
        evicted = self.collector.evicted(name)
        physical = computed - evicted
        keep = self._rule(request).target(computed, physical, request.num_prompt_tokens)
        if keep is None:
            return None
        blocks = self.manager.req_to_blocks[name]
        if evicted:
            # All its blocks are its own since the first eviction, and in the ledger: survivors stay where they are.
            ids = self.collector.owned(name)
            if len(ids) != len(blocks) or ids[0] != blocks[0].block_id or ids[-1] != blocks[-1].block_id:
                raise IntegrityError(
                    f"request {name!r} has {len(blocks)} blocks, {blocks[0].block_id} to {blocks[-1].block_id}; the "
                    f"ledger says {len(ids)}, {ids[0]} to {ids[-1]}. This is a bug in Nitro: please report it"
                )
            return _Pending(request, blocks, ids, ids[: cdiv(keep, self.manager.block_size)], physical, keep)
        ids = np.fromiter((block.block_id for block in blocks), np.int32, len(blocks))
        reusable = np.fromiter((b.ref_cnt == 1 and b.block_hash is None for b in blocks), np.uint8, len(blocks))
        destination = self.collector.plan(name, ids, reusable, physical, keep)
        missing = np.flatnonzero(destination < 0)
        short = int(missing.size) - self.pool.get_num_free_blocks()
        if short > 0:
            # No room for copies: take as many of the request's own cached blocks as needed out of the prefix cache
            # and reuse them, the last first, since others are more likely to hit the beginning.
            own = [i for i in missing[::-1] if blocks[i].ref_cnt == 1][:short]
            if len(own) < short:
                return None  # the rest is shared with other requests; try again in the next step
            self.pool.evict_blocks({blocks[i].block_id for i in own})
            destination[own] = ids[own]
            missing = np.flatnonzero(destination < 0)
        fresh = self.pool.get_new_blocks(int(missing.size)) if missing.size else []
        for index, block in zip(missing, fresh, strict=True):
            destination[index] = block.block_id
        return _Pending(request, blocks, ids, destination, physical, keep)

    def _commit(self, item: _Pending, freed: list[KVCacheBlock]) -> Eviction:
        """Book an eviction and cut the request's block table; adds the blocks that it gives up to ``freed``."""
        request_id, computed = item.request.request_id, item.request.num_computed_tokens
        epoch = self.collector.epoch(request_id)
        given_up = self.collector.commit(request_id, item.block_ids, item.destination, item.physical, item.keep)
        if epoch:  # in place
            freed += item.blocks[: len(item.destination) - 1 : -1]
            del item.blocks[len(item.destination) :]
        else:
            table = self.pool.blocks
            item.blocks[:] = [table[i] for i in item.destination]
            freed += [table[i] for i in given_up]
        return Eviction(
            request_id=request_id,
            epoch=epoch,
            logical_len=computed,
            physical_len=item.physical,
            keep=item.keep,
            protect=self._rule(item.request).protect(computed, item.request.num_prompt_tokens),
            dst_blocks=item.destination,
            src_blocks=item.block_ids[: cdiv(item.physical, self.manager.block_size)],
        )

    def attach(self, evictions: list[Eviction], output: SchedulerOutput) -> None:
        """Ship the plans with the step, except those of requests that were preempted while it was scheduled."""
        alive = tuple(e for e in evictions if self.collector.epoch(e.request_id) == e.epoch + 1)
        if alive:
            setattr(output, PLAN, StepPlan(alive))
        self.counters = Counters(
            evictions=self.counters.evictions + len(alive),
            tokens_evicted=self.counters.tokens_evicted + sum(e.physical_len - e.keep for e in alive),
            # Survivors of a shared prefix take fresh blocks while the shared ones stay with the others, so a step may
            # cost more than it frees; a counter must not fall.
            blocks_freed=max(self.counters.blocks_freed, self._net_freed),
        )

    def report(self, scheduler_stats: SchedulerStats) -> None:
        """Add what happened since the last report to the statistics that go to vLLM's front-end."""
        stats.put(scheduler_stats, self.reported, self.counters)
        self.reported = self.counters


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
        evictions = [] if paused else self.nitro.plan(self.requests)
        output = super().schedule(*args, **kwargs)
        self.nitro.notice(output)
        if evictions:
            self.nitro.attach(evictions, output)
        return output

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with Nitro's counters in them."""
        found = super().make_stats(*args, **kwargs)
        if found is not None:
            self.nitro.report(found)
        return found


class NitroScheduler(_NitroSchedulerMixin, Scheduler):
    """vLLM's scheduler with eviction."""


class NitroAsyncScheduler(_NitroSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with eviction."""
