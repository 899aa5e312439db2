"""Keep tokens drawn at random: the null that every other policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from nitro.kernels import score as kernels
from nitro.kernels.paged import to_device
from nitro.policies.base import Policy, ScoreInput

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195): its increment, and the
# (right shift, multiplier) pairs and last shift of its output function.
GAMMA = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Random(Policy):
    """A counter-based uniform draw: the same token of the same request gets the same score everywhere.

    With 64-bit unsigned arithmetic that wraps, and SplitMix64's output function as ``mix``,

        absorb(h, c) = mix((h ^ c) + GAMMA)
        h = absorb(absorb(absorb(absorb(absorb(0, seed), request_key), layer), head), position)
        score = (h >> 40) * 2**-24

    so a score is a multiple of 2**-24 in [0, 1), exact in float32, and depends on nothing but these five numbers:
    neither on the rank, the batch, the process, nor on earlier evictions or a recomputation after preemption. Only
    64-bit multiply, xor, shift and add are used, so that a kernel can give the same bits.
    """

    name: ClassVar[str] = "random"

    @property
    def highest(self) -> float:
        """What no score exceeds."""
        return 1.0

    def score(self, x: ScoreInput) -> Tensor:
        """Return a uniform draw for each slot."""
        request = absorb_int(absorb_int(0, x.seed), x.request_key)
        positions = x.positions.to(torch.int64)
        layers, heads = x.layers.to(positions), x.heads.to(positions)  # few numbers, which may lie on the host
        h = absorb(torch.full_like(layers, _signed(request)), layers)
        h = absorb(absorb(h[:, None], heads)[:, :, None], positions)
        return _shift_right(h, 40).to(torch.float32) * 2.0**-24

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return a uniform draw for each slot, in one launch."""
        states = np.array([kernels.random_state(x.seed, key) for key in x.request_keys], np.int64)
        (states_there,) = to_device([states], x.batch.device)
        return kernels.random(x.layers, x.batch, states_there, x.layer_ids, x.head_ids, x.positions)


def absorb_int(h: int, counter: int) -> int:
    """``absorb`` of the class docstring on Python integers, both unsigned 64-bit, as is the result."""
    z = ((h ^ counter) + GAMMA) & _MASK
    for shift, multiplier in ROUNDS:
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return z ^ (z >> LAST_SHIFT)


def absorb(h: Tensor, counter: Tensor) -> Tensor:
    """``absorb`` of the class docstring on int64 tensors that hold the unsigned bits; they broadcast."""
    z = (h ^ counter) + _signed(GAMMA)
    for shift, multiplier in ROUNDS:
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    return z ^ _shift_right(z, LAST_SHIFT)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # int64's own shift copies the sign into the top bits; clear them.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
