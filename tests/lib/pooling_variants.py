"""Ways to fold evicted tokens into survivors, in plain PyTorch, on one context: what `ci/simulate_pooling.py` compares.

L is the number of layers, H of KV heads, G of query heads of each, N of tokens, S of survivors, D the head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nitro.kernels.pool import merge_dense_ref
from nitro.kernels.select import select_topk_ref
from nitro.policies.rotary import Rotation

_MIN_NORM = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What a context of N tokens left behind, all of it float32.

    Attributes:
        keys: ``[L, H, N, D]``, as cached (after RoPE).
        plain: ``[L, H, N, D]``, with RoPE undone.
        values: ``[L, H, N, D]``.
        queries: ``[L, H, G, w, D]``, of its last tokens, after RoPE.
        rotation: of all layers.
        sinks: first tokens; they stay, and nothing is folded into them.
    """

    keys: Tensor
    plain: Tensor
    values: Tensor
    queries: Tensor
    rotation: Rotation
    sinks: int = 4

    def queries_ahead(self) -> Tensor:
        """Return the queries as the same ones would be at the positions that follow the context."""
        length, count = self.keys.shape[2], self.queries.shape[3]
        where = torch.arange(length, length + count, dtype=torch.int32)
        plain = self.rotation.undo(self.queries, (where - count).expand(self.queries.shape[:-1]))
        return rotate(plain, self.rotation, where)


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """A context after the eviction.

    Attributes:
        keys: ``[L, H, S, D]``.
        values: ``[L, H, S, D]``.
        bias: ``[L, H, S]``, is added to the logits of attention; no stock attention can do that.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Folding:
    """Which survivor each evicted token belongs to.

    Attributes:
        kept: int64 ``[L, H, S]``, tokens that stay.
        gone: int64 ``[L, H, E]``, the others.
        target: int64 ``[L, H, E]``, the nearest survivor of each, as an index into ``kept``.
        similarity: ``[L, H, E]``, the cosine between the keys of both.
    """

    kept: Tensor
    gone: Tensor
    target: Tensor
    similarity: Tensor


def rotate(plain: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """Apply RoPE (pairs half of ``rotary_dim`` apart) to ``[..., D]`` at int ``[...]``, the inverse of ``undo``."""
    cos, sin = rotation.cos_sin[positions.long()].chunk(2, dim=-1)
    a, b = plain.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather ``[L, H, N, D]`` by ``[L, H, M]``."""
    return x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def fold(x: Context, kept: Tensor, keys: Tensor) -> Folding:
    """Assign each evicted token to the survivor behind the sinks whose key has the largest cosine; ties to the first.

    Args:
        x: the context.
        kept: ``[L, H, S]``, ascending.
        keys: ``[L, H, N, D]``, which keys to compare.
    """
    stays = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, kept, True)
    gone = stays.to(torch.int8).argsort(dim=-1, stable=True)[..., : keys.shape[2] - kept.shape[2]]
    unit = keys / torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min(_MIN_NORM)
    cosines = rows(unit, gone) @ rows(unit, kept).transpose(-1, -2)
    cosines[..., : x.sinks] = -math.inf
    similarity, target = cosines.max(dim=-1)
    return Folding(kept, gone, target, similarity)


def stripped(x: Context, kept: Tensor) -> Survivors:
    """Evict without pooling."""
    return Survivors(rows(x.keys, kept), rows(x.values, kept), torch.zeros(kept.shape))


def weighted_sums(x: Tensor, folding: Folding, weights: Tensor) -> Tensor:
    """Return for each survivor the sum of what is folded into it, ``[L, H, S, D]``, without itself."""
    out = torch.zeros(*folding.kept.shape, x.shape[-1])
    index = folding.target.unsqueeze(-1).expand(*folding.target.shape, x.shape[-1])
    return out.scatter_add_(2, index, rows(x, folding.gone) * weights.unsqueeze(-1))


def masses(folding: Folding, weights: Tensor) -> Tensor:
    """Return ``[L, H, S]``: one for each survivor, and the weights of what is folded into it."""
    return torch.ones(folding.kept.shape).scatter_add_(2, folding.target, weights)


def attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs ``[L, H, G·w, D]`` and weights ``[L, H, G·w, S]`` of queries ``[L, H, G, w, D]`` that see all."""
    flat = queries.flatten(2, 3)
    logits = flat @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1]) + bias.unsqueeze(-2)
    weights = logits.softmax(dim=-1)
    return weights @ values, weights


def merge(
    x: Context,
    kept: Tensor,
    *,
    undone: bool = True,
    least: float = -1.0,
    power: float = 0.0,
    own: float = 1.0,
    mass: str = "mean",
    merge_keys: bool = False,
) -> Survivors:
    """Fold evicted values into the survivors with the nearest keys.

    Args:
        x: the context.
        kept: ``[L, H, S]``.
        undone: compare keys with RoPE undone.
        least: cosine below which a token is dropped instead.
        power: tokens weigh their cosine to this power; 0: all the same.
        own: what a survivor itself weighs.
        mass: ``mean``: the weighted mean. ``sum``: the sum, as if the mass of the softmax did not change. ``share``:
            the sum over the mean mass that the last queries see, so that outputs have the right size on average.
            ``bias``: the mean, and attention is told the mass.
        merge_keys: keys, too, without RoPE, then rotated to the survivor's position.
    """
    folding = fold(x, kept, x.plain if undone else x.keys)
    weights = (folding.similarity >= least).float() * folding.similarity.clamp_min(0.0) ** power / own
    mass_of = masses(folding, weights)
    before = stripped(x, kept)
    total = before.values + weighted_sums(x.values, folding, weights)
    keys, values, bias = before.keys, total / mass_of.unsqueeze(-1), before.bias
    if merge_keys:
        plain = (rows(x.plain, kept) + weighted_sums(x.plain, folding, weights)) / mass_of.unsqueeze(-1)
        keys = rotate(plain, x.rotation, kept)
    if mass == "sum":
        values = total
    elif mass == "share":
        _, seen = attention(x.queries_ahead(), keys, values, bias)
        values = total / (seen.mean(dim=2) * mass_of).sum(-1, keepdim=True).unsqueeze(-1)
    elif mass == "bias":
        bias = mass_of.log()
    return Survivors(keys, values, bias)


Score = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""From keys and values ``[L, H, N, D]``, positions int32 ``[L, H, N]`` and the tokens so far to scores."""


