"""Keep the tokens whose keys are short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput, row_norms

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput


@dataclass(frozen=True, slots=True)
class KNorm(Policy):
    """Devoto et al. (https://arxiv.org/abs/2406.11430): keys of low L2 norm draw much attention.

    ``score_i = -||k_i||``. RoPE is a rotation, so cached keys have the norms of the keys before it.
    """

    name: ClassVar[str] = "knorm"
    capturable: ClassVar[bool] = True

    @property
    def highest(self) -> float:
        """What no score exceeds."""
        return 0.0

    def score(self, x: ScoreInput) -> Tensor:
        """Return the negated norm of each key."""
        return -row_norms(x.keys)

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return minus the norm of each key, in one launch."""
        return kernels.knorm(x.layers, x.batch)
