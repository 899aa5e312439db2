"""Keep the tokens whose keys, with RoPE undone, and whose values differ from the others'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, check_integer, check_number, row_norms
from nitro.policies.combine import mean_ranks, neighbour_mean
from nitro.policies.keydiff import key_differences
from nitro.policies.rotary import keydiff_unrotated
from nitro.policies.vdiff import MOST_NEIGHBOURS, value_differences

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput


_OF_VALUES = 1.0 + 2.0**-12
"""Weight of the value's rank: sums of two ranks are often equal, and this tells them apart."""


@dataclass(frozen=True, slots=True)
class KVDiff(Policy):
    """``score_i = rank(keydiff_i) + rank(||v_i - mean v||) + recency * rank(position_i)``.

    KeyDiff (https://arxiv.org/abs/2504.15364) on keys with RoPE undone, and the centred value norm. RoPE turns equal
    keys apart by their distance, so that cached keys differ from each other by position as well as by content. The two
    are in units of their own, hence ranks: 0 for the lowest score among the slots of a (layer, KV head), 1 for the
    highest. Of equal sums the one whose value's rank is higher stays. Where the model's rotation cannot be undone, keys
    are scored as they are in the cache, with a warning.

    Attributes:
        recency: weight of a third rank, that of the position: how much newer tokens are preferred; 0 to 10.
        radius: neighbours on either side, in logical order among the tokens that are still held, over which keydiff
            (not the values' norms) is averaged before it is ranked; 0 to 64.
    """

    name: ClassVar[str] = "kvdiff"
    capturable: ClassVar[bool] = True
    undoes_rope: ClassVar[bool] = True
    recency: float = 0.25
    radius: int = 4

    def __post_init__(self) -> None:
        check_number(self.name, "recency", self.recency, 0.0, 10.0)
        check_integer(self.name, "radius", self.radius, 0, MOST_NEIGHBOURS)

    @property
    def highest(self) -> float:
        """What no score exceeds."""
        return 1.0 + _OF_VALUES + self.recency

    def score(self, x: ScoreInput) -> Tensor:
        """Return the sum of each slot's ranks."""
        keys = x.unrotated_keys()
        norms = row_norms(keys)
        bad = norms.isnan() | row_norms(x.values).isnan()
        of_keys = key_differences(keys, norms.masked_fill(bad, torch.nan))
        scores = mean_ranks(neighbour_mean(of_keys, self.radius) if self.radius else of_keys)
        scores = scores + _OF_VALUES * mean_ranks(value_differences(x.values, bad))
        if self.recency:
            scores = scores + self.recency * mean_ranks((x.positions - x.logical_len).float())
        return scores

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the same, in four launches of kernels, three more with recency, and three with a radius."""
        keys, values = keydiff_unrotated(x), kernels.vnorm_centred(x.layers, x.batch)
        bad = keys.isnan() | values.isnan()  # is ranked in neither; the values' mean knows nothing of bad keys
        keys.masked_fill_(bad, torch.nan)
        values.masked_fill_(bad, torch.nan)
        if self.radius:
            keys = kernels.neighbour_mean(x.batch, keys, self.radius, order=x.order())
        scores = kernels.rank_sum(x.batch, keys, values, weights=(1.0, _OF_VALUES), evictable=False)
        if self.recency:
            age = kernels.streaming(x.layers, x.batch, x.logical_lengths, x.positions)
            scores += kernels.rank_sum(x.batch, age, age, weights=(self.recency, 0.0), evictable=False)
        return scores
