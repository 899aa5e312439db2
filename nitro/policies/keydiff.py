"""Keep the tokens whose keys point away from the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, row_norms, zero_rows

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput

# Keys and anchors shorter than this have no direction worth the name; they score 0, as if at right angles.
_MIN_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class KeyDiff(Policy):
    """KeyDiff (https://arxiv.org/abs/2504.15364): keys that differ from the rest draw much attention.

    ``score_i = -cos(k_i, a)`` with the anchor ``a = mean_n k_n / ||k_n||`` over all slots of the (layer, KV head),
    sinks and window among them. This is the paper's anchor over unit keys, not its cheaper form over raw keys, and
    without its own recent window: Nitro's selection forces that. The keys are those in the cache, after RoPE.
    """

    name: ClassVar[str] = "keydiff"
    capturable: ClassVar[bool] = True

    @property
    def highest(self) -> float:
        """What no score exceeds."""
        return 1.0

    def score(self, x: ScoreInput) -> Tensor:
        """Return the negated cosine between each key and the anchor."""
        return key_differences(x.keys, row_norms(x.keys))

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the negated cosine between each key and the anchor, in one launch."""
        return kernels.keydiff(x.layers, x.batch)


def key_differences(keys: Tensor, norms: Tensor) -> Tensor:
    """Return KeyDiff's scores, float32 ``[L, H, N]``.

    Args:
        keys: ``[L, H, N, D]``.
        norms: float32 ``[L, H, N]``, their norms; NaN for slots that score NaN and do not count in the anchor.
    """
    bad = norms.isnan()
    rows = zero_rows(keys, bad)
    inverse = norms.clamp_min(_MIN_NORM).reciprocal().nan_to_num(0.0)
    # Layer by layer, so that what lies between stays in the processor's cache: several times faster on a CPU.
    cosines = torch.stack([_cosines_to_anchor(*layer) for layer in zip(rows, inverse, strict=True)])
    return -cosines.masked_fill(bad, math.nan)


def _cosines_to_anchor(keys: Tensor, inverse_norms: Tensor) -> Tensor:
    """Return ``[H, N]`` from keys ``[H, N, D]`` and ``[H, N]`` in one layer; zero keys do not count in the anchor."""
    unit = keys * inverse_norms.unsqueeze(-1)
    anchor = unit.sum(dim=-2, keepdim=True)
    anchor = anchor / torch.linalg.vector_norm(anchor, dim=-1, keepdim=True).clamp_min(_MIN_NORM)
    # Products and sums rather than a matmul: a matmul's bits may depend on how many heads are in the batch.
    return unit.mul_(anchor).sum(dim=-1)