def in_rounds(
    x: Context, score: Score, keep: int, *, window: int, slack: int = 32, merging: dict[str, float] | None = None
) -> tuple[Survivors, Tensor]:
    """Evict whenever a request has grown by ``slack`` tokens, as serving does, and pool what was pooled before.

    K and V are those of the full cache: what evictions change in later tokens' is left out.

    Args:
        x: the context.
        score: the policy.
        keep: tokens that stay.
        window: newest tokens that stay.
        slack: tokens that come between two evictions.
        merging: options of ``merge_ragged``; None: evicted tokens are dropped.

    Returns:
        what is left, and which tokens that are, ``[L, H, keep]``.
    """
    length = x.keys.shape[2]
    where = torch.empty(*x.keys.shape[:2], 0, dtype=torch.int64)
    values, masses, held = x.values[:, :, :0], where.int(), 0
    for now in [*range(length - (length - keep - 1) // slack * slack, length, slack), length]:
        new = torch.arange(held, now).expand(*x.keys.shape[:2], -1)
        where, values = torch.cat([where, new], -1), torch.cat([values, x.values[:, :, held:now]], 2)
        masses, held = torch.cat([masses, torch.ones_like(new, dtype=torch.int32)], -1), now
        if where.shape[-1] <= keep:
            continue
        keys = rows(x.keys, where)
        index = select_topk_ref(score(keys, values, where.int(), now), keep, x.sinks, window)
        if merging is None:
            values, masses = rows(values, index), masses.gather(-1, index)
        else:
            values, masses = merge_dense_ref(keys, values, masses, index, protect=x.sinks, **merging)
        where = where.gather(-1, index)
    return Survivors(rows(x.keys, where), values, torch.zeros(where.shape)), where


def spread(values: Tensor, plain: Tensor) -> float:
    """Return how far values ``[L, H, S, D]`` lie from their mean, in units of what they did before pooling."""
    off, before = (x - x.mean(2, keepdim=True) for x in (values, plain))
    return float(off.norm() / before.norm())


def shift(x: Context, kept: Tensor) -> Survivors:
    """Add one vector to all survivors' values: by what the outputs of the last queries are off on average."""
    before = stripped(x, kept)
    queries = x.queries_ahead()
    whole, _ = attention(queries, x.keys, x.values, torch.zeros(x.keys.shape[:3]))
    got, _ = attention(queries, before.keys, before.values, before.bias)
    return replace(before, values=before.values + (whole - got).mean(dim=2, keepdim=True))


def fit(
    x: Context, kept: Tensor, *, ridge: float, taps: int = 32, ahead: bool = True, start: Callable = stripped
) -> Survivors:
    """Correct values so that the outputs of the last queries over survivors match those over all tokens.

    With weights A ``[G·w, S]`` over survivors and errors E of the outputs, the least ``|E - A X|² + λ|X|²`` is
    ``X = Aᵀ (A Aᵀ + λ)⁻¹ E``; it cannot be above what ``X = 0`` has.

    Args:
        x: the context.
        kept: ``[L, H, S]``.
        ridge: λ as a share of the mean of A Aᵀ's diagonal.
        taps: queries of each head.
        ahead: queries are moved behind the context, where they see all of it; otherwise they see what they saw.
        start: what is corrected.
    """
    before = start(x, kept)
    queries = (x.queries_ahead() if ahead else x.queries)[:, :, :, -taps:]
    length = x.keys.shape[2]
    position = torch.full((taps,), length) if ahead else torch.arange(length - taps, length)
    position = position.repeat(queries.shape[2])[:, None]

    def over(keys: Tensor, values: Tensor, bias: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        logits = queries.flatten(2, 3) @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1]) + bias.unsqueeze(-2)
        weights = logits.masked_fill(where.unsqueeze(-2) > position, -math.inf).softmax(dim=-1)
        return weights @ values, weights

    every = torch.arange(length).expand(x.keys.shape[:3])
    whole, _ = over(x.keys, x.values, torch.zeros(x.keys.shape[:3]), every)
    got, weights = over(before.keys, before.values, before.bias, kept)
    gram = weights @ weights.transpose(-1, -2)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(dim=-1, keepdim=True)
    correction = weights.transpose(-1, -2) @ torch.linalg.solve(gram, whole - got)
    return replace(before, values=before.values + correction)
