"""What scores of FP8 caches have to be: of every number that there is, and under scales."""

from __future__ import annotations

import score_cases as cases
import torch

from nitro.kernels import score
from nitro.kernels.paged import PagedLayers, RaggedBatch

NOT_FINITE = {torch.float8_e4m3fn: 2, torch.float8_e5m2: 8}  # of 256 numbers


def check_numbers(dtype: torch.dtype, stride: int, device: str = "cpu") -> None:
    """Keys of one number, which is their norm; the other element is zero, and so are the values."""
    bits = torch.arange(256, dtype=torch.uint8)
    memory = torch.zeros(1, 1, 256, 4 * stride, dtype=torch.uint8)
    memory[0, 0, :, 0] = bits
    layers = PagedLayers.of([memory.to(device)[..., ::stride].view(dtype)])
    batch = RaggedBatch.of([[0]], [256], [256], window=1, device=device)
    want = bits.view(dtype).float().abs()
    want = torch.where(want.isfinite(), want, torch.nan)
    assert want.isnan().sum() == NOT_FINITE[dtype]
    got = -score.knorm(layers, batch)[0, 0].cpu()
    assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1))
    assert not score.vnorm(layers, batch).any()


def check_scales(dtype: torch.dtype, device: str = "cpu") -> None:
    """By powers of two, exactly; the scores that are ratios keep their bits."""
    case = cases.make_case(cases.Shape(2, 2, 8, 32, dtype), [21, 8], bad=0.05, device=device)
    powers = torch.randint(-8, 9, (2, 2, 2), generator=torch.Generator().manual_seed(0)).to(device)
    ones, scaled = (PagedLayers.of(case.layers.caches, scales) for scales in (None, 2.0**powers))
    of_keys, of_values = 2.0 ** powers[:, 0, :, None], 2.0 ** powers[:, 1, :, None]
    for score_of, factor in (
        (score.knorm, of_keys),
        (score.vnorm, of_values),
        (score.vnorm_centred, of_values),
        (score.keydiff, 1.0),
        (score.gravity, 1.0),
    ):
        want = score_of(ones, case.batch) * factor
        assert torch.equal(score_of(scaled, case.batch).nan_to_num(7e9), want.nan_to_num(7e9))
