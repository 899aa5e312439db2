"""Selection compiled, against the reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import select_cases as cases
import torch
import wide_checks
from hypothesis import given, settings
from paged_cases import no_synchronisation

from nitro.kernels import select

pytestmark = pytest.mark.gpu


@settings(max_examples=100)
@given(cases.cases(longest=600, most=6, device="cuda"))
def test_select(case: cases.Case) -> None:
    cases.check_select(case, select.select_ragged)


@pytest.mark.parametrize("tile", [32, 1024])
@settings(max_examples=30)
@given(case=cases.cases(longest=3000, device="cuda"))
def test_select_over_several_tiles(tile: int, case: cases.Case) -> None:
    cases.check_select(case, select.select_ragged, tile=tile)


@pytest.mark.parametrize("flavour", cases.FLAVOURS)
@pytest.mark.parametrize("length", [511, 512, 513, 1025, 2049, 4097, 8192, 8193, 131_072])
def test_every_tile(flavour: str, length: int) -> None:
    lengths = [length, 1, length // 2]
    keep = [length // 3, 1, length // 2 - 1]
    case = cases.make_case(lengths, keep, flavour=flavour, layers=2, heads=2, window=1, device="cuda")
    cases.check_select(case, select.select_ragged)
    theta = case.scores.nan_to_num(0.0, 0.0, 0.0)[0, 0, 0]
    cases.check_threshold(case, theta, select.threshold_ragged)


@pytest.mark.parametrize("theta", [0.0, -0.0, 1e-45, math.inf, -math.inf, math.nan])
def test_thresholds(theta: float) -> None:
    case = cases.make_case([100, 3000], [100, 3000], flavour="patterns", layers=2, protect=1, window=2, device="cuda")
    cases.check_threshold(case, torch.tensor(theta, device="cuda"), select.threshold_ragged)


def test_nothing_waits_for_the_device() -> None:
    case = cases.make_case([100, 3000], [50, 1000], device="cuda")
    theta = torch.zeros((), device="cuda")
    select.select_ragged(case.scores, case.batch)  # compiles
    select.threshold_ragged(case.scores, case.batch, theta)
    with no_synchronisation():
        select.select_ragged(case.scores, case.batch)
        select.threshold_ragged(case.scores, case.batch, theta)


@pytest.mark.parametrize("shape", wide_checks.WIDE_LEADS)
def test_wide(shape: tuple[int, int, int]) -> None:
    wide_checks.check_wide_selection(shape, "cuda")
