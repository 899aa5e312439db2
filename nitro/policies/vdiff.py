"""Keep the tokens whose values differ from the others', and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, check_integer, row_norms, zero_rows
from nitro.policies.combine import neighbour_mean

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput

MOST_NEIGHBOURS = 64


@dataclass(frozen=True, slots=True)
class VDiff(Policy):
    """``score_i = mean over |j - i| <= radius of ||v_j - mean v||``, j counted in logical order.

    A value that all tokens share adds the same to every output whatever is kept, so that only what differs from it is
    lost. A token's neighbours count, since facts are spelt in several tokens, not all of which stand out.

    Attributes:
        radius: neighbours on either side, among the tokens that are still held; 0 to 64.
    """

    name: ClassVar[str] = "vdiff"
    capturable: ClassVar[bool] = True
    radius: int = 4

    def __post_init__(self) -> None:
        check_integer(self.name, "radius", self.radius, 0, MOST_NEIGHBOURS)

    def score(self, x: ScoreInput) -> Tensor:
        """Return the mean distance of each value and its neighbours from the mean value."""
        return neighbour_mean(value_differences(x.values, row_norms(x.values).isnan()), self.radius)

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the same, in four launches: one for the norms, two for the logical order, one for the means."""
        norms = kernels.vnorm_centred(x.layers, x.batch)
        return kernels.neighbour_mean(x.batch, norms, self.radius, order=x.order()) if self.radius else norms


def value_differences(values: Tensor, bad: Tensor) -> Tensor:
    """Return ``||v - mean v||``, the mean over the slots of each (layer, KV head): float32 ``[L, H, N]``.

    Args:
        values: ``[L, H, N, D]``.
        bad: bool ``[L, H, N]``, slots that score NaN and do not count in the mean.
    """
    rows = zero_rows(values, bad)
    count = (~bad).sum(dim=-1, keepdim=True).clamp_min(1).unsqueeze(-1)
    # Layer by layer, as in `key_differences`.
    norms = torch.stack(
        [row_norms(one - one.sum(dim=-2, keepdim=True) / n) for one, n in zip(rows, count, strict=True)]
    )
    return norms.masked_fill(bad, torch.nan)
