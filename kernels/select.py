"""Selection: which slots of each (layer, head) stay, given their scores."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign
_INFINITY = 0x7F800000  # +inf; larger magnitudes are NaNs
_NAN_KEY = -(2**31) + 1  # below -inf's, and not so low that the tie-break below would wrap around


def select_topk_ref(scores: Tensor, keep: int, protect: int, window: int) -> Tensor:
    """Return the slots that stay: the first ``protect``, the last ``window``, and the best of the rest.

    Exact on every device: ties go to the lower slot, -0.0 equals 0.0, NaN is below -inf, and the count is ``keep``
    whatever the scores are. Each row of the leading dimensions is selected by itself.

    Args:
        scores: float32 ``[..., N]``, any strides; higher stays.
        keep: slots that stay, ``protect + window <= keep <= N``.
        protect: first slots that stay whatever their score.
        window: last slots that stay whatever their score.

    Returns:
        int64 ``[..., keep]``, slot indices in ascending order.

    Raises:
        TypeError: if the scores are not float32.
        ValueError: if a count is out of bounds.
    """
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, got {scores.dtype}: convert them first")
    if scores.ndim == 0:
        raise ValueError("scores must be [..., N], got a scalar")
    num_slots = scores.shape[-1]
    if protect < 0 or window < 0:
        raise ValueError(f"protect={protect} and window={window} must not be negative")
    if protect + window > keep:
        raise ValueError(f"protect={protect} + window={window} = {protect + window} is above keep={keep}: raise keep")
    if keep > num_slots:
        raise ValueError(f"keep={keep} is above the number of slots, {num_slots}: lower keep")

    slots = torch.arange(num_slots, device=scores.device)
    # Distinct integers, so that whatever order top-k looks at them in, there is one right answer.
    rank = (_ordered_bits(scores).to(torch.int64) << 32) - slots
    forced = (slots < protect) | (slots >= num_slots - window)
    rank = rank.masked_fill(forced, torch.iinfo(torch.int64).max)
    return rank.topk(keep, dim=-1, sorted=False).indices.sort(dim=-1).values


def _ordered_bits(scores: Tensor) -> Tensor:
    """Return int32 keys that compare as the floats do, with -0.0 equal to 0.0 and every NaN below -inf.

    Integer operations only: a comparison of floats may flush subnormal ones to zero, depending on the device.
    """
    bits = scores.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    # Negative floats run backwards: flipping all bits but the sign's reverses them.
    keys = torch.where(bits < 0, ~magnitude, magnitude)
    keys = keys.masked_fill(magnitude == 0, 0)
    return keys.masked_fill(magnitude > _INFINITY, _NAN_KEY)
