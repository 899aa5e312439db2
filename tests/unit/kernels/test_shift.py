"""Slots instead of tokens, as reference and as kernel."""

from __future__ import annotations

import pytest
import shift_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels import shift

from .conftest import interpreted

SHIFT = [
    pytest.param(shift.shift_to_slots, id="kernel", marks=interpreted),
    pytest.param(shift.shift_to_slots_ref, id="ref"),
]


@pytest.mark.parametrize("shift_of", SHIFT)
@settings(max_examples=25)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 300)), max_size=5), st.integers(0, 2**31))
def test_shift(shift_of: cases.Shift, counts: list[int], seed: int) -> None:
    cases.check_shift(shift_of, counts, seed=seed)


@pytest.mark.parametrize("shift_of", SHIFT)
def test_refusals(shift_of: cases.Shift) -> None:
    ints, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    good = [ints[:2], ints, longs, ints.clone(), longs.clone(), ints.clone()]
    for index, wrong, error, said in (
        (0, longs, TypeError, r"evicted must be torch\.int32"),
        (1, ints[:2], ValueError, "query_start_loc has 2 elements, must have at least 3"),
        (3, ints[:1], ValueError, "seq_lens has 1 elements, must have at least 2"),
        (4, longs[::2], ValueError, "physical has 2 elements, must have at least 4"),
        (5, ints[::2], ValueError, "logical has stride 2"),
    ):
        with pytest.raises(error, match=said):
            shift_of(*[wrong if number == index else x for number, x in enumerate(good)])
