"""Keep the tokens whose values are long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nitro.policies.base import Policy, ScoreInput, row_norms


@dataclass(frozen=True, slots=True)
class VNorm(Policy):
    """``score_i = ||v_i||``: at equal attention, a long value moves the output more than a short one.

    The value norm is one factor of the score of Guo et al. (https://arxiv.org/abs/2406.12335), who multiply the
    received attention with the value's L1 norm. Used alone and as an L2 norm, as here, it is not their method.
    """

    name: ClassVar[str] = "vnorm"

    def score(self, x: ScoreInput) -> Tensor:
        """Return the norm of each value."""
        return row_norms(x.values)
