"""One small ragged batch through every kernel, for compute-sanitizer: its tools slow a kernel down a hundredfold.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -P -m pytest tests/gpu/kernels/test_sanitize.py

Without torch's caching allocator each tensor is an allocation of its own, so that memcheck sees where it ends.
"""

from __future__ import annotations

import block_cases
import numpy as np
import paged_cases
import pytest
import score_cases
import select_cases
import torch

from nitro.kernels import blocks, compact, select

pytestmark = pytest.mark.gpu

STITCH_SHAPES = [
    paged_cases.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    paged_cases.Shape(1, 2, 8, 80, torch.float32, "odd"),
]
SCORE_SHAPES = [
    score_cases.Shape(2, 2, 16, 64, torch.bfloat16, "nhd"),
    score_cases.Shape(1, 2, 8, 80, torch.float32, "odd"),
    score_cases.Shape(1, 2, 16, 128, torch.float8_e4m3fn, "nhd"),
]


def requests(shape: paged_cases.Shape) -> list[paged_cases.Request]:
    rng, lead = np.random.default_rng(0), (shape.num_layers, shape.num_heads)
    return [paged_cases.Request(n, rng.integers(0, n + 1, lead).astype(np.int32)) for n in (1, 150, 17, 700)]


@pytest.mark.parametrize("shape", STITCH_SHAPES, ids=str)
def test_stitch(shape: paged_cases.Shape) -> None:
    case = paged_cases.make_case(shape, requests(shape), device="cuda")
    paged_cases.check_stitch(case, compact.pack_ragged, fill=False)
    paged_cases.check_stitch(case, compact.fill_ragged, fill=True)
    block_cases.check_copy(case, blocks.copy_blocks, number=9)
    block_cases.check_stamp(case, blocks.stamp_positions)


@pytest.mark.parametrize("lengths", [[300, 1, 9], [5000], [9000]], ids=str)
def test_select(lengths: list[int]) -> None:
    """In one tile, and in several."""
    keep = [max(length // 3, 1) for length in lengths]
    case = select_cases.make_case(lengths, keep, flavour="ties", device="cuda")
    select_cases.check_select(case, select.select_ragged)
    select_cases.check_threshold(case, torch.tensor(0.0, device="cuda"), select.threshold_ragged)


@pytest.mark.parametrize("shape", SCORE_SHAPES, ids=str)
@pytest.mark.parametrize("moved", [False, True])
def test_scores(shape: score_cases.Shape, moved: bool) -> None:
    case = score_cases.make_case(shape, [130, 1, 37], moved=moved, window=16, bad=0.02, device="cuda")
    for check in (
        score_cases.check_norms,
        score_cases.check_streaming,
        score_cases.check_random,
        score_cases.check_keydiff,
        score_cases.check_centred,
        score_cases.check_gravity,
        score_cases.check_order,
    ):
        check(case)
    score_cases.check_lagkv(case, 4, 32)
    score_cases.check_unrotated(case, shape.head_dim, interleaved=False, dtype=torch.float32, scale=1.0)


def test_combinations() -> None:
    x = score_cases.make_scores([600, 20], (1, 2), "ties", np.random.default_rng(0), moved=True, device="cuda")
    score_cases.check_neighbours(x, 3)
    score_cases.check_rank_sum(x, (1.0, 1.0), evictable=True)
    score_cases.check_zscore_sum(x, ("head", "model"), (1.0, 1.0), evictable=True)
