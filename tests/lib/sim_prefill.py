"""A context, computed once with the full cache: what candidates score, and what answers are read against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nitro.compactor import request_key
from nitro.eval.settings import SINKS, WINDOW
from nitro.policies.base import ScoreInput
from nitro.policies.rotary import Rotation

_CHUNK = 256
"""Tokens whose logits are computed at once: over a whole vocabulary, those of a context would fill gigabytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """What one attention layer was given, which presses of kvpress make queries from.

    Attributes:
        module: the layer, in float32.
        hidden_states: float32 ``[1, N, hidden]``.
        position_embeddings: cosines and sines, each float32 ``[1, N, D]``.
    """

    module: Any
    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A context's cache, and what else candidates may look at.

    Attributes:
        x: keys and values, float32 ``[L, H, N, D]``, as Nitro's policies are given them.
        surprisal: float32 ``[N]``, minus the log-probability of each token after those before it, in nats; of the
            first, which nothing predicts, 0.
        last: float32 ``[vocab]``, log-probabilities of the token that follows.
        inputs: of each layer.
    """

    x: ScoreInput
    surprisal: Tensor
    last: Tensor
    inputs: tuple[LayerInput, ...]

    @property
    def length(self) -> int:
        """Tokens of the context, N."""
        return self.x.keys.shape[2]

    @property
    def heads(self) -> int:
        """KV heads of all layers together."""
        return self.x.keys.shape[0] * self.x.keys.shape[1]


@torch.inference_mode()
def prefill(model: Any, tokens: Sequence[int], name: str, seed: int = 0, scorer: Any = None) -> Prefilled:
    """Compute a context.

    Args:
        model: a Llama or Qwen2 of transformers for causal language modelling.
        tokens: the context.
        name: of the case, on which the draws of the random policy depend.
        seed: of the same.
        scorer: the same model in float32, where ``model`` is not: presses score in float32, as Nitro's policies do.
    """
    import transformers

    ids = torch.tensor([list(tokens)])
    past = transformers.DynamicCache()
    with watched(model) as inputs:
        hidden = model.model(ids, past_key_values=past, use_cache=True).last_hidden_state[0]
    surprisal, last = torch.zeros(len(tokens)), torch.empty(0)
    for start in range(0, len(tokens), _CHUNK):
        predicted = model.lm_head(hidden[start : start + _CHUNK]).float().log_softmax(dim=-1)
        after = ids[0, start + 1 : start + 1 + _CHUNK]
        surprisal[start + 1 : start + 1 + len(after)] = -predicted[: len(after)].gather(1, after[:, None])[:, 0]
        last = predicted[-1].clone()
    keys, values = (torch.cat([getattr(layer, kind) for layer in past.layers]).float() for kind in ("keys", "values"))
    layers, heads, length, _ = keys.shape
    rotation = _rotation(*inputs[0].position_embeddings)
    x = ScoreInput(
        keys=keys,
        values=values,
        positions=torch.arange(length, dtype=torch.int32).expand(layers, heads, length),
        layers=torch.arange(layers),
        heads=torch.arange(heads),
        request_key=request_key(name),
        logical_len=length,
        sinks=SINKS,
        window=WINDOW,
        seed=seed,
        rotations=(rotation,) * layers,
    )
    of = inputs if scorer is None else [_in_float32(*pair) for pair in zip(inputs, scorer.model.layers, strict=True)]
    return Prefilled(x, surprisal, last, tuple(of))


def _in_float32(given: LayerInput, layer: Any) -> LayerInput:
    cosines, sines = given.position_embeddings
    return LayerInput(layer.self_attn, given.hidden_states.float(), (cosines.float(), sines.float()))


def _rotation(cosines: Tensor, sines: Tensor) -> Rotation:
    """Return the model's rotation; transformers writes each angle twice, for both halves of a key."""
    half = cosines.shape[-1] // 2
    return Rotation(torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float(), interleaved=False)


@contextmanager
def watched(model: Any) -> Iterator[list[LayerInput]]:
    """Write down what the attention layers are given."""
    found: list[LayerInput] = []

    def note(module: Any, _: Any, given: dict[str, Any]) -> None:
        found.append(LayerInput(module, given["hidden_states"], given["position_embeddings"]))

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
