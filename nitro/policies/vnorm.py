"""Keep the tokens whose values are long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, row_norms

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput


@dataclass(frozen=True, slots=True)
class VNorm(Policy):
    """``score_i = ||v_i||``: at equal attention, a long value moves the output more than a short one.

    The value norm is one factor of the score of Guo et al. (https://arxiv.org/abs/2406.12335), who multiply the
    received attention with the value's L1 norm. Used alone and as an L2 norm, as here, it is not their method.
    """

    name: ClassVar[str] = "vnorm"
    capturable: ClassVar[bool] = True

    def score(self, x: ScoreInput) -> Tensor:
        """Return the norm of each value."""
        return row_norms(x.values)

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the norm of each value, in one launch."""
        return kernels.vnorm(x.layers, x.batch)
