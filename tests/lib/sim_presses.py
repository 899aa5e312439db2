"""kvpress's scores of the same contexts, under the same rule of what stays (https://github.com/NVIDIA/kvpress, 0.5.5).

Presses with equal counts that need no calibration, with their own defaults. Only their scores are taken: sinks, window
and the choice of the best are Nitro's, so that the formulas are compared and nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from sim_candidates import Candidate, Keep, best
from sim_prefill import LayerInput, Prefilled
from torch import Tensor

_DEPEND_ON_RATIO = ("CriticalKV", "Compactor")


def _presses() -> dict[str, Callable[[], Any]]:
    import kvpress as k

    return {
        "Knorm": k.KnormPress,
        "KeyDiff": k.KeyDiffPress,
        "SnapKV": k.SnapKVPress,
        "TOVA": k.TOVAPress,
        "LagKV": k.LagKVPress,
        "LagKV lag=32": lambda: k.LagKVPress(lag_size=32),
        "ExpectedAttention": k.ExpectedAttentionPress,
        "ExpectedAttention ε=.01": lambda: k.ExpectedAttentionPress(epsilon=0.01),
        "CriticalKV": lambda: k.CriticalKVPress(k.ExpectedAttentionPress(use_vnorm=False)),
        "ObservedAttention": k.ObservedAttentionPress,
        "CUR": k.CURPress,
        "LeverageScore": k.LeverageScorePress,
        "NonCausalAttn": k.NonCausalAttnPress,
        "Compactor": k.CompactorPress,
    }


def press_names() -> tuple[str, ...]:
    """Return the names of the presses; needs kvpress."""
    return tuple(_presses())


def press_candidate(name: str) -> Candidate:
    """Return a press as a candidate."""

    def prepare(context: Prefilled) -> Keep:
        press = _presses()[name]()
        if name not in _DEPEND_ON_RATIO:
            return best(press_scores(press, name, context), context.x)

        def keep(count: int) -> Tensor:
            press.compression_ratio = 1 - count / context.length
            return best(press_scores(press, name, context), context.x)(count)

        return keep

    return Candidate(f"kvpress {name}", "kvpress", prepare)


@torch.inference_mode()
def press_scores(press: Any, name: str, context: Prefilled) -> Tensor:
    """Return a press's scores: float32 ``[L, H, N]``.

    Args:
        press: of kvpress, a ScorerPress.
        name: seeds the draws of presses that use random sketches.
        context: what is scored.
    """
    torch.manual_seed(zlib.crc32(f"{name}/{context.x.request_key}".encode()))
    found = []
    for given, keys, values in zip(context.inputs, context.x.keys.split(1), context.x.values.split(1), strict=True):
        attentions = _attentions(given, keys) if name == "ObservedAttention" else None
        kwargs = {"position_embeddings": given.position_embeddings}
        scores = press.score(given.module, given.hidden_states, keys.clone(), values.clone(), attentions, kwargs)
        found.append(scores.float())
    return torch.cat(found)


def give_rotary_embedding(model: Any) -> None:
    """Hang the model's rotary embedding on its attention layers, where presses look for it."""
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb


def _attentions(given: LayerInput, keys: Tensor) -> Tensor:
    """Return a layer's causal attention weights, ``[1, num_heads, N, N]``."""
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import repeat_kv, rotate_half

    queries = get_prerope_query_states(given.module, given.hidden_states)
    cosines, sines = (one.unsqueeze(1) for one in given.position_embeddings)
    queries = queries * cosines + rotate_half(queries) * sines
    products = queries @ repeat_kv(keys, queries.shape[1] // keys.shape[1]).transpose(2, 3) / math.sqrt(keys.shape[3])
    length = keys.shape[2]
    return products.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf).softmax(dim=-1)
