"""vLLM's V1 model runner (CPU, and GPU where the V2 runner is off) with eviction."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nitro import policies
from nitro.compactor import Compactor, Planned
from nitro.dense_compactor import DenseCompactor
from nitro.errors import UnsupportedError
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.kv_layout import BackendCache, probe, side_by_side
from nitro.integration.vllm.scheduler import PLAN
from nitro.kernel_compactor import KernelCompactor, can_score
from nitro.kernels.paged import PagedLayers, to_device
from nitro.planner import BudgetRule
from nitro.types import StepPlan

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from nitro.config import Settings

logger = init_logger("vllm.plugins.nitro")

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def stable_id(request_id: str) -> str:
    """Return a request's id as its user knows it: without the random suffix that vLLM appends to make it unique."""
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION") == "1":
        return request_id
    return _RANDOM_SUFFIX.sub("", request_id)


def local_heads(total: int, rank: int, size: int) -> list[int]:
    """Return the global indices of the KV heads that a tensor-parallel rank holds, replicated ones included."""
    if total >= size:
        each = total // size
        return list(range(rank * each, (rank + 1) * each))
    return [rank * total // size]


def _attention_layers(runner: GPUModelRunner, names: list[str]) -> list[Any]:
    """Return the attention layers in the order of ``names``; refuse those whose cache must not be reordered."""
    context = runner.compilation_config.static_forward_context
    layers = [context[name] for name in names]
    for name, layer in zip(names, layers, strict=True):
        impl = layer.impl
        if getattr(impl, "alibi_slopes", None) is not None:
            raise UnsupportedError(
                f"{name} uses ALiBi, a bias per slot, which is wrong once tokens move; serve it without Nitro"
            )
        window = getattr(impl, "sliding_window", None)
        if window not in (None, -1, (-1, -1)):
            raise UnsupportedError(f"{name} has a sliding window of {window}; serve this model without Nitro")
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise UnsupportedError(f"{name} shares the KV cache of another layer; serve this model without Nitro")
    return layers


def _compactor(
    caches: list[Tensor],
    places: list[tuple[Tensor, Tensor]],
    *,
    layers: list[int],
    heads: list[int],
    settings: Settings,
    longest: int,
) -> Compactor:
    """Return the compactor for these caches: with kernels where they can be used, otherwise in PyTorch.

    Args:
        caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` each.
        places: what ``probe`` found of each.
        layers: their global layer indices.
        heads: global indices of this worker's KV heads.
        settings: Nitro's.
        longest: most slots of a request.
    """
    policy = policies.get(settings.policy, **settings.policy_options)
    bounds = {"sinks": settings.sinks, "window": settings.window, "seed": settings.seed}
    head_dim = caches[0].shape[3] // 2
    usual = all(side_by_side(*place, head_dim) for place in places) and can_score(caches[0].dtype, head_dim)
    if caches[0].device.type == "cuda":
        if usual:
            return KernelCompactor(PagedLayers.of(caches), layers, heads, policy, longest=longest, **bounds)
        logger.warning(
            "Nitro has no kernels for this cache (dtype %s, head dimension %d, or the layout of the attention backend) "
            "and evicts in PyTorch, which waits for the GPU, one request after the other: expect it to be slow, or try "
            "another --attention-backend",
            caches[0].dtype,
            head_dim,
        )
    backend = [BackendCache(kv, *place) for kv, place in zip(caches, places, strict=True)]
    return DenseCompactor(backend, layers, heads, policy, **bounds)


class NitroRunnerMixin(GPUModelRunner):
    """Compacts before a step reads the cache, and shows attention the slots that are held instead of all tokens."""

    nitro: Compactor

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches, then take them over."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling") or (args and args[0] is True):
            return
        settings = settings_in(self.vllm_config.additional_config)
        assert settings is not None, "Nitro's worker is only installed together with its settings"
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedError("Nitro needs a model with one KV cache group; serve this model without Nitro")
        group = self.kv_cache_config.kv_cache_groups[0]
        names = sorted(group.layer_names, key=extract_layer_index)
        caches: list[Tensor] = []
        places = []
        for layer in _attention_layers(self, names):
            kv = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
            if kv.shape[0] != self.kv_cache_config.num_blocks or kv.shape[2] != group.kv_cache_spec.block_size:
                raise UnsupportedError(
                    f"the attention backend splits blocks of {group.kv_cache_spec.block_size} tokens into "
                    f"{kv.shape[2]}; set --block-size {kv.shape[2]}"
                )
            caches.append(kv)
            places.append(probe(layer, kv))
        total = self.model_config.get_total_num_kv_heads()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        rule = BudgetRule.from_settings(settings)
        self.nitro = _compactor(
            caches,
            places,
            layers=[extract_layer_index(name) for name in names],
            heads=local_heads(total, rank, size),
            settings=settings,
            longest=rule.peak(self.max_model_len, self.max_num_tokens),
        )
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


def adopt(runner: GPUModelRunner, stock: type[GPUModelRunner], target: type[NitroRunnerMixin]) -> None:
    """Turn a stock V1 model runner into Nitro's, before it loads a model.

    Raises:
        UnsupportedError: it is not vLLM's own V1 runner for this device.
    """
    if type(runner) is not stock:
        raise UnsupportedError(
            f"model runner {type(runner).__module__}.{type(runner).__name__} is not supported; Nitro needs vLLM's V1 "
            "runner (VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    runner.__class__ = target
