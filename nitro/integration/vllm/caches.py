"""Take over the KV caches of a model runner: which layers there are, how they lie in memory, who compacts them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from nitro import policies
from nitro.compactor import Compactor
from nitro.dense_compactor import DenseCompactor
from nitro.errors import UnsupportedError
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.answers import Answers
from nitro.integration.vllm.fp8 import as_numbers, scales_of
from nitro.integration.vllm.kv_layout import BackendCache, probe, side_by_side
from nitro.integration.vllm.rotary import find_rotations, speaks_of_rope
from nitro.kernel_compactor import KernelCompactor
from nitro.kernels.paged import PagedLayers
from nitro.kernels.score import can_score
from nitro.pooling import POOLING

if TYPE_CHECKING:
    from torch import Tensor

    from nitro.config import Settings
    from nitro.policies.rotary import Rotations

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


def _attention_layers(runner: Any, names: list[str]) -> list[Any]:
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
    usual: int,
    scales: Tensor | None,
    rotations: Rotations,
) -> Compactor:
    """Return the compactor for these caches: with kernels where they can be used, otherwise in PyTorch.

    Args:
        caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` each, as numbers.
        places: what ``probe`` found of each.
        layers: their global layer indices.
        heads: global indices of this worker's KV heads.
        settings: Nitro's.
        longest: most slots of a request.
        usual: slots that most evictions begin with, at most; 0: not known, or no graphs are wanted.
        scales: of FP8 caches, ``[num_layers, 2, num_kv_heads]``.
        rotations: how RoPE rotated the layers' keys.

    Raises:
        UnsupportedError: the caches are FP8, and there are no kernels for them.
    """
    policy = policies.get(settings.policy, **settings.policy_options)
    bounds: dict[str, Any] = {"sinks": settings.sinks, "window": settings.window, "seed": settings.seed}
    bounds |= {"rotations": rotations, "stable_id": stable_id}
    head_dim = caches[0].shape[3] // 2
    known = all(side_by_side(*place, head_dim) for place in places) and can_score(caches[0].dtype, head_dim)
    on_gpu = caches[0].device.type == "cuda"
    if on_gpu and known:
        paged = PagedLayers.of(caches, scales)
        counts = settings.threshold is not None
        return KernelCompactor(paged, layers, heads, policy, longest=longest, usual=usual, counts=counts, **bounds)
    if scales is not None:
        raise UnsupportedError(
            f"Nitro has no kernels for this FP8 cache (on {caches[0].device}, head dimension {head_dim}, or the layout "
            "of the attention backend); use another --attention-backend, or --kv-cache-dtype auto"
        )
    if on_gpu:
        logger.warning(
            "Nitro has no kernels for this cache (dtype %s, head dimension %d, or the layout of the attention backend) "
            "and evicts in PyTorch, which waits for the GPU, one request after the other: expect it to be slow, or try "
            "another --attention-backend",
            caches[0].dtype,
            head_dim,
        )
    backend = [BackendCache(kv, *place) for kv, place in zip(caches, places, strict=True)]
    return DenseCompactor(backend, layers, heads, policy, merging=POOLING[settings.pooling], **bounds)


def take_over(runner: Any) -> tuple[Compactor, Answers | None]:
    """Return the compactor of a model runner whose caches have been allocated, and what answers the scheduler, if any.

    Args:
        runner: vLLM's V1 or V2 model runner.

    Raises:
        UnsupportedError: the caches are not those of plain full attention in one group, or are not understood.
    """
    settings = settings_in(runner.vllm_config.additional_config)
    assert settings is not None, "Nitro's worker is only installed together with its settings"
    if len(runner.kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedError("Nitro needs a model with one KV cache group; serve this model without Nitro")
    group = runner.kv_cache_config.kv_cache_groups[0]
    names = sorted(group.layer_names, key=extract_layer_index)
    caches: list[Tensor] = []
    places = []
    attention = _attention_layers(runner, names)
    for layer in attention:
        kv = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
        if kv.shape[0] != runner.kv_cache_config.num_blocks or kv.shape[2] != group.kv_cache_spec.block_size:
            raise UnsupportedError(
                f"the attention backend splits blocks of {group.kv_cache_spec.block_size} tokens into "
                f"{kv.shape[2]}; set --block-size {kv.shape[2]}"
            )
        caches.append(as_numbers(layer, kv))
        places.append(probe(layer, kv, runner.model_config.dtype))
    total = runner.model_config.get_total_num_kv_heads()
    usual = 0
    if settings.budget is not None and not runner.model_config.enforce_eager:
        usual = min(settings.budget + settings.slack + group.kv_cache_spec.block_size, runner.max_model_len)
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    compactor = _compactor(
        caches,
        places,
        layers=[extract_layer_index(name) for name in names],
        heads=local_heads(total, rank, size),
        settings=settings,
        longest=runner.max_model_len,  # whatever the server's budget: a request may ask for a larger one
        usual=usual,
        scales=scales_of(attention, caches[0]),
        rotations=find_rotations(
            runner.get_model(), names, runner.model_config.dtype, speaks_of_rope(runner.model_config)
        ),
    )
    # Counts are those of rank 0, or the ranks would have to agree first.
    if settings.threshold is None or rank:
        return compactor, None
    return compactor, Answers(compactor, runner.device, runner.scheduler_config.max_num_seqs)


def adopt(runner: Any, stock: type, target: type) -> None:
    """Turn a stock model runner into Nitro's, before it loads a model.

    Raises:
        UnsupportedError: it is not vLLM's own runner for this device.
    """
    if type(runner) is not stock:
        raise UnsupportedError(
            f"model runner {type(runner).__module__}.{type(runner).__name__} is not supported; Nitro needs vLLM's own "
            f"{stock.__module__}.{stock.__name__}"
        )
    runner.__class__ = target
