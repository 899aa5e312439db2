"""Write-time scoring and the write filter compiled, also under CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import write_cases as cases
import write_filter
import write_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import no_synchronisation

from nitro.kernels.paged import PagedLayers, RaggedBatch

pytestmark = pytest.mark.gpu

# Each is compiled anew, so not every combination; every value of every property occurs.
SHAPES = [
    cases.Shape(1, 2, 16, 64, torch.bfloat16, "nhd"),
    cases.Shape(1, 8, 16, 128, torch.float16, "hnd"),
    cases.Shape(1, 3, 32, 80, torch.float16, "odd"),
    cases.Shape(1, 1, 128, 256, torch.float32, "nhd"),
    cases.Shape(1, 2, 7, 33, torch.bfloat16, "strided"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_any_step(shape: cases.Shape, data: st.DataObject) -> None:
    cases.check_writes(data.draw(cases.steps(most=300, shape=shape, device="cuda")))


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_whole_steps(tokens: int) -> None:
    cases.check_writes(cases.make_step(SHAPES[0], tokens, padding=64, device="cuda"))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 200), max_size=5), st.sampled_from([7, 16]), st.integers(0, 2**31))
def test_read(lengths: list[int], block_size: int, seed: int) -> None:
    cases.check_read(cases.Shape(2, 2, block_size, 32), lengths, seed, "cuda")


def test_read_a_long_request() -> None:
    cases.check_read(cases.Shape(1, 1, 16, 32), [5000, 3], device="cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_written_scores_are_those_at_the_eviction(dtype: torch.dtype) -> None:
    cases.check_same_as_at_eviction(cases.Shape(1, 2, 16, 64, dtype), [300, 1, 77], device="cuda")


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 20), st.integers(0, 2**31))
def test_filter(lengths: list[int], padding: int, seed: int) -> None:
    cases.check_filter(lengths, padding, seed, "cuda")


@pytest.mark.parametrize("lengths", [[1] * 2048, [8192], [0] * 40 + [1]])
def test_filter_whole_steps(lengths: list[int]) -> None:
    cases.check_filter(lengths, 64, device="cuda")


def test_a_graph_replays_with_other_tokens() -> None:
    """One graph for all steps of a size: slots, keys and padding change under it."""
    step = cases.make_step(SHAPES[0], 100, layout="qkv", bad=0.0, unwritten=0.0, device="cuda")
    other = cases.make_step(SHAPES[0], 100, layout="qkv", bad=0.0, unwritten=0.5, seed=1, device="cuda")
    positions = torch.arange(100, device="cuda")
    starts = torch.tensor([0, 60, 90], dtype=torch.int32, device="cuda")  # ten tokens are padding
    sinks = torch.tensor([4, 0], dtype=torch.int32, device="cuda")
    newest = torch.tensor([50, 80], device="cuda")
    slots = torch.empty_like(step.slot_mapping)

    def run() -> None:
        write_filter.filter_slots(step.slot_mapping, positions, starts, sinks, newest, out=slots)
        write_scores.write_knorm(step.keys, slots, step.scores)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for source in (other, cases.make_step(SHAPES[0], 100, unwritten=0.1, seed=2, device="cuda")):
        step.keys.copy_(source.keys)
        step.slot_mapping.copy_(source.slot_mapping)
        step.scores.fill_(cases.UNTOUCHED)
        graph.replay()
        want = step.scores.clone().fill_(cases.UNTOUCHED)
        filtered = write_filter.filter_slots_ref(source.slot_mapping, positions, starts, sinks, newest)
        write_scores.write_knorm_ref(source.keys, filtered, want)
        assert torch.equal(slots, filtered)
        assert int((filtered >= 0).sum()) > 5
        torch.testing.assert_close(step.scores, want, rtol=1e-5, atol=1e-18, equal_nan=True)


def test_nothing_waits_for_the_device() -> None:
    step = cases.make_step(SHAPES[0], 40, device="cuda")
    layers = PagedLayers.of([step.cache])
    batch = RaggedBatch.of([[1, 0]], [20], [20], device="cuda")
    starts = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    bound, positions = starts[:1].clone(), torch.arange(40, device="cuda")

    def everything() -> None:
        write_scores.write_cache(step.keys, step.values, step.slot_mapping, step.cache, step.scores)
        write_scores.write_vnorm(step.values, step.slot_mapping, step.scores)
        write_scores.read_scores(layers, batch, step.scores[None])
        write_filter.filter_slots(step.slot_mapping, positions, starts, bound, bound.long())

    everything()  # compiles
    with no_synchronisation():
        everything()


def test_wide() -> None:
    cases.check_wide("cuda")
