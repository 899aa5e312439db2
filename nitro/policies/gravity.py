"""Keep the tokens that the recent window attracts most: the physics scoring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, check_number, row_norms, zero_rows

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput

# Pairwise distances are computed in chunks of at most this many (slot, window slot) pairs, 4 MiB.
_PAIRS_PER_CHUNK = 1 << 20
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Gravity(Policy):
    """Tokens are masses in key space; those that the recent tokens pull on hardest stay.

    In each (layer, KV head), with W the last ``window`` slots,

        m_i = ||v_i|| / mean_n ||v_n||
        s^2 = mean_{n,n'} ||k_n - k_n'||^2 = 2 mean_n ||k_n - mean k||^2
        g_i = m_i * sum_{j in W, j != i} m_j / (||k_i - k_j||^2 / s^2 + softening^2)
        score_i = g_i / mean_n g_n

    From the essay that Nitro started from: tokens as bodies whose masses come from their value norms, attracted by
    the recent window with the inverse square of the distance between keys. Ours: the softening (as in N-body
    simulation; near duplicates of a recent key would otherwise outweigh everything), masses and distances in units
    of the head's own means, so that one softening fits all heads, no self-attraction, the mean score of 1, and scoring
    each layer and KV head by itself.

    The distances come from ``||a||^2 + ||b||^2 - 2 a.b`` of centred keys, never from ``[N, W, D]`` differences.

    Attributes:
        softening: softening length, in units of the root mean square distance s; 0.001 to 10.
    """

    name: ClassVar[str] = "gravity"
    capturable: ClassVar[bool] = True
    softening: float = 0.1

    def __post_init__(self) -> None:
        check_number(self.name, "softening", self.softening, 1e-3, 10.0)

    def score(self, x: ScoreInput) -> Tensor:
        """Return the gravity on each slot, with mean 1 in each (layer, KV head)."""
        mass = row_norms(x.values)
        bad = row_norms(x.keys).isnan() | mass.isnan()
        count = (~bad).sum(dim=-1, keepdim=True).clamp_min(1)  # [L, H, 1]
        mass = mass.masked_fill(bad, 0.0)
        mass = mass / (mass.sum(dim=-1, keepdim=True) / count).clamp_min(_TINY)
        keys = zero_rows(x.keys, bad)
        # Head by head, since a batched matmul's bits may depend on how many heads are in the batch.
        heads = zip(keys.flatten(0, 1), mass.flatten(0, 1), bad.flatten(0, 1), count.flatten(0, 1), strict=True)
        gravity = mass * torch.stack([self._pull(*head, x.window) for head in heads]).view_as(mass)
        mean = gravity.sum(dim=-1, keepdim=True) / count
        return (gravity / mean.clamp_min(_TINY)).masked_fill(bad, math.nan)

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the gravity on each slot, in one launch (three where the window is not in its place)."""
        return kernels.gravity(x.layers, x.batch, softening=self.softening, order=x.window_order())

    def _pull(self, keys: Tensor, mass: Tensor, bad: Tensor, count: Tensor, window: int) -> Tensor:
        """Return the window's pull on a unit mass in each slot of one (layer, head): ``[N]``.

        Args:
            keys: float32 ``[N, D]``, zero where bad.
            mass: float32 ``[N]``, zero where bad.
            bad: bool ``[N]``.
            count: ``[1]``, the number of slots that are not bad, at least 1.
            window: slots that pull, at the end.
        """
        # Distances do not change when all keys move together, and near the origin less of them cancels.
        keys = keys - keys.sum(dim=0) / count
        square = torch.linalg.vector_norm(keys, dim=-1).square()
        scale = (2.0 * square.masked_fill(bad, 0.0).sum() / count).clamp_min(_TINY)
        num_slots = len(keys)
        first = max(0, num_slots - window)
        recent = torch.arange(first, num_slots, device=keys.device)
        chunk = max(1, _PAIRS_PER_CHUNK // len(recent))
        pulls = []
        for start in range(0, num_slots, chunk):
            stop = min(start + chunk, num_slots)
            squares = square[start:stop, None] + square[first:]  # [chunk, W]
            distance = torch.addmm(squares, keys[start:stop], keys[first:].T, alpha=-2.0)
            distance = distance.clamp_min_(0.0).div_(scale)
            force = mass[first:] / distance.add_(self.softening**2)
            itself = torch.arange(start, stop, device=keys.device)[:, None] == recent
            pulls.append(force.masked_fill_(itself, 0.0).sum(dim=-1))
        return torch.cat(pulls)
