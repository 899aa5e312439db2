"""Gates on the collector's speed, on the CPU: `pytest -m "perf and not gpu" tests/perf`, on a quiet machine."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from sweep_bench import (
    SIZES,
    EssayLedger,
    growth,
    hash_sweep,
    make_pool,
    native_sweep,
    nested_loops,
    seconds,
)

pytestmark = pytest.mark.perf

MOST_GROWTH = 1.5
"""Between linear and quadratic: towards a million slots the arrays outgrow caches, and each slot takes longer."""
LEAST_QUADRATIC_GROWTH = 1.75
MOST_LEDGER_MS = 0.2


def test_all_three_find_the_same_blocks() -> None:
    pool = make_pool(20_000)
    blocks, live = pool.blocks.tolist(), pool.live.tolist()
    dead = native_sweep(pool).tolist()
    assert dead == hash_sweep(blocks, live) == nested_loops(blocks, live)
    assert 0.1 < len(dead) / len(blocks) < 0.3


@pytest.mark.parametrize("way", ["C++", "Python"])
def test_the_hash_sweep_is_linear(way: str) -> None:
    times = []
    for size in SIZES:
        pool = make_pool(size)
        blocks, live = pool.blocks.tolist(), pool.live.tolist()
        call = (lambda p=pool: native_sweep(p)) if way == "C++" else (lambda b=blocks, a=live: hash_sweep(b, a))
        times.append(seconds(call, 7))
    exponent = growth(SIZES, times)
    print(f"{way}: time grows with slots^{exponent:.2f}, {1e3 * times[0]:.2f} to {1e3 * times[-1]:.2f} ms")
    assert exponent <= MOST_GROWTH


def test_the_nested_loops_are_not() -> None:
    sizes, times = (2_000, 4_000, 8_000, 16_000), []
    for size in sizes:
        pool = make_pool(size)
        blocks, live = pool.blocks.tolist(), pool.live.tolist()
        times.append(seconds(lambda b=blocks, a=live: nested_loops(b, a), 2))
    assert growth(sizes, times) >= LEAST_QUADRATIC_GROWTH


@pytest.mark.parametrize("slots", [SIZES[0], SIZES[-1]])
def test_sweep_in_cpp(benchmark: Any, slots: int) -> None:
    pool = make_pool(slots)
    assert len(benchmark(native_sweep, pool)) > 0


@pytest.mark.parametrize("slots", [SIZES[0], SIZES[-1]])
def test_sweep_in_python(benchmark: Any, slots: int) -> None:
    pool = make_pool(slots)
    dead = benchmark(hash_sweep, pool.blocks.tolist(), pool.live.tolist())
    assert dead == native_sweep(pool).tolist()


def test_the_ledgers_part_of_a_step_at_the_essays_shape() -> None:
    ledger = EssayLedger()
    for _ in range(EssayLedger.SLACK):
        ledger.step()
    medians = []  # the least of several, since other work on the machine can only lengthen them
    for _ in range(8):
        steps = [ledger.step() for _ in range(EssayLedger.SLACK)]
        medians.append(1e3 * statistics.median(spent for spent, _, _ in steps))
        evictions = statistics.fmean(count for _, count, _ in steps)
        assert evictions == 32
    ledger.collector.check_integrity()
    median = min(medians)
    print(f"median {median:.3f} ms a step with {evictions:.0f} evictions")
    assert median < MOST_LEDGER_MS
