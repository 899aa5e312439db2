"""Pools: the measured card, sizes, what Nitro pays for, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro import kernel_compactor
from nitro.bench import pools, shapes
from nitro.errors import SettingsError

QWEN, LLAMA = shapes.find("qwen2.5-0.5b"), shapes.find("llama-3.1-8b")


def parse(text: str, model: shapes.Model = QWEN, requests: int = 2048, tokens: int = 2000) -> pools.Pool:
    return pools.parse(text, model, block_size=16, itemsize=2, requests=requests, tokens=tokens)


def test_the_l4_has_the_blocks_that_were_measured_on_one() -> None:
    assert parse("l4") == pools.Pool("l4", 91_750, literal=False)
    assert parse("L4", LLAMA).blocks == 1414  # 24 GB less 16 GB of weights


def test_blocks_sizes_and_what_the_load_needs() -> None:
    assert parse("91750") == pools.Pool("91750", 91_750, literal=True)
    assert parse("40GiB").blocks == 40 * 2**30 // (16 * 12_288)
    assert parse("1.5 gb").blocks == 1_500_000_000 // (16 * 12_288)
    full = parse("full")
    assert full.literal
    assert full.blocks >= 239_258  # at most so many were in use when these requests ran without a limit


@given(requests=st.integers(1, 4000), tokens=st.integers(1, 5000), block=st.sampled_from([16, 32]))
def test_what_is_needed_holds_all_requests_and_the_null_block(requests: int, tokens: int, block: int) -> None:
    found = pools.needed_blocks(requests, tokens, block)
    assert (found - 1) * block >= requests * tokens


@given(blocks=st.integers(0, 10**6), model=st.sampled_from([QWEN, LLAMA]), itemsize=st.sampled_from([1, 2]))
def test_nitro_fits_into_the_same_memory(blocks: int, model: shapes.Model, itemsize: int) -> None:
    left = pools.nitro_blocks(blocks, model, block_size=16, itemsize=itemsize)
    cached = 16 * model.kv_bytes(itemsize)
    positions = model.layers * kernel_compactor.positions_bytes(model.kv_heads, 16)
    taken = left * (cached + positions) + kernel_compactor.SCRATCH_BYTES
    assert left == 0 or taken <= blocks * cached
    assert taken + cached + positions > blocks * cached  # and not one block less than fits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "h300",
            r"pool='h300' is no pool: give a number of blocks \(91750\), a size \(40GiB\), a card \(l4\), or full",
        ),
        ("40", r"pool=40 is 40 blocks of 16 tokens, below the 127 that one request of 2000 tokens needs"),
        ("1MiB", r"pool=1MiB is 5 blocks"),
        ("-5", "is no pool"),
    ],
)
def test_bad_pools(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(text)


def test_a_card_that_the_weights_fill() -> None:
    with pytest.raises(SettingsError, match=r"weights of 30.0 GB leave nothing of its 24 GB"):
        pools.card_bytes("l4", 30 * 10**9)
