"""Candidates whose counts are not equal, or that look at the likelihood of the context's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sim_candidates import Candidate, Keep, Score, best, centred, unrotated
from sim_prefill import Prefilled
from torch import Tensor

from nitro.policies.base import ScoreInput
from nitro.policies.combine import neighbour_mean

FLOOR = 0.2
"""Part of the mean count that every (layer, KV head) keeps in any case."""


def order(scores: Tensor, x: ScoreInput) -> Tensor:
    """Return each slot's place in its head's order, 0 for the first to stay: int64 ``[L, H, N]``; forced ones lead."""
    slots = torch.arange(scores.shape[2])
    forced = (slots < x.sinks) | (slots >= scores.shape[2] - x.window)
    ranked = scores.nan_to_num(nan=-torch.inf).masked_fill(forced, torch.inf)
    places = ranked.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(places).scatter_(2, places, slots.expand_as(places).contiguous())


def floor_of(count: int, x: ScoreInput) -> int:
    """Return what every head keeps at least: the forced slots, or ``FLOOR`` of the mean count."""
    return max(x.sinks + x.window, int(FLOOR * count))


def keep_global(scores: Tensor, x: ScoreInput, count: int) -> Tensor:
    """Return which slots stay if all layers and heads compete for them: bool ``[L, H, N]``.

    Args:
        scores: float32 ``[L, H, N]``, comparable with each other.
        x: has sinks and window.
        count: mean number of slots that stay of a (layer, KV head).
    """
    kept = order(scores, x) < floor_of(count, x)
    rest = scores.nan_to_num(nan=-torch.inf).masked_fill(kept, -torch.inf).flatten()
    open_places = count * scores.shape[0] * scores.shape[1] - int(kept.sum())
    kept.view(-1)[rest.topk(open_places).indices] = True
    return kept


def counts_of(weights: Tensor, count: int, x: ScoreInput) -> Tensor:
    """Return how many slots of each (layer, KV head) stay, in proportion to weights: int64 ``[L, H]``.

    None is below `floor_of` or above the number of slots, and the mean is ``count``.

    Args:
        weights: ``[L, H]``, not negative.
        count: mean number of slots that stay.
        x: of the context.
    """
    low, high, total = floor_of(count, x), x.keys.shape[2], count * weights.numel()
    flat = weights.double().flatten().clamp_min(1e-12)
    least, most = 0.0, high / float(flat.min())
    for _ in range(100):  # the factor at which the bounded counts have the right sum
        middle = (least + most) / 2
        least, most = (middle, most) if float((flat * middle).clamp(low, high).sum()) < total else (least, middle)
    exact = (flat * most).clamp(low, high)
    found = exact.floor().long()
    missing = total - int(found.sum())
    found[(exact - found).argsort(descending=True)[:missing]] += 1
    return found.view(weights.shape)


def global_scores(x: ScoreInput, radius: int = 0) -> Tensor:
    """Return D's scores: κ in units of its spread in the whole model, plus δ in those of its layer.

    Args:
        x: of the context.
        radius: neighbours on either side over which both are averaged first.
    """
    kappa, delta = (neighbour_mean(one, radius) for one in (unrotated(x), centred(x)))
    kappa = (kappa - kappa.mean()) / kappa.std()
    return kappa + (delta - delta.mean(dim=(1, 2), keepdim=True)) / delta.std(dim=(1, 2), keepdim=True)


def global_candidate(radius: int = 0) -> Candidate:
    """D: one competition of all layers and heads, with `global_scores`."""

    def prepare(context: Prefilled) -> Keep:
        scores = global_scores(context.x, radius)
        return lambda count: keep_global(scores, context.x, count)

    return Candidate(f"D, radius {radius}" if radius else "D", "unequal", prepare)


def table_of(contexts: Sequence[Prefilled], share: float) -> Tensor:
    """Return D's mean shares of a budget over calibration contexts: float64 ``[L, H]``, of mean 1.

    Args:
        contexts: of any lengths.
        share: of the context that stays, for which the table is made.
    """
    found = []
    for context in contexts:
        count = round(share * context.length)
        found.append(keep_global(global_scores(context.x), context.x, count).sum(dim=-1).double() / count)
    return torch.stack(found).mean(dim=0)


def table_candidate(name: str, tables: dict[float, Tensor], score: Score) -> Candidate:
    """Return a candidate whose counts are a table, which no context changes.

    Args:
        name: of the candidate.
        tables: weights ``[L, H]`` by the share of a context that stays; the nearest is used.
        score: decides within a head.
    """

    def prepare(context: Prefilled) -> Keep:
        places = order(score(context.x), context.x)

        def keep(count: int) -> Tensor:
            share = min(tables, key=lambda one: abs(one - count / context.length))
            return places < counts_of(tables[share], count, context.x)[..., None]

        return keep

    return Candidate(name, "unequal", prepare)


def surprisal_candidate(name: str, score: Score) -> Candidate:
    """A3: half of what is free goes to the most surprising tokens, the same in all heads; a score chooses the rest."""

    def prepare(context: Prefilled) -> Keep:
        x, scores = context.x, score(context.x)
        surprise = neighbour_mean(context.surprisal, 2)
        surprise[: x.sinks] = surprise[context.length - x.window :] = -torch.inf
        ranked = surprise.argsort(descending=True, stable=True)

        def keep(count: int) -> Tensor:
            quota = ranked[: (count - x.sinks - x.window) // 2]
            raised = scores.index_fill(2, quota, torch.inf)
            return best(raised, x)(count)

        return keep

    return Candidate(name, "shared", prepare)
