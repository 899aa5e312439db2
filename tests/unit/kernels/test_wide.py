"""Slots and columns beyond 2**31 elements."""

from __future__ import annotations

import pytest
import wide_checks
from paged_cases import Stitch

from nitro.kernels import compact

from .conftest import interpreted

pytestmark = interpreted
pair = pytest.mark.parametrize(
    ("stitch", "reference"),
    [
        pytest.param(compact.pack_ragged, compact.pack_ragged_ref, id="pack"),
        pytest.param(compact.fill_ragged, compact.fill_ragged_ref, id="fill"),
    ],
)
leads = pytest.mark.parametrize("shape", wide_checks.WIDE_LEADS)


@pair
@pytest.mark.parametrize("wide", wide_checks.WIDE_STRIDES)
def test_caches(stitch: Stitch, reference: Stitch, wide: str) -> None:
    wide_checks.check_wide_caches(stitch, reference, wide)


@pair
def test_positions(stitch: Stitch, reference: Stitch) -> None:
    wide_checks.check_wide_positions(stitch, reference)


@leads
def test_selection(shape: tuple[int, int, int]) -> None:
    wide_checks.check_wide_selection(shape)


@pair
@leads
def test_masks_and_moves(stitch: Stitch, reference: Stitch, shape: tuple[int, int, int]) -> None:
    wide_checks.check_wide_masks(stitch, reference, shape)
