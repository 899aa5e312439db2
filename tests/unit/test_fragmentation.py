"""Accounting of evictions in three modes, by hand and beside sets; and the picture of the block map."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nitro.demo import block_map
from nitro.fragmentation import DEAD, MODES, Fragmentation, Mode, Placement, measure, place
from nitro.types import KeepRecord

SIZE = 4


def record(logical_len: int, *heads: list[int]) -> KeepRecord:
    """An eviction in one layer."""
    return KeepRecord("r", 0, logical_len, np.array([heads], np.int32))


# Twelve tokens in three blocks; the first head keeps 0, 1, 9, 11, the second one 0, 2, 10, 11: block 1 is dead.
CHEESE = record(12, [0, 1, 9, 11], [0, 2, 10, 11])


def test_a_block_without_a_live_slot_goes_and_the_others_keep_their_holes() -> None:
    placement = place([CHEESE], "block", SIZE)
    assert placement.held.tolist() == [0, 2]
    assert placement.positions[0, 0].tolist() == [0, 1, DEAD, DEAD, *[DEAD] * 4, DEAD, 9, DEAD, 11]
    assert (placement.allocated(12), placement.live(12), placement.moved) == (8, 4, 0)
    assert (placement.allocated(13), placement.live(13)) == (12, 5), "the next token needs a block of its own"


def test_pack_keeps_the_order_and_fill_moves_less() -> None:
    packed, filled = place([CHEESE], "pack", SIZE), place([CHEESE], "fill", SIZE)
    assert packed.positions[0].tolist() == [[0, 1, 9, 11], [0, 2, 10, 11]]
    assert filled.positions[0].tolist() == [[0, 1, 9, 11], [0, 10, 2, 11]]
    assert (packed.moved, filled.moved) == (2 + 3, 2 + 2)
    for placement in (packed, filled):
        assert placement.held.tolist() == [0]
        assert (placement.allocated(12), placement.live(12)) == (4, 4)
        assert (placement.allocated(13), placement.live(13)) == (8, 5)


def test_steps_are_added_up_from_the_prompt_on() -> None:
    # 11 and 12 tokens in 3 blocks before the eviction; 13 after it.
    assert measure([CHEESE], 11, 13, "block", SIZE) == Fragmentation(12 + 12 + 12, 11 + 12 + 5, 0)
    assert measure([CHEESE], 11, 13, "pack", SIZE) == Fragmentation(12 + 12 + 8, 11 + 12 + 5, 5)
    assert (Fragmentation(8, 4, 1) + Fragmentation(4, 4, 2)).ratio == 1.5


def test_evictions_within_the_prompt_count_from_its_end_on() -> None:
    found = measure([CHEESE], 16, 16, "fill", SIZE)
    assert found == Fragmentation(8, 8, 4)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_dropped_does_not_come_back(mode: Mode) -> None:
    with pytest.raises(ValueError, match="at 13 tokens, kept has positions that were dropped before"):
        place([CHEESE, record(13, [0, 3, 11], [0, 2, 11])], mode, SIZE)


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[KeepRecord], int, int]:
    """Evictions of one request in two layers of two heads, its block size, and the tokens that it ends with."""
    size = draw(st.integers(1, 7))
    length, records = 0, []
    sets = [list[int]() for _ in range(4)]
    for _ in range(draw(st.integers(1, 4))):
        grown = draw(st.integers(2, 20))
        sets = [[*kept, *range(length, length + grown)] for kept in sets]
        length += grown
        keep = draw(st.integers(1, len(sets[0]) - 1))
        # The newest token always stays, as in every policy.
        sets = [sorted([*draw(st.permutations(kept[:-1]))[: keep - 1], kept[-1]]) for kept in sets]
        records.append(KeepRecord("r", 0, length, np.array(sets, np.int32).reshape(2, 2, keep)))
    return records, size, length + draw(st.integers(0, 9))


@given(life=lives(), mode=st.sampled_from(MODES))
def test_every_mode_holds_the_kept_tokens_and_counts_its_blocks(
    life: tuple[list[KeepRecord], int, int], mode: Mode
) -> None:
    records, size, end = life
    kept = records[-1].kept
    placement = place(records, mode, size)
    for layer, head in np.ndindex(2, 2):
        slots = placement.positions[layer, head]
        assert sorted(slots[slots != DEAD].tolist()) == kept[layer, head].tolist()
    keep = kept.shape[-1]
    if mode == "block":
        assert set(placement.held.tolist()) == {position // size for position in kept.ravel().tolist()}
        assert placement.moved == 0
    else:
        assert placement.positions.shape[-1] == keep
        assert len(placement.held) == -(-keep // size)
    for length in range(records[-1].logical_len, end + 1):
        live, allocated = placement.live(length), placement.allocated(length)
        assert live == keep + length - records[-1].logical_len
        assert allocated % size == 0
        if mode != "block":
            assert live <= allocated < live + size, "at most 1 + block_size / budget"
    grown = Placement(mode, 2, 2, size)
    for each in records:
        grown.grow(each.logical_len)
        grown.evict(each.kept)
    expected = grown.allocated(end)
    grown.grow(end)
    assert len(grown.held) * size == expected, "growing by words and by slots agree"


@given(life=lives())
def test_fill_and_pack_hold_the_same_and_block_never_less(life: tuple[list[KeepRecord], int, int]) -> None:
    records, size, end = life
    found = {mode: measure(records, 1, end, mode, size) for mode in MODES}
    assert found["fill"].allocated == found["pack"].allocated
    assert found["fill"].live == found["pack"].live == found["block"].live
    assert found["fill"].moved <= found["pack"].moved
    assert found["block"].allocated >= found["pack"].allocated, "each head's tokens need as many blocks at least"


def test_the_map_shows_each_slot_of_one_head() -> None:
    found = block_map.maps([CHEESE], SIZE, layer=0, head=0)
    assert list(found) == ["before", *MODES]
    free, hole = [block_map.FREE] * 4, block_map.HOLE
    assert found["before"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert found["block"].tolist() == [[0, 1, hole, hole], free, [hole, 9, hole, 11]]
    assert found["pack"].tolist() == [[0, 1, 9, 11], free, free]
    assert block_map.maps([CHEESE], SIZE, 0, 1)["fill"].tolist() == [[0, 10, 2, 11], free, free]


def test_the_picture_has_grey_holes_and_white_freed_blocks(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def pixels(name: str, shown: KeepRecord) -> dict[str, int]:
        block_map.draw([shown], SIZE, 0, 0, "a test", tmp_path / name)
        found = (255 * imread(tmp_path / name)[..., :3]).round().astype(int).reshape(-1, 3)
        colours = {"hole": [0xD9] * 3, "first": [68, 1, 84], "last": [253, 231, 36]}  # viridis' ends
        return {key: int((found == colour).all(axis=1).sum()) for key, colour in colours.items()}

    cheese = pixels("cheese.png", CHEESE)
    cell = cheese["first"] / 4  # position 0 is in all four panels, and a rim of the colour bar
    assert 3.5 < cheese["hole"] / cell < 4.5, "two holes in each of the blocks 0 and 2"
    assert 3.5 < cheese["last"] / cell < 4.5
    whole = pixels("whole.png", record(12, [0, 8, 9, 10, 11], [0, 8, 9, 10, 11]))
    # Three holes in block 0, and three behind the fifth token, once packed and once filled.
    assert 8 < whole["hole"] / (whole["first"] / 4) < 10
