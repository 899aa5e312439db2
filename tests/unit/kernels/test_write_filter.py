"""What a write filter does to a chunked prefill on stock paged attention, and where it changes nothing."""

from __future__ import annotations

from pathlib import Path

import filter_experiment as experiment
import pytest
import torch
from filter_experiment import (
    BUDGET,
    NEWEST,
    PROMPT,
    SINKS,
    TABLE,
    chunked,
    influence,
    needed,
    new_engine,
    prefill,
    prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import Engine, Model
from write_filter import filter_slots_ref

MODEL = Model()
DOCUMENT = Path(__file__).parents[3] / "docs" / "kernels.md"
# docs/kernels.md has these figures. Rejected tokens; stale reads, and queries with one; with shorter lengths: queries
# that read the wrong set, that miss themselves, that read nothing, survivors that do not even read what they would if
# the rejected did not exist; peak slots, with the chunk written and with an attention of our own.
FIGURES = {
    "1": (0, 0, 0, 0, 0, 0, 0, 13, 12),
    "8": (0, 0, 0, 0, 0, 0, 0, 20, 12),
    "16": (22, 293, 62, 64, 24, 4, 2, 28, 12),
    "32": (42, 883, 62, 64, 44, 30, 2, 44, 12),
    "64": (52, 1898, 62, 64, 54, 52, 2, 64, 12),
    "2, then 31": (42, 882, 62, 62, 42, 28, 0, 43, 12),
}


def assert_same(got: experiment.Outcome, want: experiment.Outcome) -> None:
    """Bit for bit."""
    assert got.content.keys() == want.content.keys()
    assert all(torch.equal(got.content[p], want.content[p]) for p in want.content)
    assert got.logits is not None
    assert torch.equal(got.logits, want.logits)
    assert bool(want.logits.isfinite().all())


@pytest.mark.parametrize("name", TABLE)
def test_figures_of_the_documentation(name: str) -> None:
    chunks, figures = TABLE[name], experiment.row(MODEL, TABLE[name])
    assert figures == FIGURES[name]
    cells = " | ".join(f"{figure:,}" for figure in figures)
    assert f"| {name} | {cells} |" in DOCUMENT.read_text(encoding="utf-8")
    # The same by arithmetic: a rejected token is missed by all queries of its chunk from its own on.
    rejected = stale = peak = end = 0
    for size in chunks:
        dropped = [i for i in range(size) if SINKS <= end + i < end + size - NEWEST]
        rejected += len(dropped)
        stale += sum(size - i for i in dropped)
        peak = max(peak, min(end, BUDGET) + size)
        end += size
    assert figures[:2] == (rejected, stale)
    assert figures[-2:] == (peak, BUDGET)


@pytest.mark.parametrize("size", [1, 4, NEWEST])
def test_chunks_within_the_newest_have_nothing_to_filter(size: int) -> None:
    """One-token decode steps among them: a chunk of tokens that all stay is written as ever."""
    want = prefill(MODEL, prompt(), chunked(size), "write")
    for mode in ("filter", "filter, shorter", "filter last layer"):
        got = prefill(MODEL, prompt(), chunked(size), mode)
        assert got.unwritten == 0
        assert_same(got, want)


def test_filtering_alone_reads_what_others_left() -> None:
    got = prefill(MODEL, prompt(), chunked(32), "filter")
    assert got.logits is not None
    assert bool(got.logits.isnan().all())  # of memory that was never written
    engine = new_engine(MODEL)
    for address in range(PROMPT + 8):  # another request's rows
        for layer in range(2):
            engine.cache[layer][address] = MODEL.key_value(layer, MODEL.embed(address % 7, address))
    mapping = engine.mapping(range(32))
    whole, _ = engine.run(prompt()[:32], range(32), [mapping] * 2, 32)
    bounds = torch.tensor([SINKS], dtype=torch.int32), torch.tensor([32 - NEWEST])
    starts = torch.tensor([0, 32], dtype=torch.int32)
    mapping = filter_slots_ref(mapping, torch.arange(32), starts, *bounds)
    other = new_engine(MODEL)
    other.cache = [
        {address: MODEL.key_value(layer, MODEL.embed(address % 7, address)) for address in range(PROMPT + 8)}
        for layer in range(2)
    ]
    filtered, _ = other.run(prompt()[:32], range(32), [mapping] * 2, 32)
    changed = [not torch.equal(a, b) for a, b in zip(whole, filtered, strict=True)]
    assert changed == [False] * SINKS + [True] * (32 - SINKS)  # finite, and wrong


def test_shorter_lengths_are_as_if_the_tokens_had_never_been_computed() -> None:
    """If the rejected come first in each chunk, as when the sinks have a chunk of their own. That is not eviction."""
    chunks = chunked(31, first=SINKS)
    tokens = prompt()
    got = prefill(MODEL, tokens, chunks, "filter, shorter")
    never = prefill(MODEL, tokens, chunks, "never computed")
    assert_same(got, never)
    want = prefill(MODEL, tokens, chunks, "write")
    assert got.content.keys() == want.content.keys()
    differs = {p for p in want.content if not torch.equal(got.content[p][1], want.content[p][1])}
    assert differs == set(want.content) - set(range(SINKS))  # all that came after a rejected token
    assert got.logits is not None
    assert float((got.logits - want.logits).abs().max()) > 0.1


def test_shorter_lengths_misalign_survivors_before_a_rejected_token() -> None:
    """With the sinks in the same chunk as rejected tokens, not even that."""
    got = prefill(MODEL, prompt(), chunked(32), "filter, shorter")
    never = prefill(MODEL, prompt(), chunked(32), "never computed")
    assert not any(torch.equal(got.content[p][1], never.content[p][1]) for p in range(SINKS))


@pytest.mark.parametrize("size", [16, 31, 32, 64])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_last_layer_of_a_chunk_without_logits_may_be_filtered(num_layers: int, size: int) -> None:
    """Exact, with NaN in what is not written. It saves no slot, since the other layers need them."""
    model, tokens, chunks = Model(num_layers), prompt(), chunked(size)
    want = prefill(model, tokens, chunks, "write")
    got = prefill(model, tokens, chunks, "filter last layer")
    assert_same(got, want)
    assert got.peak == want.peak
    if len(chunks) == 1:
        assert got.unwritten == 0  # its logits are used
    else:
        assert got.unwritten == want.rejected - max(chunks[-1] - NEWEST, 0) > 0


def test_rows_that_are_loaded_may_be_filtered() -> None:
    """Rows from elsewhere (a KV connector) have no queries in the step that brings them: exact, and slots are saved."""
    tokens, loaded = prompt(), 40
    source = new_engine(MODEL)
    source.run(tokens[:loaded], range(loaded), [source.mapping(range(loaded))] * 2, loaded)
    survivors = [p for p in range(loaded) if p < SINKS or p >= loaded - NEWEST]

    written, filtered = new_engine(MODEL), new_engine(MODEL)
    bounds = torch.tensor([SINKS], dtype=torch.int32), torch.tensor([loaded - NEWEST])
    ranks = [sum(q < p for q in survivors) for p in range(loaded)]
    starts = torch.tensor([0, loaded], dtype=torch.int32)
    mapping = filter_slots_ref(filtered.mapping(ranks), torch.arange(loaded), starts, *bounds)
    assert int((mapping >= 0).sum()) == BUDGET
    for layer in range(2):
        rows, _ = source.read(layer, loaded)
        written.write(layer, written.mapping(range(loaded)), rows, range(loaded))
        filtered.write(layer, mapping, rows, range(loaded))
    written.slots, filtered.slots = list(range(loaded)), list(survivors)
    written.compact(survivors)

    results = []
    for engine in (written, filtered):
        assert engine.slots == survivors
        new = range(loaded, loaded + 8)
        mappings = [engine.mapping(range(BUDGET, BUDGET + 8))] * 2
        hidden, seen = engine.run(tokens[loaded : loaded + 8], new, mappings, BUDGET + 8)
        engine.slots += new
        assert seen[0][-1] == [*survivors, *new]
        results.append((torch.stack(hidden), engine.content()))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][p], results[1][1][p]) for p in results[0][1])
    assert len(filtered.tags[0]) == BUDGET + 8  # addresses ever touched
    assert len(written.tags[0]) == loaded


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_which_rows_are_needed(data: st.DataObject, num_layers: int, size: int, sampled: bool) -> None:
    """The recurrence says of every (token, layer) what gradients say, for any choice of survivors."""
    keep = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(num_layers)]
    if data.draw(st.booleans()):  # trailing tokens that all layers reject: the only other case
        cut = data.draw(st.integers(0, size))
        keep = [kept[:cut] + [False] * (size - cut) for kept in keep]
    model = Model(num_layers, seed=5)
    assert needed(keep, sampled) == influence(model, prompt(size), keep, sampled)


