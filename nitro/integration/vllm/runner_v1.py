"""vLLM's V1 model runner (CPU, and GPU where the V2 runner is off) with eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nitro.compactor import Compactor
from nitro.errors import IntegrityError
from nitro.integration.vllm import work
from nitro.integration.vllm.answers import Answers
from nitro.integration.vllm.caches import take_over
from nitro.kernels.paged import to_device
from nitro.types import StepAsks, StepPlan
from nitro.work_clock import WorkClock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NitroRunnerMixin(GPUModelRunner):
    """Compacts before a step reads the cache, and shows attention the slots that are held instead of all tokens."""

    nitro: Compactor
    nitro_answers: Answers | None
    nitro_clock: WorkClock

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches, then take them over."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling") or (args and args[0] is True):
            return
        self.nitro, self.nitro_answers = take_over(self)
        self.nitro_clock = WorkClock(self.device)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        finished = scheduler_output.finished_req_ids
        resumed = set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        # A new request with a known id is the next part of a streamed input, and keeps its cache, unless it is reborn.
        new = {
            data.req_id
            for data in scheduler_output.scheduled_new_reqs
            if data.req_id in finished or data.req_id not in self.requests
        }
        for request_id in finished | resumed | new | (scheduler_output.preempted_req_ids or set()):
            self.nitro.forget(request_id)
        # Before vLLM appends this step's new blocks, and before it zeroes or copies any block: a block that a plan
        # frees may already belong to somebody else in this very step.
        work.do(self, scheduler_output)
        result = super()._update_states(scheduler_output)
        for request_id in resumed | new:
            self.nitro.begin_run(request_id, self.requests[request_id].num_tokens)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and tell the scheduler what Nitro's part of the step has taken."""
        return work.told(super().sample_tokens(*args, **kwargs), self.nitro_clock, self.nitro_answers)

    def _nitro_answer(self, asks: StepAsks | None) -> None:
        if self.nitro_answers is not None:
            self.nitro_answers.step(asks)

    def _nitro_apply(self, plan: StepPlan) -> None:
        tables: list[list[int]] = [self.requests[request_id].block_ids[0] for request_id in plan.request_ids]
        self._nitro_check(plan, tables)
        self.nitro.apply(plan)
        counts = plan.num_dst().tolist()
        for block_ids, count in zip(tables, counts, strict=True):
            del block_ids[count:]
        requests, columns = (where.tolist() for where in plan.moved_cells())
        for request, column, block in zip(requests, columns, plan.moved[1].tolist(), strict=True):
            tables[request][column] = block
        rows = self.input_batch.req_id_to_index
        shown = self.input_batch.block_table[0]
        for request_id, block_ids in zip(plan.request_ids, tables, strict=True):
            row = rows.get(request_id)
            if row is not None:
                shown.clear_row(row)
                shown.append_row(block_ids, row)

    @staticmethod
    def _nitro_check(plan: StepPlan, tables: list[list[int]]) -> None:
        """Raise IntegrityError if a request has other blocks here than in the plan, as far as their ends tell."""
        last = plan.src_blocks[plan.src_ends() - 1].tolist()
        for request_id, block_ids, count, block in zip(
            plan.request_ids, tables, plan.num_src().tolist(), last, strict=True
        ):
            if len(block_ids) < count or block_ids[count - 1] != block:
                raise IntegrityError(
                    f"plan for request {request_id!r} has {count} blocks that end with {block}, the worker has "
                    f"{block_ids}. This is a bug in Nitro: please report it"
                )

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        if len(self.nitro):
            self._nitro_shift(num_scheduled_tokens)
        return result

    def _nitro_shift(self, num_scheduled_tokens: np.ndarray[Any, Any]) -> None:
        """Make lengths and slots physical; positions, and what the sampler looks at, stay logical."""
        batch = self.input_batch
        count, tokens = batch.num_reqs, int(num_scheduled_tokens.sum())
        evicted = self.nitro.evicted_of(batch.req_ids[:count])
        if not evicted.any():
            return
        self.optimistic_seq_lens_cpu[:count] -= torch.from_numpy(evicted)
        # From pinned memory: a copy from pageable memory would wait until the step before has left the device.
        per_request, per_token = to_device(
            [evicted, np.repeat(evicted, num_scheduled_tokens[:count])], self.seq_lens.device
        )
        self.seq_lens[:count] -= per_request
        physical = self.positions[:tokens] - per_token
        batch.block_table.compute_slot_mapping(count, self.query_start_loc.gpu[: count + 1], physical)


class NitroGPUModelRunner(NitroRunnerMixin, GPUModelRunner):
    """vLLM's V1 GPU model runner with eviction."""
