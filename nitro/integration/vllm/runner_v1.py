"""vLLM's V1 model runner (CPU, and GPU where the V2 runner is off) with eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nitro.compactor import Compactor, Planned
from nitro.integration.vllm.caches import stable_id, take_over
from nitro.integration.vllm.scheduler import PLAN
from nitro.kernels.paged import to_device
from nitro.types import StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NitroRunnerMixin(GPUModelRunner):
    """Compacts before a step reads the cache, and shows attention the slots that are held instead of all tokens."""

    nitro: Compactor

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches, then take them over."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling") or (args and args[0] is True):
            return
        self.nitro = take_over(self)
        self.nitro_run_starts: dict[str, list[int]] = {}

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
        plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
        if plan is not None:
            self._nitro_apply(plan)
        result = super()._update_states(scheduler_output)
        if self.nitro.records is not None:
            for request_id in resumed | new:
                starts = self.nitro_run_starts.setdefault(request_id, [])
                starts.append(self.requests[request_id].num_tokens)
        return result

    def _nitro_apply(self, plan: StepPlan) -> None:
        planned = []
        for eviction in plan.evictions:
            request_id = eviction.request_id
            run = max(len(self.nitro_run_starts.get(request_id, ())) - 1, 0)
            planned.append(Planned(eviction, self.requests[request_id].block_ids[0], stable_id(request_id), run))
        self.nitro.apply(planned)
        table = self.input_batch.block_table[0]
        for eviction in plan.evictions:
            block_ids = self.requests[eviction.request_id].block_ids[0]
            block_ids[:] = eviction.dst_blocks.tolist()
            row = self.input_batch.req_id_to_index.get(eviction.request_id)
            if row is not None:
                table.clear_row(row)
                table.append_row(block_ids, row)

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
        evicted = np.fromiter((self.nitro.evicted(r) for r in batch.req_ids[:count]), np.int32, count)
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
