"""Slots instead of tokens, compiled."""

from __future__ import annotations

import pytest
import shift_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import shift

pytestmark = pytest.mark.gpu


@settings(max_examples=40)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 3000)), max_size=40), st.integers(0, 2**31))
def test_shift(counts: list[int], seed: int) -> None:
    cases.check_shift(shift.shift_to_slots, counts, seed=seed, device="cuda")
