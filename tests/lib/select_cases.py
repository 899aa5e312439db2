"""Scores with everything that makes a selection hard, for ragged batches, and the checks of a selection of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from paged_cases import poisoned_empty

from nitro.kernels.paged import RaggedBatch
from nitro.kernels.select import select_ragged_ref, threshold_ragged_ref

INTERESTING = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4028234663852886e38, 1.0000001)
# NaNs of either sign, quiet and signalling, the two infinities and the largest number, and the smallest subnormals.
PATTERNS = np.array(
    [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x80000001, 0, 0x80000000],
    np.uint32,
)
FLAVOURS = ("normal", "ties", "close", "patterns", "bits", "equal", "nan")

Select = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One batch and its scores float32 [L, H, total]; block tables are empty, since selection does not look at them."""

    scores: torch.Tensor
    batch: RaggedBatch


def make_scores(shape: tuple[int, ...], flavour: str, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if flavour == "normal":
        scores = rng.standard_normal(shape, np.float32)
    elif flavour == "ties":
        scores = rng.integers(-2, 3, shape).astype(np.float32) * np.float32(0.5)
    elif flavour == "close":  # keys that differ in the lowest bits only
        scores = (rng.integers(0, 40, shape).astype(np.uint32) + 0x3F7FFFF0).view(np.float32)
    elif flavour == "patterns":
        scores = rng.choice(PATTERNS, shape).view(np.float32)
    elif flavour == "bits":
        scores = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    else:
        scores = np.full(shape, math.nan if flavour == "nan" else -1.5, np.float32)
    return torch.from_numpy(scores)


def make_case(
    lengths: list[int],
    keep: Any,
    *,
    flavour: str = "normal",
    layers: int = 1,
    heads: int = 1,
    protect: Any = 0,
    window: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    batch = RaggedBatch.of([[]] * len(lengths), lengths, keep, protect=protect, window=window, device=device)
    return Case(make_scores((layers, heads, batch.total), flavour, seed).to(device), batch)


@st.composite
def cases(draw: st.DrawFn, *, longest: int, most: int = 3, device: str = "cpu") -> Case:
    """Ragged batches with forced slots; counts per request, or per (request, layer, KV head)."""
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, longest)), max_size=most))
    layers, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    window = draw(st.one_of(st.just(0), st.integers(0, longest)))
    protect, keep, equal = [], [], draw(st.booleans())
    for length in lengths:
        protect.append(draw(st.one_of(st.just(0), st.integers(0, length))))
        low = min(protect[-1] + window, length)
        counts = st.one_of(st.sampled_from([low, max(low, length - 1), length]), st.integers(low, length))
        rows = 1 if equal else layers * heads
        keep.append(draw(st.lists(counts, min_size=rows, max_size=rows)))
    counts_array = np.asarray(keep, np.int32).reshape(len(lengths), *(() if equal else (layers, heads)))
    return make_case(
        lengths,
        counts_array,
        flavour=draw(st.sampled_from(FLAVOURS)),
        layers=layers,
        heads=heads,
        protect=protect,
        window=window,
        seed=draw(st.integers(0, 2**31)),
        device=device,
    )


def check_select(case: Case, select: Select, **options: Any) -> None:
    """The selection is the reference's, bit for bit, counts included, and changes none of its input."""
    before = case.scores.clone()
    with poisoned_empty():
        mask, counts = select(case.scores, case.batch, **options)
    want_mask, want_counts = select_ragged_ref(case.scores, case.batch)
    assert mask.dtype == torch.uint8
    assert counts.dtype == torch.int32
    assert torch.equal(mask, want_mask)
    assert torch.equal(counts, want_counts)
    assert torch.equal(case.scores.view(torch.int32), before.view(torch.int32))


def check_threshold(case: Case, theta: torch.Tensor, threshold: Select, **options: Any) -> None:
    with poisoned_empty():
        mask, counts = threshold(case.scores, case.batch, theta, **options)
    want_mask, want_counts = threshold_ragged_ref(case.scores, case.batch, theta)
    assert torch.equal(mask, want_mask)
    assert torch.equal(counts, want_counts)
