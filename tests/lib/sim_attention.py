"""How much attention each KV head pays to an answer's place in a context: what a static table of counts may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sim_prefill import Prefilled, watched
from torch import Tensor


def place_of(answer: Sequence[int], context: Sequence[int]) -> slice:
    """Return where in a context an answer stands.

    Raises:
        ValueError: it does not.
    """
    size = len(answer)
    for start in range(len(context) - size + 1):
        if tuple(context[start : start + size]) == tuple(answer):
            return slice(start, start + size)
    raise ValueError("the answer does not stand in the context as it is spelt in the answer")


@torch.inference_mode()
def attention_paid(
    model: Any, context: Prefilled, question: Sequence[int], answer: Sequence[int], place: slice
) -> Tensor:
    """Return the share of their attention that the tokens which predict an answer pay to its place: ``[L, H]``.

    The mean over those tokens and over the query heads of each KV head, with the full cache.

    Args:
        model: the one that the context was computed with.
        context: the context.
        question: tokens, at least one.
        answer: tokens.
        place: of the answer in the context.
    """
    import transformers

    past = transformers.DynamicCache()
    layers, heads, _, dim = context.x.keys.shape
    for layer in range(layers):
        past.update(*(x[layer : layer + 1].to(model.dtype) for x in (context.x.keys, context.x.values)), layer)
    given = torch.tensor([[*question, *answer[:-1]]])
    with watched(model) as inputs:
        model.model(given, past_key_values=past, use_cache=True)
    found = []
    for layer, one in zip(past.layers, inputs, strict=True):
        hidden = one.hidden_states[:, -len(answer) :]
        queries = one.module.q_proj(hidden).view(len(answer), -1, dim).transpose(0, 1).float()
        cosines, sines = (x[0, -len(answer) :].float() for x in one.position_embeddings)
        first, second = queries.chunk(2, dim=-1)
        queries = queries * cosines + torch.cat([-second, first], dim=-1) * sines
        keys = layer.keys[0].float().repeat_interleave(queries.shape[0] // heads, dim=0)
        products = queries @ keys.transpose(1, 2) * one.module.scaling
        seen = torch.arange(keys.shape[1]) <= torch.arange(keys.shape[1] - len(answer), keys.shape[1])[:, None]
        weights = products.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        found.append(weights[..., place].sum(dim=-1).mean(dim=-1).view(heads, -1).mean(dim=-1))
    return torch.stack(found)
