"""Questions and answers, teacher-forced against a cache that has lost other slots in each layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sim_prefill import Prefilled
from torch import Tensor

from nitro.testing import attention

_IMPLEMENTATION = "nitro_simulation"


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float,
    sim_held: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention to what of a context is held, and causally to the tokens behind it.

    Args:
        module: the attention layer; its `layer_idx` picks the mask.
        query: ``[V, num_heads, T, D]``.
        key: ``[V, H, P + T, D]``; each KV head serves a run of consecutive query heads.
        value: as `key`.
        attention_mask: transformers' own; none is built for this implementation.
        dropout: nothing is trained here. (kvpress wraps every implementation, and hands it on by position.)
        scaling: factor of the scores.
        sim_held: of each layer bool ``[V, H, P]``: whether a slot holds a token, or is there to fill up.

    Returns:
        ``[V, T, num_heads, D]``, and no attention weights.
    """
    assert attention_mask is None
    assert not dropout
    variants, heads, steps, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    held = sim_held[module.layer_idx].unsqueeze(2).expand(-1, -1, steps, -1)
    causal = torch.ones(steps, steps, dtype=torch.bool).tril().expand(variants, kv_heads, -1, -1)
    mask = torch.cat([held, causal], dim=-1).unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
    # The query heads of a KV head behind each other, as if they were tokens: nothing has to be repeated.
    folded = query.reshape(variants, kv_heads, group * steps, dim)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.view(variants, heads, steps, dim).transpose(1, 2).contiguous(), None


attention.register(_IMPLEMENTATION, _attend)


@torch.inference_mode()
def answer_rows(
    model: Any, context: Prefilled, kept: Tensor, question: Sequence[int], answer: Sequence[int]
) -> list[dict[str, Any]]:
    """Return what `nitro.eval.score.answer_row` returns, for each of several ways to evict from one context.

    Positions go on behind the whole context, as they do in Nitro: evictions move no key.

    Args:
        model: the one that the context was computed with.
        context: the context.
        kept: bool ``[V, L, H, N]``: what of it is left, V times.
        question: tokens, which may be none.
        answer: tokens, at least one.
    """
    import transformers

    past, held = transformers.DynamicCache(), []
    for layer in range(kept.shape[1]):
        index, holds = _gathered(kept[:, layer])
        rows = index.unsqueeze(-1).expand(-1, -1, -1, context.x.keys.shape[-1])
        keys, values = (
            x[layer].to(model.dtype).expand(len(kept), -1, -1, -1).gather(2, rows)
            for x in (context.x.keys, context.x.values)
        )
        past.update(keys, values, layer)
        held.append(holds)
    given = [*question, *answer[:-1]]
    found = torch.empty(len(kept), 0, context.last.shape[-1])
    if given:
        ids = torch.tensor(given).expand(len(kept), -1)
        positions = torch.arange(context.length, context.length + len(given)).expand(len(kept), -1)
        wanted = len(answer) if question else len(answer) - 1
        with attention.using(model, _IMPLEMENTATION):
            output = model(
                ids, position_ids=positions, past_key_values=past, logits_to_keep=wanted, use_cache=True, sim_held=held
            )
        found = output.logits.float().log_softmax(dim=-1)
    if not question:  # the context itself predicts the answer's first token, before anything is evicted
        found = torch.cat([context.last.expand(len(kept), 1, -1), found], dim=1)
    tokens = torch.tensor(list(answer))
    likely = found.gather(2, tokens.expand(len(kept), -1).unsqueeze(-1))[..., 0]
    exact = (found.argmax(dim=-1) == tokens).all(dim=-1)
    nll = -likely.double().mean(dim=-1)
    return [
        {"nll": float(loss), "exact": bool(hit), "tokens": len(answer)} for loss, hit in zip(nll, exact, strict=True)
    ]


def _gathered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept slots of one layer, in order, and whether they are kept: int64 and bool ``[V, H, most]``.

    Rows that keep fewer than others are filled up with slots that are not kept.

    Args:
        kept: bool ``[V, H, N]``.
    """
    most = int(kept.sum(dim=-1).max())
    index = (~kept).byte().argsort(dim=-1, stable=True)[..., :most]
    return index, kept.gather(-1, index)
