"""Arithmetic on the scores of a row, in PyTorch: ranks, and means over neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_ranks(scores: Tensor) -> Tensor:
    """Return each score's rank in its row: 0 for the lowest, 1 for the highest, equal ones share the mean of theirs.

    Args:
        scores: float32 ``[..., N]``; NaN is not ranked, and stays NaN.
    """
    bad = scores.isnan()
    row = scores.masked_fill(bad, math.inf).contiguous()
    ordered = row.sort(dim=-1).values
    twice = torch.searchsorted(ordered, row) + torch.searchsorted(ordered, row, right=True) - 1
    last = ((~bad).sum(dim=-1, keepdim=True) - 1).clamp_min(1)
    return (twice.float() / (2.0 * last)).masked_fill(bad, math.nan)


def neighbour_mean(scores: Tensor, radius: int) -> Tensor:
    """Return the mean of each score and those of up to ``radius`` slots before and after it.

    Args:
        scores: float32 ``[..., N]``, in logical order; NaN counts in no mean, and stays NaN.
        radius: slots on either side; fewer at the ends.
    """
    bad = scores.isnan()
    ends = (radius, radius)
    filled = torch.nn.functional.pad(scores.masked_fill(bad, 0.0), ends)
    counted = torch.nn.functional.pad((~bad).float(), ends)
    length = scores.shape[-1]
    sums, counts = torch.zeros_like(scores), torch.zeros_like(scores)
    for shift in range(2 * radius + 1):  # one order of additions, whatever else is in the batch
        sums += filled[..., shift : shift + length]
        counts += counted[..., shift : shift + length]
    return (sums / counts.clamp_min(1.0)).masked_fill(bad, math.nan)
