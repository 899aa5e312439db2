"""A transformers model that reads a question over survivors: prefill, pooled caches side by side, answers scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pooling_variants import Context, Survivors
from torch import Tensor
from transformers import PreTrainedModel

from nitro.eval.case import Case
from nitro.policies.rotary import Rotation
from nitro.testing import attention

_NAME = "nitro_pooling"


class Passed(NamedTuple):
    """Queries, keys, values ``[1, heads, T, D]`` of one layer's new tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def attend(query: Tensor, prefix: Survivors, layer: int, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention over survivors, which all see, and new tokens, causally: ``[B, heads, T, D]``.

    Args:
        query: ``[B, heads, T, D]``.
        prefix: survivors of B caches, ``[B, L, H, S, ...]``.
        layer: which.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, D]``.
        scaling: of the logits.
    """
    length = key.shape[2]
    keys = torch.cat([prefix.keys[:, layer], key], dim=2)
    values = torch.cat([prefix.values[:, layer], value], dim=2)
    bias = prefix.bias[:, layer, :, None, None]
    batch, heads = keys.shape[:2]
    grouped = query.view(batch, heads, -1, length, query.shape[-1])
    logits = grouped @ keys.unsqueeze(2).transpose(-1, -2) * scaling
    survivors = keys.shape[2] - length
    logits[..., :survivors] += bias
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    logits[..., survivors:].masked_fill_(hidden, -math.inf)
    return (logits.softmax(dim=-1) @ values.unsqueeze(2)).view_as(query)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    nitro_prefix: Survivors,
    nitro_passed: list[Passed] | None,
    **_: Any,
) -> tuple[Tensor, None]:
    if nitro_passed is not None:
        nitro_passed.append(Passed(query, key, value))
    return attend(query, nitro_prefix, module.layer_idx, key, value, scaling).transpose(1, 2).contiguous(), None


attention.register(_NAME, _attend)


def stacked(caches: Sequence[Survivors]) -> Survivors:
    """Return caches with equal numbers of survivors side by side, ``[B, L, H, S, ...]``."""
    return Survivors(*(torch.stack([getattr(c, name) for c in caches]) for name in ("keys", "values", "bias")))


class Answer(NamedTuple):
    """Mean negative log-likelihood of an answer, in nats a token, and whether all of it is the argmax."""

    nll: float
    exact: bool


class Reader:
    """Runs a Llama in float32."""

    def __init__(self, model: PreTrainedModel, taps: int, sinks: int) -> None:
        """Take over the model; ``taps`` are the last queries of a context that are kept."""
        model.config._attn_implementation = _NAME
        self.model, self.taps, self.sinks = model, taps, sinks
        config = model.config
        self.shape = (config.num_hidden_layers, config.num_key_value_heads, config.hidden_size)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        where = torch.arange(config.max_position_embeddings)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1), where)
        half = self.head_dim // 2
        self.rotation = Rotation(torch.cat([cos[0, :, :half], sin[0, :, :half]], -1), False)

    def _empty(self) -> Survivors:
        shape = (1, *self.shape[:2], 0)
        return Survivors(*(torch.zeros(*shape, self.head_dim) for _ in range(2)), torch.zeros(shape))

    def _run(self, tokens: Sequence[int], first: int, prefix: Survivors, passed: list[Passed] | None) -> Tensor:
        """Return the last layer's outputs ``[B, T, hidden]`` of new tokens at positions from ``first`` on."""
        batch = prefix.keys.shape[0]
        with torch.inference_mode():
            return self.model.model(
                input_ids=torch.tensor([list(tokens)]).expand(batch, -1),
                position_ids=torch.arange(first, first + len(tokens)).expand(batch, -1),
                use_cache=False,
                nitro_prefix=prefix,
                nitro_passed=passed,
            ).last_hidden_state

    def prefill(self, tokens: Sequence[int]) -> tuple[Context, Tensor]:
        """Return what a context leaves behind, and the last layer's output of its last token, ``[hidden]``."""
        passed: list[Passed] = []
        last = self._run(tokens, 0, self._empty(), passed)[0, -1]
        keys, values = (torch.stack([getattr(one, name)[0] for one in passed]) for name in ("keys", "values"))
        heads = keys.shape[1]
        queries = torch.stack([one.queries[0, :, -self.taps :] for one in passed]).unflatten(1, (heads, -1))
        where = torch.arange(len(tokens), dtype=torch.int32).expand(keys.shape[:3])
        plain = self.rotation.undo(keys, where)
        return Context(keys, plain, values, queries, self.rotation, self.sinks), last

    def read(self, case: Case, last: Tensor, prefix: Survivors, passed: list[Passed] | None = None) -> list[Answer]:
        """Let the model read question and answer over B caches.

        Args:
            case: what is read.
            last: the last layer's output of the context's last token: it was computed before the eviction.
            prefix: ``[B, L, H, S, ...]``.
            passed: gets what each layer was given.
        """
        tokens = [*case.question, *case.answer]
        outputs = self._run(tokens[:-1], len(case.context), prefix, passed)
        found = []
        for row in outputs:
            hidden = torch.cat([last[None], row])[-len(case.answer) :]
            with torch.inference_mode():
                logits = self.model.lm_head(hidden).float()
            likely = logits.log_softmax(-1).gather(1, torch.tensor(case.answer)[:, None])
            exact = bool((logits.argmax(-1) == torch.tensor(case.answer)).all())
            found.append(Answer(-float(likely.mean()), exact))
        return found

    def output_errors(self, passed: Sequence[Passed], whole: Survivors, prefix: Survivors) -> Tensor:
        """Return each layer's error of the attention's outputs, ``[B, L]``, relative to their size.

        Both are given what the layers were given over the whole cache, so errors of one layer don't show in the next.

        Args:
            passed: of a run over the whole cache.
            whole: ``[1, L, H, N, ...]``.
            prefix: ``[B, L, H, S, ...]``.
        """
        batch, errors = prefix.keys.shape[0], []
        for layer, (query, key, value) in enumerate(passed):
            scaling = query.shape[-1] ** -0.5
            want = attend(query, whole, layer, key, value, scaling)
            many = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
            query, key, value = many
            got = attend(query, prefix, layer, key, value, scaling)
            errors.append(((got - want).square().sum((1, 2, 3)) / want.square().sum()).sqrt())
        return torch.stack(errors, dim=1)
