"""Keep the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.policies.base import Policy, ScoreInput

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput


@dataclass(frozen=True, slots=True)
class Streaming(Policy):
    """StreamingLLM (https://arxiv.org/abs/2309.17453): the sinks and the newest tokens stay.

    ``score_i = position_i - logical_len``, the negated age. An age is exact in float32 up to 2**24 tokens, which a
    position itself would not be for the newest tokens of a longer context.
    """

    name: ClassVar[str] = "streaming"
    capturable: ClassVar[bool] = True

    @property
    def highest(self) -> float:
        """What no score exceeds."""
        return -1.0

    def score(self, x: ScoreInput) -> Tensor:
        """Return the negated age of each slot, in tokens."""
        return (x.positions - x.logical_len).to(torch.float32)

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return minus the age of each token, in one launch."""
        return kernels.streaming(x.layers, x.batch, x.logical_lengths, x.positions)
