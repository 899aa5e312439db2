"""Selection: which slots of each (layer, head) stay, given their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from nitro.kernels._checks import check_device, check_ragged
from nitro.kernels._triton.variants import Variant
from nitro.kernels.paged import RaggedBatch

TILES = (512, 1024, 2048, 4096, 8192)
"""Slots that one program looks at together; up to the last, a request's keys stay in registers, 16 in each thread."""
LONG_TILE = 4096
_SLOTS_PER_WARP = 512

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


def select_ragged(scores: Tensor, batch: RaggedBatch, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Mark the slots that stay, for all requests, layers and KV heads in one launch.

    In each (request, layer, KV head) the first ``protect`` slots, the last ``window``, and the best of the rest stay,
    ``keep`` in all; order and ties as in ``select_topk_ref``. Counts are exact whatever the scores are, and also where
    the batch breaks its contract: ``keep`` is clamped to [0, length], and forced slots beyond it lose from the back.

    Args:
        scores: float32 ``[L, H, total]``, contiguous along the slots; higher stays.
        batch: the requests; block tables are not looked at.
        tile: slots per tile, a power of two; default by ``max_length``.

    Returns:
        The keep mask, uint8 ``[L, H, total]`` of ones and zeros, and the counts, int32 ``[R, L, H]``.

    Raises:
        TypeError: scores are not float32.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    check_ragged("scores", scores, torch.float32, batch)
    check_device(scores.device, "select_ragged_ref")
    mask, counts = _outputs(scores, batch)
    if counts.numel():
        from nitro.kernels._triton.select import topk_kernel

        block, num_warps = _shape(batch.max_length, tile)
        topk_kernel[(counts.numel(),)](
            scores,
            mask,
            counts,
            batch.lengths,
            batch.keep,
            batch.protect,
            batch.offsets,
            *scores.stride()[:2],
            *mask.stride()[:2],
            *batch.keep_strides,
            batch.window,
            *scores.shape[:2],
            BLOCK=block,
            ONE_TILE=batch.max_length <= block,
            num_warps=num_warps,
        )
    return mask, counts


def select_ragged_ref(scores: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Mark the slots that stay, as ``select_ragged`` does, one (request, layer, KV head) at a time."""
    check_ragged("scores", scores, torch.float32, batch)
    mask, counts = _outputs(scores, batch)
    keep = batch.keep.reshape(batch.num_requests, *batch.keep.shape[1:] or (1, 1)).expand_as(counts)
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        protect = min(int(batch.protect[request]), length)
        window = min(batch.window, length - protect)
        for layer, head in torch.cartesian_prod(*map(torch.arange, scores.shape[:2])).tolist():
            count = int(keep[request, layer, head])
            row = slice(first, first + length)
            mask[layer, head, row] = 0
            mask[layer, head, row][select_topk_ref(scores[layer, head, row], count, protect, window)] = 1
            counts[request, layer, head] = count
    return mask, counts


def threshold_ragged(
    scores: Tensor, batch: RaggedBatch, theta: Tensor, *, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mark the slots with ``score >= theta`` and the forced ones, and count them, in one launch.

    No NaN reaches a threshold, and no score one that is NaN. To compact by the result, take the counts as ``keep`` of
    the batch.

    Args:
        scores: float32 ``[L, H, total]``, contiguous along the slots.
        batch: the requests; block tables and ``keep`` are not looked at.
        theta: float32, broadcastable to ``[R, L, H]``, on the device.
        tile: slots per tile, a power of two; default by ``max_length``.

    Returns:
        The keep mask, uint8 ``[L, H, total]`` of ones and zeros, and the counts, int32 ``[R, L, H]``.

    Raises:
        TypeError: scores or theta are not float32.
        ValueError: shapes, strides or devices do not fit, or Triton cannot run on the device.
    """
    check_ragged("scores", scores, torch.float32, batch)
    check_device(scores.device, "threshold_ragged_ref")
    mask, counts = _outputs(scores, batch)
    theta = _expanded(theta, counts)
    if counts.numel():
        from nitro.kernels._triton.select import threshold_kernel

        block, num_warps = _shape(batch.max_length, tile)
        threshold_kernel[(counts.numel(),)](
            scores,
            mask,
            counts,
            theta,
            batch.lengths,
            batch.protect,
            batch.offsets,
            *scores.stride()[:2],
            *mask.stride()[:2],
            *theta.stride(),
            batch.window,
            *scores.shape[:2],
            BLOCK=block,
            num_warps=num_warps,
        )
    return mask, counts


def threshold_ragged_ref(scores: Tensor, batch: RaggedBatch, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the slots that reach ``theta``, as ``threshold_ragged`` does, one request at a time."""
    check_ragged("scores", scores, torch.float32, batch)
    mask, counts = _outputs(scores, batch)
    theta = _expanded(theta, counts)
    for request, (first, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        row = slice(first, first + length)
        slots = torch.arange(length, device=scores.device)
        forced = (slots < batch.protect[request]) | (slots >= length - batch.window)
        bound = theta[request, :, :, None]
        reached = (_ordered_bits(scores[..., row]) >= _ordered_bits(bound)) & ~scores[..., row].isnan()
        mask[..., row] = (reached & ~bound.isnan()) | forced
        counts[request] = mask[..., row].sum(-1)
    return mask, counts


def _outputs(scores: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    num_layers, num_heads, total = scores.shape
    mask = torch.empty(num_layers, num_heads, total, dtype=torch.uint8, device=scores.device)
    return mask, torch.empty(batch.num_requests, num_layers, num_heads, dtype=torch.int32, device=scores.device)


def _expanded(theta: Tensor, counts: Tensor) -> Tensor:
    if theta.dtype != torch.float32:
        raise TypeError(f"theta must be float32, got {theta.dtype}: convert it")
    if theta.device != counts.device:
        raise ValueError(f"theta is on {theta.device}, must be on {counts.device}: move it")
    try:
        return theta.expand_as(counts)
    except RuntimeError:
        raise ValueError(
            f"theta is {list(theta.shape)}, must be broadcastable to {list(counts.shape)}, [R, L, H]"
        ) from None


def _shape(max_length: int, tile: int | None) -> tuple[int, int]:
    """Return the slots per tile, and the warps that look at one."""
    if tile is None:
        tile = next((tile for tile in TILES if tile >= max_length), LONG_TILE)
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile={tile} must be a power of two")
    return tile, min(max(tile // _SLOTS_PER_WARP, 1), 32)


def variants() -> list[Variant]:
    """Return what ``select_ragged`` and ``threshold_ragged`` may launch."""
    from nitro.kernels._triton.select import threshold_kernel, topk_kernel

    array = {"scores": "*fp32", "mask": "*u8", "counts": "*i32"}
    requests = {"lengths": "*i32", "protect": "*i32", "offsets": "*i64"}
    found = []
    for tile, one_tile in (*((tile, True) for tile in TILES), (LONG_TILE, False)):
        block, num_warps = _shape(tile, tile)
        name, constexprs = f"topk-{tile}{'' if one_tile else '-long'}", {"BLOCK": block, "ONE_TILE": one_tile}
        found.append(Variant(name, topk_kernel, array | requests | {"keep": "*i32"}, constexprs, num_warps))
    for tile in TILES:
        block, num_warps = _shape(tile, tile)
        pointers = array | requests | {"theta": "*fp32"}
        found.append(Variant(f"threshold-{tile}", threshold_kernel, pointers, {"BLOCK": block}, num_warps))
    return found


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
