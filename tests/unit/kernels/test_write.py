"""Write-time scoring and the write filter in Triton's interpreter; ahead-of-time compilation of their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compile_variants
import pytest
import torch
import write_cases as cases
import write_filter
import write_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.kernels.paged import PagedLayers, RaggedBatch

from .conftest import interpreted

ARCHS = (80, 89, 90)


@interpreted
@settings(max_examples=40)
@given(cases.steps(most=40))
def test_any_step(step: cases.Step) -> None:
    cases.check_writes(step)


@interpreted
@pytest.mark.parametrize("layout", cases.INPUTS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_input(layout: str, dtype: torch.dtype) -> None:
    cases.check_writes(cases.make_step(cases.Shape(1, 2, 16, 80, dtype, "odd"), 70, layout=layout, padding=3))


@interpreted
@settings(max_examples=25)
@given(st.lists(st.integers(0, 60), max_size=4), st.sampled_from([7, 16]), st.integers(1, 3), st.integers(0, 2**31))
def test_read(lengths: list[int], block_size: int, heads: int, seed: int) -> None:
    cases.check_read(cases.Shape(2, heads, block_size, 32), lengths, seed)


@interpreted
def test_read_over_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_scores, "_SLOTS", 16)
    cases.check_read(cases.Shape(1, 2, 8, 32), [100, 1, 16, 0, 17])


@interpreted
@settings(max_examples=10)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from(cases.DTYPES), st.integers(0, 2**31))
def test_written_scores_are_those_at_the_eviction(lengths: list[int], dtype: torch.dtype, seed: int) -> None:
    cases.check_same_as_at_eviction(cases.Shape(1, 2, 8, 64, dtype), lengths, seed)


@interpreted
@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 20), st.integers(0, 2**31))
def test_filter(lengths: list[int], padding: int, seed: int) -> None:
    cases.check_filter(lengths, padding, seed)


@interpreted
@pytest.mark.parametrize("lengths", [[1] * 300, [0] * 40 + [1], [700], [0, 0, 512, 0, 0, 3, 0]])
def test_filter_over_several_programs(lengths: list[int]) -> None:
    cases.check_filter(lengths, 5)


@interpreted
def test_wide() -> None:
    cases.check_wide()


@interpreted
def test_number_of_launches_is_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launched: list[object] = []
    launch = GridExecutor.__call__

    def counted(self: object, *args: object, **kwargs: object) -> object:
        launched.append(self)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    for lengths in ([3], [40, 3, 17, 25]):
        step = cases.make_step(cases.Shape(1, 2, 8, 32), sum(lengths))
        launched.clear()
        write_scores.write_cache(step.keys, step.values, step.slot_mapping, step.cache, step.scores)
        write_scores.write_knorm(step.keys, step.slot_mapping, step.scores)
        assert len(launched) == 2
        launched.clear()
        cases.check_read(cases.Shape(3, 2, 8, 32), lengths)
        assert len(launched) == 2  # it reads twice
        launched.clear()
        cases.check_filter(lengths, 3)
        assert len(launched) == 2  # likewise


def test_refusals() -> None:
    keys, mapping, scores = torch.zeros(5, 2, 64), torch.zeros(5, dtype=torch.int64), torch.zeros(3, 2, 8)
    write = write_scores.write_knorm_ref
    with pytest.raises(TypeError, match=r"keys of torch.float64 can't be scored: use float16"):
        write(keys.double(), mapping, scores)
    with pytest.raises(TypeError, match=r"slot_mapping must be torch.int64, got torch.int32"):
        write(keys, mapping.int(), scores)
    with pytest.raises(ValueError, match="slot_mapping has 5 tokens, above the 4 of keys"):
        write(keys[:4], mapping, scores)
    with pytest.raises(ValueError, match=r"scores must be \[-1, 2, -1\]"):
        write(keys, mapping, scores[:, :1])
    with pytest.raises(ValueError, match="head_dim=320 must be 2 to 256"):
        write(torch.zeros(5, 2, 320), mapping, scores)
    with pytest.raises(ValueError, match=r"scores is \[3, 2, 8\], which does not fit cache \[4, 2, 8, 128\]"):
        write_scores.write_cache(keys, keys, mapping, torch.zeros(4, 2, 8, 128), scores)
    layers, batch = PagedLayers.of([torch.zeros(3, 2, 8, 128)]), RaggedBatch.of([[1]], [5], [5])
    with pytest.raises(ValueError, match=r"scores must be \[1, 3, 2, 8\]"):
        write_scores.read_scores_ref(layers, batch, scores)
    bounds = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query_start_loc must be \[2\]"):
        write_filter.filter_slots_ref(mapping, mapping, torch.zeros(3, dtype=torch.int32), *bounds)
    with pytest.raises(ValueError, match="slot_mapping has 5 tokens, but sinks no request"):
        write_filter.filter_slots_ref(mapping, mapping, bounds[0], bounds[0][:0], bounds[1][:0])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """By (variant, architecture); compiled in a process of its own, without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}
    folder = str(Path(compile_variants.__file__).parent)
    code = f"""
import json, sys
sys.path.insert(0, {folder!r})
import compile_variants, write_filter, write_scores
for variant in write_scores.variants() + write_filter.variants():
    for arch in {ARCHS}:
        print(json.dumps([variant.name, arch, compile_variants.outcome(variant, arch)]))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, capture_output=True, text=True)
    return {(name, arch): outcome for name, arch, outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_and_fits(outcomes: dict[tuple[str, int], dict[str, Any]], arch: int) -> None:
    variants = write_scores.variants() + write_filter.variants()
    assert {name for name, where in outcomes if where == arch} == {variant.name for variant in variants}
    for variant in variants:
        outcome = outcomes[variant.name, arch]
        assert "error" not in outcome, (variant.name, outcome)
        assert outcome["shared"] <= 99 * 1024
        assert outcome["spilled"] == 0, (variant.name, outcome)
        if variant.name.startswith("write-") and "80" not in variant.name:
            assert "ld.global.v4.b32" in outcome["accesses"], (variant.name, outcome)
