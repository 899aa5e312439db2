"""A decoder so plain that its correctness can be read off: the check of the oracle itself.

Token by token, every KV head of every (simulated) tensor-parallel rank is a Python list of (position, key, value);
evicting deletes entries. Only weights, norms and MLPs are the model's modules; sharding, RoPE and attention are written
out here, so that nothing is shared with the oracle's masked pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nitro.types import KeepRecord

Entry = tuple[int, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadCache:
    """The cache of one KV head, as a rule sees it before it evicts."""

    layer: int
    rank: int
    local_head: int
    run: int
    positions: tuple[int, ...]


EvictionRule = Callable[[HeadCache, int], Sequence[int]]
"""(cache, keep) -> the `keep` positions that stay."""


def streaming(sinks: int) -> EvictionRule:
    """Keeps the first `sinks` tokens and the newest."""
    return lambda cache, keep: (*cache.positions[:sinks], *cache.positions[len(cache.positions) - keep + sinks :])


def scattered(seed: int, sinks: int, window: int) -> EvictionRule:
    """Keeps the first `sinks`, the newest `window` and a random subset, another in each layer, rank, head and run."""

    def rule(cache: HeadCache, keep: int) -> Sequence[int]:
        middle = cache.positions[sinks : len(cache.positions) - window]
        rng = np.random.default_rng([seed, cache.layer, cache.rank, cache.local_head, cache.run, len(middle)])
        chosen = rng.choice(len(middle), size=keep - sinks - window, replace=False)
        newest = cache.positions[len(cache.positions) - window :]
        return (*cache.positions[:sinks], *(middle[i] for i in sorted(chosen)), *newest)

    return rule


@dataclass(frozen=True, slots=True)
class NaiveResult:
    """What the decoder generated, and what an engine's recorder would have recorded.

    Attributes:
        output_ids: greedy tokens.
        logits: fp32 ``[len(output_ids), vocab]``, from which each was chosen.
        records_by_rank: per rank, in order.
        run_starts: tokens known at the start of each run.
    """

    output_ids: list[int]
    logits: Tensor
    records_by_rank: list[list[KeepRecord]]
    run_starts: list[int]


class NaiveDecoder:
    """Decodes one request with a cache per KV head and evictions between steps.

    Args:
        model: a Llama or Qwen2 for causal language modelling in fp32 on the CPU, with the default RoPE.
        rule: chooses what stays.
        keep: tokens per head after an eviction.
        slack: a request is evicted down to `keep` before a step when it holds ``keep + slack`` tokens or more.
        chunk: prompt tokens computed in one step.
        tp: tensor-parallel ranks to simulate.
        cached_as: dtype of cached keys and values, and of the queries that meet them; their own by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rule: EvictionRule,
        *,
        keep: int,
        slack: int,
        chunk: int,
        tp: int = 1,
        cached_as: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        self.cached_as = cached_as
        self.model, self.rule, self.keep, self.slack, self.chunk, self.tp = model, rule, keep, slack, chunk, tp
        self.heads, self.kv_heads = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
        self.dim = model.model.layers[0].self_attn.head_dim
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        self.layers = config.num_hidden_layers

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int, preempt_at: Sequence[int] = ()) -> NaiveResult:
        """Greedy tokens.

        Args:
            prompt_ids: token ids.
            max_tokens: tokens to generate.
            preempt_at: ascending counts of output tokens at which the request loses its cache and starts a new run.
        """
        tokens, logits = list(prompt_ids), []
        records: list[list[KeepRecord]] = [[] for _ in range(self.tp)]
        starts: list[int] = []
        pending = list(preempt_at)
        restart = True
        while len(tokens) < len(prompt_ids) + max_tokens:
            if restart:
                self._cache: dict[tuple[int, int, int], list[Entry]] = {
                    key: [] for key in np.ndindex(self.layers, self.tp, self.kv_heads)
                }
                starts.append(len(tokens))
                computed = 0
            self._evict(computed, len(starts) - 1, records)
            step = tokens[computed : computed + self.chunk]
            last = self._forward(step, computed)
            computed += len(step)
            if computed == len(tokens):
                logits.append(last)
                tokens.append(int(last.argmax()))
            restart = bool(pending) and len(logits) >= pending[0]
            if restart:
                pending.pop(0)
        return NaiveResult(tokens[len(prompt_ids) :], torch.stack(logits), records, starts)

    def _evict(self, computed: int, run: int, records: list[list[KeepRecord]]) -> None:
        if len(self._cache[0, 0, 0]) < self.keep + self.slack:
            return
        for rank in range(self.tp):
            kept = np.zeros((self.layers, self.kv_heads, self.keep), dtype=np.int32)
            for layer, head in np.ndindex(self.layers, self.kv_heads):
                entries = self._cache[layer, rank, head]
                stay = self.rule(HeadCache(layer, rank, head, run, tuple(e[0] for e in entries)), self.keep)
                self._cache[layer, rank, head] = [entry for entry in entries if entry[0] in set(stay)]
                kept[layer, head] = [entry[0] for entry in self._cache[layer, rank, head]]
            records[rank].append(KeepRecord("naive", run, computed, kept))

    def _forward(self, ids: Sequence[int], start: int) -> Tensor:
        """One step over `ids` at positions `start`...; the logits ``[vocab]`` of the last."""
        body = self.model.model
        x = body.embed_tokens(torch.tensor(ids))
        for index, layer in enumerate(body.layers):
            normed = layer.input_layernorm(x)
            x = x + sum(self._attend(index, rank, normed, start) for rank in range(self.tp))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self.model.lm_head(body.norm(x[-1]))
        return logits

    def _attend(self, index: int, rank: int, x: Tensor, start: int) -> Tensor:
        """One rank's share of a layer's attention, ``[n, hidden]``; the ranks' shares add up."""
        attention = self.model.model.layers[index].self_attn
        first_kv = rank * self.model.config.num_key_value_heads // self.tp
        queries = self._project(attention.q_proj, x, rank * self.heads, self.heads)
        keys = self._project(attention.k_proj, x, first_kv, self.kv_heads)
        values = self._project(attention.v_proj, x, first_kv, self.kv_heads)
        output = torch.zeros(len(x), self.heads, self.dim)
        for token in range(len(x)):
            position = start + token
            for head in range(self.kv_heads):
                entries = self._cache[index, rank, head]
                key, value = self._rotate(keys[token, head], position), values[token, head]
                entries.append((position, key.to(self.cached_as).float(), value.to(self.cached_as).float()))
                group = slice(head * self.heads // self.kv_heads, (head + 1) * self.heads // self.kv_heads)
                query = self._rotate(queries[token, group], position).to(self.cached_as).float()
                scores = query @ torch.stack([entry[1] for entry in entries]).T / math.sqrt(self.dim)
                output[token, group] = scores.softmax(-1) @ torch.stack([entry[2] for entry in entries])
        columns = slice(rank * self.heads * self.dim, (rank + 1) * self.heads * self.dim)
        return output.flatten(1) @ attention.o_proj.weight[:, columns].T

    def _project(self, linear: Any, x: Tensor, first: int, heads: int) -> Tensor:
        """``[n, heads, head_dim]``: the heads' rows of a column-parallel projection."""
        rows = slice(first * self.dim, (first + heads) * self.dim)
        bias = None if linear.bias is None else linear.bias[rows]
        return torch.nn.functional.linear(x, linear.weight[rows], bias).view(len(x), heads, self.dim)

    def _rotate(self, vectors: Tensor, position: int) -> Tensor:
        """RoPE (Su et al., arXiv:2104.09864) in the half-split layout that Llama and Qwen2 use."""
        angle = position * self.frequencies
        cos, sin = angle.cos().float(), angle.sin().float()
        low, high = vectors.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
