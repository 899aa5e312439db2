"""vLLM's V2 model runner (its default on GPUs) with eviction.

Block tables, lengths and positions live on the GPU there, some of them at addresses that captured graphs read. So a row
of the block table is cut by its length, lengths are made physical in place, and what the sampler looks at is put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nitro.compactor import Compactor
from nitro.integration.vllm import work
from nitro.integration.vllm.answers import Answers
from nitro.integration.vllm.caches import take_over
from nitro.kernels.paged import to_device
from nitro.kernels.shift import shift_to_slots
from nitro.types import IntArray, StepAsks, StepPlan
from nitro.work_clock import WorkClock

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch


class NitroV2ModelRunner(GPUModelRunner):
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
        # Evicted tokens of each row of vLLM's request table; and of the last step's requests, here and on the device.
        self._nitro_evicted: IntArray = np.zeros(self.max_num_reqs, np.int32)
        self._nitro_lost: IntArray = np.zeros(0, np.int32)
        self._nitro_lost_there = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._nitro_physical = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=self.device)
        self._nitro_logical = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)
        self._nitro_shifted: InputBatch | None = None

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Forget what was evicted from requests that finished or were preempted."""
        super().finish_requests(scheduler_output)
        for request_id in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
            self.nitro.forget(request_id)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Begin with whole caches, except for the next parts of streamed inputs, which keep theirs."""
        known = self.req_states.req_id_to_index
        continued = {data.req_id for data in scheduler_output.scheduled_new_reqs if data.req_id in known}
        super().add_requests(scheduler_output)
        for data in scheduler_output.scheduled_new_reqs:
            request_id = data.req_id
            if request_id not in continued:
                self.nitro.forget(request_id)
                self.nitro.begin_run(request_id, len(data.prefill_token_ids))
            self._nitro_evicted[self.req_states.req_id_to_index[request_id]] = self.nitro.evicted(request_id)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Compact before vLLM appends this step's new blocks, and before it zeroes or copies any."""
        # A block that a plan frees may already belong to somebody else in this very step.
        work.do(self, scheduler_output)
        super().update_requests(scheduler_output)

    def _nitro_answer(self, asks: StepAsks | None) -> None:
        if self.nitro_answers is not None:
            self.nitro_answers.step(asks)

    def _nitro_apply(self, plan: StepPlan) -> None:
        self.nitro.apply(plan)
        index = self.req_states.req_id_to_index
        rows = np.fromiter([index[request_id] for request_id in plan.request_ids], np.int64, len(plan))
        # A row on the device still has all blocks, the first of which stay: this cuts it, and new ones follow.
        self.block_tables.num_blocks.np[0][rows] = plan.num_dst()
        self._nitro_evicted[rows] = plan.logical_len - plan.keep
        if plan.moved.size:
            # Directly, not staged: a second round of staged writes in a step would overwrite what the step in flight
            # may still read.
            requests, columns = plan.moved_cells()
            cells = to_device([rows[requests], columns, plan.moved[1]], self.device)
            self.block_tables.block_tables[0].gpu[cells[0], cells[1]] = cells[2]

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """Make lengths and slots physical; positions, and what the sampler looks at, stay logical."""
        lost = self._nitro_evicted[input_batch.idx_mapping_np]
        if not lost.any():
            return super().prepare_attn(input_batch)
        if not np.array_equal(lost, self._nitro_lost):  # else it is on the device since the last step
            self._nitro_lost, (self._nitro_lost_there,) = lost, to_device([lost], self.device)
        logical = input_batch.positions
        shift_to_slots(
            self._nitro_lost_there,
            input_batch.query_start_loc,
            logical,
            self.input_buffers.seq_lens,
            self._nitro_physical,
            self._nitro_logical,
        )
        input_batch.seq_lens_cpu_upper_bound[: len(lost)] -= torch.from_numpy(lost)
        self._nitro_shifted = input_batch
        input_batch.positions = self._nitro_physical[: logical.shape[0]]
        try:
            return super().prepare_attn(input_batch)
        finally:
            input_batch.positions = logical

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample with logical lengths: with physical ones, a request would pass for a prefill that goes on."""
        state, batch = self.execute_model_state, self._nitro_shifted
        if state is not None and batch is not None and state.input_batch is batch:
            batch.seq_lens = self._nitro_logical[: batch.num_reqs_after_padding]
        self._nitro_shifted = None
        return work.told(super().sample_tokens(*args, **kwargs), self.nitro_clock, self.nitro_answers)
