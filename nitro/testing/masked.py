"""A transformers model with an attention mask of its own per layer and query head, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nitro.testing import attention
from nitro.testing.folding import Folding
from nitro.testing.visibility import Visibility

_IMPLEMENTATION = "nitro_oracle"


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    nitro_visibility: Visibility,
    nitro_cached_as: torch.dtype | None,
    nitro_folding: Folding | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention from the definition, ``softmax(Q Kᵀ · scaling + mask) V``, with a mask per layer and query head.

    Args:
        module: the attention layer; its `layer_idx` picks the mask.
        query: ``[1, num_heads, T, head_dim]``.
        key: ``[1, num_kv_heads, T, head_dim]``; each KV head serves a run of consecutive query heads.
        value: as `key`.
        attention_mask: transformers' own mask; none is built for this implementation.
        scaling: factor of the scores.
        nitro_visibility: the masks.
        nitro_cached_as: FP8 dtype to which all three are rounded, or None.
        nitro_folding: what evictions make of the values, or None.

    Returns:
        ``[1, T, num_heads, head_dim]``, and no attention weights.
    """
    assert attention_mask is None
    assert isinstance(module.layer_idx, int)
    if nitro_cached_as is not None:
        query, key, value = (_rounded(x, nitro_cached_as) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    visible = torch.from_numpy(nitro_visibility.mask(module.layer_idx)).to(query.device)
    scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
    weights = scores.masked_fill_(~visible, -math.inf).softmax(dim=-1)
    if nitro_folding is None:
        output = weights @ value.repeat_interleave(group, dim=1)
    else:
        parts = [
            weights[:, :, queries] @ values.repeat_interleave(group, dim=0)
            for queries, values in nitro_folding.epochs(module.layer_idx, key[0], value[0])
        ]
        output = torch.cat(parts, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest number of a dtype; beyond its largest one to that."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).to(x.dtype)


attention.register(_IMPLEMENTATION, _attend)


def masked_logits(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    visibility: Visibility,
    first: int = 0,
    *,
    cached_as: torch.dtype | None = None,
    folding: Folding | None = None,
) -> Tensor:
    """The model's logits in one pass under a mask.

    Args:
        model: a Llama or Qwen2 for causal language modelling, in fp32, on any device.
        token_ids: T token ids.
        visibility: the masks, of length T.
        first: position of the first query whose logits are wanted; the vocabulary may be large.
        cached_as: FP8 dtype to which keys (after RoPE) and values are rounded, as a cache of that dtype holds them
            with scales of 1; queries, too, since vLLM's attention multiplies FP8 with FP8.
        folding: what evictions make of the values, if they are pooled.

    Returns:
        fp32 ``[T - first, vocab]`` on the CPU: row i predicts the token at position ``first + i + 1``.

    Raises:
        ValueError: the model is not in fp32, has another attention than the mask describes, or lengths differ.
    """
    if model.dtype != torch.float32:
        raise ValueError(f"model.dtype={model.dtype}: the oracle needs float32, load it with dtype=torch.float32")
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise ValueError("layer_types has sliding_attention: the oracle's masks describe full attention only")
    if len(token_ids) != visibility.length:
        raise ValueError(f"{len(token_ids)} token ids for a mask of {visibility.length}")
    ids = torch.tensor([list(token_ids)], device=model.device)
    wanted = torch.arange(first, len(token_ids), device=model.device)
    ours = {"nitro_visibility": visibility, "nitro_cached_as": cached_as, "nitro_folding": folding}
    with torch.inference_mode(), attention.using(model, _IMPLEMENTATION):
        output = model(input_ids=ids, use_cache=False, logits_to_keep=wanted, **ours)
    logits: Tensor = output.logits[0].cpu()
    return logits
