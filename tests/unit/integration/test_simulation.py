"""Long random lives of requests on vLLM's real scheduler and pool (simulation.py), and faults that they must reveal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import nitro
from nitro.ipc import Producer

from . import faults
from .lives import BY_DATA, MIXED, STREAMED, WILD, Happened, Turmoil, mingle, prompt
from .simulation import BLOCK, Simulation

Make = Callable[..., Simulation]


def live(sim: Simulation, steps: int, turmoil: Turmoil = WILD) -> Happened:
    """Let requests live until the engine has made so many steps."""
    total = Happened()
    while sim.steps < steps:
        happened = mingle(sim, 500, MIXED, turmoil)
        for name in ("aborts", "storms", "in_plan", "ended_in_plan", "resets"):
            setattr(total, name, getattr(total, name) + getattr(happened, name))
    return total


def check_lives(sim: Simulation, happened: Happened) -> None:
    """Everything that may happen has happened, in proportion to the steps; what was read was checked on the way."""
    thousands = sim.steps / 1000
    counted = sim.scheduler.nitro.counters  # type: ignore[attr-defined]
    assert counted.evictions == sim.evictions, "plans that were dropped with their request are not counted"
    assert sim.evictions > 100 * thousands
    assert sim.reads > 50_000 * thousands
    assert sim.preemptions > 10 * thousands
    assert sim.hits > 10 * thousands
    assert happened.aborts > 10 * thousands
    assert happened.storms > 2 * thousands
    assert happened.in_plan > thousands
    assert happened.ended_in_plan > thousands
    assert happened.resets > thousands / 2 or sim.lag


@pytest.mark.parametrize(("seed", "lag", "num_blocks"), [(1, 0, 13), (2, 1, 13), (3, 1, 24)])
def test_every_read_finds_the_requests_own_kept_tokens(simulate: Make, seed: int, lag: int, num_blocks: int) -> None:
    sim = simulate(num_blocks=num_blocks, seed=seed, lag=lag)
    check_lives(sim, live(sim, 2_000))


@pytest.mark.parametrize(("seed", "lag", "num_blocks"), [(4, 0, 13), (5, 1, 24)])
def test_where_the_data_decides(simulate: Make, seed: int, lag: int, num_blocks: int) -> None:
    sim = simulate(num_blocks=num_blocks, seed=seed, lag=lag, **BY_DATA)
    check_lives(sim, live(sim, 2_000))
    asks = sim.scheduler.nitro.asks  # type: ignore[attr-defined]
    assert asks.answered > sim.steps / 50
    assert asks.stale > sim.steps / 500
    assert asks.lost > sim.steps / 500


# Rooms for which stock vLLM can serve them, too: where parts that wait hold all blocks, none of them goes on; and a
# session that is preempted while the last token of its part is on its way is never scheduled again.
@pytest.mark.parametrize(("lag", "num_blocks"), [(0, 80), (1, 200)])
@pytest.mark.parametrize("changes", [{}, BY_DATA, {"evict_prompt": False}], ids=["budget", "threshold", "no prompts"])
def test_streamed_inputs_keep_what_they_have_from_part_to_part(
    simulate: Make, changes: dict[str, Any], lag: int, num_blocks: int
) -> None:
    sim = simulate(num_blocks=num_blocks, seed=6, lag=lag, **changes)
    live(sim, 600, STREAMED)
    assert sim.parts > 40
    assert sim.evictions > 40
    assert sim.preemptions == 0 or not lag


def alone(sim: Simulation, reached: int, length: int, answer: int) -> int:
    """Serve one request, whose tokens reach the threshold so often, and return the slots that it holds at its end."""
    sim.bridge, sim.reached = Producer, reached
    name, held = sim.add(prompt(length), answer), 0
    while name in sim.scheduler.requests:
        sim.step()
        if name in sim.scheduler.requests:
            collector = sim.scheduler.nitro.collector  # type: ignore[attr-defined]
            held = sim.scheduler.requests[name].num_computed_tokens - collector.evicted(name)
    sim.drain()
    return held


@pytest.mark.parametrize("slack", [1, 2, 5, 7, 30])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_holds_after_the_bounds_have_asked_for_an_eviction(simulate: Make, slack: int, lag: int) -> None:
    """With little slack the bound is reached again before any answer can be there."""
    sim = simulate(lag=lag, **{**BY_DATA, "slack": slack})
    held = alone(sim, reached=10, length=200, answer=50)
    assert held <= 10 + slack + 2 * BLOCK


@pytest.mark.parametrize("lag", [0, 1])
def test_what_came_while_a_question_was_on_its_way_is_asked_about_soon(simulate: Make, lag: int) -> None:
    sim = simulate(
        lag=lag, chunk=400, max_model_len=1000, num_blocks=200, **{**BY_DATA, "max_keep": None, "slack": 200}
    )
    held = alone(sim, reached=10, length=700, answer=60)
    assert held <= 10 + 60 + BLOCK


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "lag", "num_blocks", "changes"),
    [
        (11, 0, 13, {}),
        (12, 1, 13, {}),
        (13, 1, 24, {}),
        (14, 1, 24, BY_DATA),
        (15, 0, 18, BY_DATA),
        (16, 1, 18, {"budget": 33, "slack": 1}),
    ],
    ids=["11", "12", "13", "14-threshold", "15-threshold", "16-slack-1"],
)
def test_long_lives(simulate: Make, seed: int, lag: int, num_blocks: int, changes: dict[str, Any]) -> None:
    started = time.perf_counter()
    sim = simulate(num_blocks=num_blocks, seed=seed, lag=lag, **changes)
    happened = live(sim, 200_000)
    print(
        f"seed {seed}, lag {lag}, {num_blocks} blocks: {sim.steps:,} steps, {sim.reads:,} reads, {sim.evictions:,} "
        f"evictions, {sim.preemptions:,} preemptions, {sim.hits:,} prefix hits, {happened.aborts:,} aborts, "
        f"{happened.storms:,} storms, {happened.in_plan:,} aborts and {happened.ended_in_plan:,} ends in the step of a "
        f"plan, {happened.resets:,} resets, {time.perf_counter() - started:.0f} s"
    )
    check_lives(sim, happened)


def test_the_same_seed_lives_the_same_life(simulate: Make) -> None:
    def figures(seed: int) -> tuple[int, ...]:
        sim = simulate(num_blocks=13, seed=seed, lag=1)
        live(sim, 300)
        return sim.steps, sim.reads, sim.evictions, sim.preemptions, sim.hits

    assert figures(5) == figures(5) != figures(6)


# Where reads alone must notice, neither the ledger nor the pool is looked at in between.
@pytest.mark.parametrize("watched", [True, False], ids=["ledger and reads", "reads alone"])
@pytest.mark.parametrize("plant", faults.ALL)
def test_planted_faults_are_caught(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, plant: faults.Plant, watched: bool
) -> None:
    plant(monkeypatch)

    def run() -> None:
        for seed in range(12):
            # With more slack than a block has slots, so that evictions of requests that decode give blocks back, too.
            sim = simulate(num_blocks=18, seed=seed, lag=1, chunk=128, slack=8 if seed % 2 else 24)
            sim.watched = watched
            mingle(sim, 300)

    # A read may notice first, or the ledger, or vLLM's own pool.
    with pytest.raises((AssertionError, nitro.IntegrityError, KeyError)):
        run()