def test_with_the_newest_kept_only_the_last_layer_is_spared() -> None:
    for num_layers in (1, 2, 4):
        keep = [[False] * 6 + [True] * 3 for _ in range(num_layers)]
        everything = [[True] * 9] * num_layers
        assert needed(keep, sampled=True) == everything
        assert needed(keep, sampled=False) == [*everything[1:], keep[-1]]


def test_trailing_tokens_that_all_layers_reject_may_be_filtered() -> None:
    """They might as well not be computed; and no policy with a window rejects the newest."""
    tokens, size, cut = prompt(), 20, 15
    runs: list[Engine] = []
    for unwritten in (False, True):
        engine = new_engine(MODEL)
        mapping = engine.mapping(range(size))
        if unwritten:
            mapping[cut:] = -1
        engine.run(tokens[:size], range(size), [mapping] * 2, size)
        engine.slots = list(range(size))
        engine.compact(range(cut))
        runs.append(engine)
    contents = [engine.content() for engine in runs]
    assert all(torch.equal(contents[0][p], contents[1][p]) for p in range(cut))


@pytest.mark.parametrize("name", TABLE)
def test_attention_over_the_unwritten_chunk(name: str) -> None:
    """Chunk and cache apart, merged by log-sum-exp: what Nitro computes, up to rounding, in ``BUDGET`` slots."""
    want = prefill(MODEL, prompt(), TABLE[name], "write")
    got = prefill(MODEL, prompt(), TABLE[name], "own attention")
    assert got.content.keys() == want.content.keys()
    for position, rows in want.content.items():
        torch.testing.assert_close(got.content[position], rows, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-11, atol=1e-11)
    assert got.peak == BUDGET
    assert got.unwritten == 2 * want.rejected
