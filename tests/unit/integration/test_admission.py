"""What is set aside for running requests when others are admitted, beside what they then take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nitro.integration.vllm.admission import Admission
from nitro.testing.pool import assert_pool_whole

from .lives import SETTINGS, prompt
from .simulation import Simulation

Make = Callable[..., Simulation]
RATIO = {"budget": None, "ratio": 0.6}
OFF = {"enabled": False}


def used(sim: Simulation) -> int:
    pool = sim.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - pool.get_num_free_blocks()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("rule", "asked", "soonest", "latest"),
    [
        ({"budget": 44}, (None,), 8, 16),
        ({"slack": 40}, (None,), 40, 80),
        ({"budget": 47, "slack": 3}, (None,), 3, 6),
        ({"evict_prompt": False, "budget": 12, "slack": 20}, (None,), 20, 40),
        (RATIO, (None,), 20, 100),
        ({"slack": 20}, (None, {"budget": 24, "slack": 30}, {"ratio": 0.4, "slack": 20}, OFF), 20, 100),
    ],
    ids=["budget", "much slack", "little slack", "prompts spared", "ratio", "mixed"],
)
def test_what_is_foreseen_is_what_is_taken(
    simulate: Make, rule: dict[str, Any], asked: tuple[object, ...], soonest: int, latest: int, lag: int
) -> None:
    """From the step on in which the last prompt is complete; evicted in their prompts or not, ahead or behind."""
    sim = simulate(num_blocks=400, max_model_len=600, lag=lag, chunk=50, **rule)
    admission: Admission = sim.scheduler.nitro.admission  # type: ignore[attr-defined]
    for number in range(12):
        own = asked[number % len(asked)]
        if own != OFF:  # stock vLLM sets nothing aside for what is never evicted
            sim.add(prompt(SETTINGS["budget"] + 2 + 11 * number, number), 400, own)
    blocks, foreseen = [], []
    while sim.scheduler.waiting or sim.scheduler.nitro.growing:  # type: ignore[attr-defined]
        sim.step()
    growers = list(sim.scheduler.running)
    while len(blocks) < 70 + latest:
        sim.step()
        blocks.append(used(sim))
        foreseen.append(admission.forecast.most)
        assert admission.reserve() == foreseen[-1]
    assert all(request in sim.scheduler.running for request in growers)
    first = 40 if "evict_prompt" in rule else 0  # until all hold what they may keep, and the forecast knows them
    for step in range(first, 70):
        soon, late = blocks[step + 1 : step + soonest + 1], blocks[step + 1 : step + latest + 1]
        assert max(soon) - blocks[step] <= foreseen[step], f"too little in step {step}"
        assert foreseen[step] <= max(*late, blocks[step]) - blocks[step], f"too much in step {step}"
    assert max(foreseen) > 0


def serve_more_than_fit(simulate: Make, **rule: Any) -> tuple[int, int, float]:
    """Return how many requests were preempted, how many tokens were computed, and how many requests ran in the mean."""
    sim = simulate(num_blocks=60, chunk=160, **rule)
    for number in range(30):
        sim.add(prompt(90 + number % 3, number + 1), 120)
    computed = running = 0
    while sim.scheduler.has_requests():
        computed += sim.step().total_num_scheduled_tokens
        running += len(sim.scheduler.running)
    assert_pool_whole(sim.scheduler)
    return sim.preemptions, computed, running / sim.steps


@pytest.mark.parametrize(("rule", "at_most"), [({"slack": 32}, 0), ({**RATIO, "slack": 16}, 0.5)], ids=str)
def test_requests_are_admitted_into_what_the_others_leave(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any], at_most: float
) -> None:
    """Of requests that grow until their next eviction none is preempted for one that is admitted meanwhile.

    Under a ratio what they keep grows, too, for longer than is foreseen: some are.
    """
    preemptions, computed, running = serve_more_than_fit(simulate, **rule)
    monkeypatch.setattr(Admission, "reserve", lambda _: 0)
    before, computed_before, running_before = serve_more_than_fit(simulate, **rule)
    assert before > 0, "there is nothing to prevent"
    assert preemptions <= at_most * before
    assert computed < computed_before
    assert running >= 0.75 * running_before


def test_prompts_that_are_admitted_in_the_same_step_do_not_count_on_the_same_blocks(simulate: Make) -> None:
    """Of each only the first chunk is computed, so that the pool still looks empty to the next."""
    sim = simulate(num_blocks=17, chunk=200)
    sim.scheduler.scheduler_config.long_prefill_token_threshold = 16
    for number in range(3):
        sim.add(prompt(180, number), 20, OFF)  # 12 or 13 of 16 blocks
    sim.step()
    assert len(sim.scheduler.running) == 1
    sim.drain()
    assert sim.preemptions == 0


def test_a_request_that_needs_the_whole_pool_waits_for_the_others_and_gets_it(simulate: Make) -> None:
    sim = simulate(num_blocks=17, chunk=256)
    for number in range(3):
        sim.add(prompt(60, number), 60)
    sim.step()
    name = sim.add(prompt(240, 7), 16, OFF)
    later = sim.add(prompt(60, 8), 30)
    while len(sim.scheduler.running) != 1 or sim.scheduler.running[0].request_id != name:
        assert later not in [request.request_id for request in sim.scheduler.running], "it came later"
        sim.step()
        assert sim.steps < 100
    sim.drain()
    assert sim.preemptions == 0


def test_asking_for_many_costs_no_more_than_counting_each_once(simulate: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulate(num_blocks=400, chunk=256)
    missing, counted = Admission._missing, []

    def count(self: Admission, request: Any) -> int:
        counted.append(request.request_id)
        return missing(self, request)

    monkeypatch.setattr(Admission, "_missing", count)
    for number in range(40):
        sim.add(prompt(10, number), 5)
    output = sim.step()
    assert len(output.scheduled_new_reqs) == 16, "as many as may run"
    assert len(counted) == len(set(counted)) == 15
    sim.drain()
    assert_pool_whole(sim.scheduler)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", [40, 47, 148, 165], ids="{} tokens".format)
def test_the_way_from_the_end_of_a_prompt_to_the_first_cut_is_foreseen(simulate: Make, length: int, lag: int) -> None:
    """Whether nothing of the prompt was evicted, or something between its chunks (the long ones hold 60 and 77)."""
    sim = simulate(num_blocks=60, chunk=64, lag=lag, slack=40)
    sim.add(prompt(length), 70)
    while not sim.scheduler.running or sim.scheduler.nitro.growing:  # type: ignore[attr-defined]
        sim.step()
    blocks, foreseen = used(sim), sim.scheduler.nitro.admission.forecast.most  # type: ignore[attr-defined]
    later = []
    for _ in range(40):
        sim.step()
        later.append(used(sim))
    assert foreseen == max(*later, blocks) - blocks
    assert foreseen or length == 165, "which is cut before it needs a block"
    sim.drain()
