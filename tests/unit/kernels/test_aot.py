"""Every kernel variant compiles for the GPUs that matter on a machine that has none, and fits an L4 (sm_89)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import compile_variants
import pytest

from nitro.kernels import _moves, select
from nitro.kernels._triton.variants import all_variants

ARCHS = (80, 89, 90)
SHARED_BYTES = 99 * 1024  # what one block may have on sm_86 and sm_89
VARIANTS = all_variants()
NAMES = [variant.name for variant in VARIANTS]
READING = [
    v.name
    for v in VARIANTS
    if v.name.startswith("score-") and "DTYPE" in v.constexprs and v.constexprs.get("PHASE") != 3
]
ALIGNED_MOVES = [name for name in NAMES if name.startswith(("pack-", "fill-")) and "unaligned" not in name]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """By (variant, architecture). Triton's cache is kept from run to run."""
    cache = request.config.cache.mkdir("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, compile_variants.__file__, *map(str, ARCHS)],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {(line["name"], line["arch"]): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_fits(outcomes: dict[tuple[str, int], dict[str, Any]], name: str, arch: int) -> None:
    outcome = outcomes[name, arch]
    assert "error" not in outcome, outcome["error"]
    assert outcome["shared"] <= SHARED_BYTES
    if arch == 89:
        assert outcome["spilled"] == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ALIGNED_MOVES)
def test_moves_take_sixteen_bytes_at_once(
    outcomes: dict[tuple[str, int], dict[str, Any]], name: str, arch: int
) -> None:
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(outcomes[name, arch]["accesses"])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", READING)
def test_scores_read_sixteen_bytes_at_once(
    outcomes: dict[tuple[str, int], dict[str, Any]], name: str, arch: int
) -> None:
    outcome = outcomes[name, arch]
    if name.startswith(
        ("score-keydiff_unrotated", "score-lagkv")
    ):  # not pipelined: what is read goes straight to registers
        assert "ld.global.v4.b32" in outcome["accesses"]
    else:
        assert 16 in outcome["copied"]


@pytest.mark.parametrize("length", [1, 400, 512, 513, 5000, 8192, 8193, 131072])
def test_registry_has_what_the_launchers_choose(length: int) -> None:
    tile, num_warps = select._shape(length, None)
    known = {(v.name.split("-")[0], v.constexprs["BLOCK"], v.num_warps) for v in VARIANTS if "BLOCK" in v.constexprs}
    assert {("topk", tile, num_warps), ("threshold", tile, num_warps)} <= known
    tile, num_warps = _moves.list_shape(length)
    assert {("list_pack", tile, num_warps), ("list_fill", tile, num_warps)} <= known


def test_scores_are_compiled_for_every_width_and_dtype() -> None:
    kinds = {tuple(name.split("-")[-2:]) for name in NAMES if name.startswith("score-")}
    assert {dtype for dtype, _ in kinds} >= {"fp16", "bf16", "fp32", "fp8e4nv", "fp8e5"}
    assert {width for _, width in kinds} >= {"64", "80", "96", "128", "256"}
