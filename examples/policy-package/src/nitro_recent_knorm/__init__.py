"""Keep tokens whose keys are short, and newer ones rather than older ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nitro.policies.base import Policy, ScoreInput, row_norms


@dataclass(frozen=True, slots=True)
class RecentKNorm(Policy):
    """``score_i = -||k_i|| / mean ||k|| - weight * age_i / length``, within each layer and KV head.

    Attributes:
        weight: how much a whole context of age counts, in mean norms; 0 is the order of ``knorm``.
    """

    name: ClassVar[str] = "recent-knorm"
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense; Nitro shows the message at start-up."""
        if not 0 <= self.weight <= 1e6:
            raise ValueError(f"weight={self.weight} is not in [0, 1e6]: 0 looks at norms alone, 1 is the default")

    def score(self, x: ScoreInput) -> Tensor:
        """Return the scores of all slots: float32 ``[L, H, N]``."""
        norms = row_norms(x.keys)
        age = (x.logical_len - x.positions).float() / x.logical_len
        return -norms / norms.mean(dim=-1, keepdim=True).clamp_min(1e-30) - self.weight * age
