"""How far a kernel's scores may be from the reference: the one table, and how it is applied."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Bounds(NamedTuple):
    """Of the errors of one request, in units of the largest magnitude in its (layer, KV head)."""

    maximum: float
    rms: float


EXACT = Bounds(0.0, 0.0)
_SUM = Bounds(2e-6, 5e-7)  # a few sums of a hundred float32 terms
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)

# Caches are upcast before anything is computed, so their dtype matters only where cancellation uncovers their rounding.
_TABLE: dict[tuple[str, torch.dtype], Bounds] = {
    (op, dtype): bounds
    for op, bounds in {
        "random": EXACT,
        "streaming": EXACT,
        "order": EXACT,
        "knorm": _SUM,
        "vnorm": _SUM,
        "vnorm_centred": Bounds(4e-6, 1e-6),
        "keydiff": Bounds(4e-6, 1e-6),
        "keydiff_unrotated": Bounds(8e-6, 2e-6),
        "lagkv": Bounds(4e-6, 1e-6),
        "neighbour_mean": _SUM,
        "rank_sum": Bounds(3e-7, 1e-7),
        "zscore_sum": Bounds(2e-5, 4e-6),
    }.items()
    for dtype in _DTYPES
} | {
    # A token next to one of the window: its distance is the difference of numbers a hundred times as large.
    ("gravity", dtype): Bounds(1e-3, 1e-4)
    for dtype in _DTYPES
}


def bounds_of(op: str, dtype: torch.dtype) -> Bounds:
    return _TABLE[op, dtype]


def assert_close(got: torch.Tensor, want: torch.Tensor, op: str, dtype: torch.dtype) -> None:
    """Compare scores ``[L, H, N]`` of one request: the same NaNs and infinities, and the rest within bounds."""
    got, want = got.cpu(), want.cpu()
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan()), (op, "NaNs differ")
    assert torch.equal(got.isinf(), want.isinf()), (op, "infinities differ")
    if not want.numel():
        return
    bounds = bounds_of(op, dtype)
    if bounds == EXACT:
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), op
        return
    finite = want.isfinite()
    error = (got - want).double().masked_fill(~finite, 0.0).abs()
    scale = want.double().masked_fill(~finite, 0.0).abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = error / scale
    rms = (error.square().sum(-1) / finite.sum(-1).clamp_min(1)).sqrt()
    assert float(error.max()) <= bounds.maximum, (op, dtype, "maximum", float(error.max()))
    assert float(rms.max()) <= bounds.rms, (op, dtype, "rms", float(rms.max()))
