"""Candidates that keep equal counts: Nitro's policies as they are, and scores that are only simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from sim_prefill import Prefilled
from torch import Tensor

from nitro import policies
from nitro.eval.settings import PolicyChoice
from nitro.kernels.select import select_topk_ref
from nitro.policies.base import ScoreInput, row_norms
from nitro.policies.combine import mean_ranks, neighbour_mean
from nitro.policies.keydiff import key_differences
from nitro.policies.vdiff import value_differences

Kind = Literal["nitro", "simulated", "kvpress", "shared", "unequal"]
"""Whose it is; ``shared``: all heads share a part of their tokens; ``unequal``: counts differ by head."""
Keep = Callable[[int], Tensor]
"""From the mean number of tokens that stay of a (layer, KV head) to bool ``[L, H, N]``: which stay."""
Score = Callable[[ScoreInput], Tensor]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to choose what stays.

    Attributes:
        name: unique.
        kind: of candidate.
        prepare: looks at a context once, for all budgets.
    """

    name: str
    kind: Kind
    prepare: Callable[[Prefilled], Keep]


def best(scores: Tensor, x: ScoreInput) -> Keep:
    """Return the rule of Nitro's selection: sinks, window, and the highest scores of each (layer, KV head)."""

    def keep(count: int) -> Tensor:
        chosen = select_topk_ref(scores, count, x.sinks, x.window)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, chosen, True)

    return keep


def nitro_candidate(label: str) -> Candidate:
    """Return one of Nitro's policies, ``NAME:OPTION=VALUE:...``."""
    choice = PolicyChoice.parse(label)
    policy = policies.get(choice.name, **choice.options)
    return Candidate(label, "nitro", lambda context: best(policy.score(context.x), context.x))


def unrotated(x: ScoreInput) -> Tensor:
    """KeyDiff's score of keys with RoPE undone: κ."""
    keys = x.unrotated_keys()
    return key_differences(keys, row_norms(keys))


def centred(x: ScoreInput) -> Tensor:
    """The norm of the centred values: δ."""
    return value_differences(x.values, row_norms(x.values).isnan())


def leverage(rows: Tensor) -> Tensor:
    """Return the norms of centred rows whose channels have been made uncorrelated: ``[L, H, N, D] -> [L, H, N]``.

    Ridge leverage, with a ridge of a hundredth of the mean variance.
    """
    centred_rows = rows.float() - rows.float().mean(dim=2, keepdim=True)
    covariance = centred_rows.transpose(2, 3) @ centred_rows / rows.shape[2]
    ridge = 0.01 * covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    inverse = torch.linalg.inv(covariance + ridge * torch.eye(rows.shape[3]))
    return ((centred_rows @ inverse) * centred_rows).sum(dim=-1).clamp_min(0).sqrt()


def neighbour_max(scores: Tensor, radius: int) -> Tensor:
    """Return the largest of each score and those of up to ``radius`` slots before and after it: ``[L, H, N]``."""
    return torch.nn.functional.max_pool1d(scores, 2 * radius + 1, stride=1, padding=radius)


def _ranks(*scores: Tensor) -> Tensor:
    return torch.stack([mean_ranks(one) for one in scores]).sum(dim=0)


def _kv(x: ScoreInput) -> Tensor:
    return policies.get("kvdiff", radius=0, recency=0.0).score(x)


def _rotated(x: ScoreInput) -> Tensor:
    return policies.get("keydiff").score(x)


SCORES: dict[str, Score] = {
    "avg1(kvdiff)": lambda x: neighbour_mean(_kv(x), 1),
    "avg2(kvdiff)": lambda x: neighbour_mean(_kv(x), 2),
    "avg4(kvdiff)": lambda x: neighbour_mean(_kv(x), 4),
    "max2(kvdiff)": lambda x: neighbour_max(_kv(x), 2),
    "r(avg2 κ)+r(avg2 δ)": lambda x: _ranks(neighbour_mean(unrotated(x), 2), neighbour_mean(centred(x), 2)),
    "r(κ)+r(avg4 δ)": lambda x: _ranks(unrotated(x), neighbour_mean(centred(x), 4)),
    "r(keydiff)+r(vdiff)": lambda x: _ranks(_rotated(x), neighbour_mean(centred(x), 4)),
    "r(κ)∨r(δ)": lambda x: torch.maximum(mean_ranks(unrotated(x)), mean_ranks(centred(x))),
    "κ": unrotated,
    "avg2(κ)": lambda x: neighbour_mean(unrotated(x), 2),
    "avg4(κ)": lambda x: neighbour_mean(unrotated(x), 4),
    "avg8(κ)": lambda x: neighbour_mean(unrotated(x), 8),
    "max4(κ)": lambda x: neighbour_max(unrotated(x), 4),
    "r(avg4 κ)+r(δ)": lambda x: _ranks(neighbour_mean(unrotated(x), 4), centred(x)),
    "r(avg4 κ)+r(avg4 δ)": lambda x: _ranks(neighbour_mean(unrotated(x), 4), neighbour_mean(centred(x), 4)),
    "r(κ)+r(avg4 κ)+r(avg4 δ)": lambda x: _ranks(
        unrotated(x), neighbour_mean(unrotated(x), 4), neighbour_mean(centred(x), 4)
    ),
    "avg4((1+κ)δ)": lambda x: neighbour_mean((1 + unrotated(x)) * centred(x), 4),
    "avg4(leverage K)": lambda x: neighbour_mean(leverage(x.unrotated_keys()), 4),
    "max4(δ)": lambda x: neighbour_max(centred(x), 4),
    "avg2(leverage K+V)": lambda x: neighbour_mean(_ranks(leverage(x.unrotated_keys()), leverage(x.values)), 2),
    "avg4(leverage V)": lambda x: neighbour_mean(leverage(x.values), 4),
}
"""Simulated-only scores. κ: KeyDiff on keys with RoPE undone; δ: centred value norm; r: rank among a head's tokens;
avgW and maxW: mean and maximum over W neighbours on either side; ∨: the larger of two."""


def simulated_candidate(name: str) -> Candidate:
    """Return one of ``SCORES``."""
    score = SCORES[name]
    return Candidate(name, "simulated", lambda context: best(score(context.x), context.x))
