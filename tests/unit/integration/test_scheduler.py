"""Nitro's scheduler on vLLM's real block pool, without a model (see simulation.py)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from nitro.integration.vllm import request_rules
from nitro.integration.vllm.early import NitroKVCacheManager
from nitro.integration.vllm.work import PLAN
from nitro.testing.pool import assert_pool_whole

from . import simulation
from .lives import MIXED, SETTINGS, mingle, prompt
from .simulation import BLOCK

Make = Callable[..., simulation.Simulation]


def test_freed_blocks_are_used_by_others_in_the_same_step(simulate: Make) -> None:
    # 16 usable blocks hold two requests of 128 tokens; the third gets in with what their evictions free.
    sim = simulate(num_blocks=17, max_model_len=256, chunk=256)
    sim.add(prompt(128, 1), 20)
    sim.add(prompt(127, 2), 20)
    sim.step()
    assert sim.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    sim.add(prompt(100, 3), 20)
    output = sim.step()
    assert len(getattr(output, PLAN)) == 2
    freed = sim.scheduler.nitro.counters.blocks_freed  # type: ignore[attr-defined]
    assert freed >= 8
    assert [data.req_id for data in output.scheduled_new_reqs] == ["r3"]
    sim.drain()


def test_shared_prefix_survives_the_eviction_of_a_sharer(simulate: Make) -> None:
    sim = simulate(chunk=256)
    common = prompt(64, 9)
    first = sim.add([*common, *prompt(10, 1)], 40)
    sim.step()
    sim.add([*common, *prompt(11, 2)], 40)
    sim.step()  # evicts the first, whose prefix blocks the second one has just been given
    assert sim.hits == 1
    assert sim.scheduler.nitro.collector.evicted(first) > 0  # type: ignore[attr-defined]
    sim.drain()
    hits = sim.hits
    sim.add([*common, *prompt(12, 3)], 2)  # and a later request still finds the whole prefix, unharmed
    sim.drain()
    assert sim.hits == hits + 1


def test_without_a_free_block_the_request_takes_its_own_out_of_the_prefix_cache(simulate: Make) -> None:
    sim = simulate(num_blocks=17, max_model_len=256, chunk=256)
    name = sim.add(prompt(256 - 1, 1)[:250], 6)
    sim.step()
    assert sim.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    sim.step()
    assert sim.scheduler.nitro.collector.evicted(name) == 250 - SETTINGS["budget"]  # type: ignore[attr-defined]
    sim.drain()


def test_blocks_of_an_evicted_request_are_never_published(simulate: Make) -> None:
    sim = simulate(chunk=256)
    tokens = prompt(100, 4)
    sim.add(tokens, 60)
    sim.drain()
    published = sim.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    assert len(published) == 100 // simulation.BLOCK, "only the blocks of the prompt, computed before any eviction"


@pytest.mark.parametrize("lag", [0, 1])
def test_finish_in_the_step_of_a_plan(simulate: Make, lag: int) -> None:
    due = SETTINGS["budget"] + SETTINGS["slack"]
    for extra in range(3):
        sim = simulate(lag=lag, chunk=256)
        sim.add(prompt(due - 2, 1), 2 + extra)
        sim.add(prompt(30, 2), 40)
        sim.drain()
        assert sim.evictions


@pytest.mark.parametrize("lag", [0, 1])
def test_abort_in_the_step_of_a_plan(simulate: Make, lag: int) -> None:
    sim = simulate(lag=lag, chunk=256)
    name = sim.add(prompt(90, 1), 50)
    sim.add(prompt(60, 2), 50)
    while not sim.evictions:
        sim.step()
    sim.abort(name)
    assert name not in sim.scheduler.requests
    assert sim.scheduler.nitro.collector.evicted(name) == 0  # type: ignore[attr-defined]
    sim.drain()


def test_no_plan_where_nothing_is_due(simulate: Make) -> None:
    sim = simulate()
    sim.add(prompt(20), 5)
    assert not hasattr(sim.step(), PLAN)
    sim.drain()
    assert sim.evictions == 0
    assert len(sim.scheduler.nitro.collector) == 0  # type: ignore[attr-defined]


def test_prompts_are_spared_where_asked(simulate: Make) -> None:
    sim = simulate(num_blocks=60, evict_prompt=False, chunk=256)
    sim.add(prompt(150, 1), 100)
    seen = []
    while sim.scheduler.has_requests():
        plan = getattr(sim.step(), PLAN, None)
        seen += list(plan.evictions()) if plan else []
    assert seen
    assert all(e.protect == 150 and e.keep == 150 + SETTINGS["budget"] for e in seen)
    assert_pool_whole(sim.scheduler)


def test_ratio_keeps_a_share_of_what_was_computed(simulate: Make) -> None:
    sim = simulate(chunk=256, budget=None, ratio=0.5)
    sim.add(prompt(128, 1), 60)
    plans = []
    while sim.scheduler.has_requests():
        plan = getattr(sim.step(), PLAN, None)
        plans += list(plan.evictions()) if plan else []
    assert [(e.logical_len, e.keep) for e in plans][:2] == [(128, 64), (144, 72)]


def test_reset_of_the_prefix_cache_preempts_evicted_requests(simulate: Make) -> None:
    sim = simulate(chunk=256)
    sim.add(prompt(100, 1), 30)
    while not sim.evictions:
        sim.step()
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert len(sim.scheduler.nitro.collector) == 0  # type: ignore[attr-defined]
    sim.drain()
    assert sim.evictions > 1


def steps_until_the_second_runs(sim: simulation.Simulation, *nitro: object) -> int:
    """Add two requests of 220 tokens, which are prefilled in chunks of 32, one after the other, to a pool of 16 blocks.

    Returns in which step the second one is admitted.
    """
    for number, asked in enumerate(nitro):
        sim.add(prompt(220, number), 30, asked)
    while not any(request.request_id == "r2" for request in sim.scheduler.running):
        sim.step()
    steps = sim.steps
    sim.drain()
    assert sim.preemptions == 0
    return steps


SMALL, LARGE, OFF = {"budget": 40}, {"budget": 200}, {"enabled": False}


@pytest.mark.parametrize(
    ("server", "first", "second", "at_once"),
    [
        # Of a budget of 40, 47 + 32 slots at most are held in chunks (5 blocks, and one of a copy), but 220 take 14.
        ({}, None, None, True),
        ({}, None, LARGE, False),
        ({}, None, OFF, False),
        ({}, OFF, None, False),
        ({}, None, {"ratio": 0.2}, True),
        ({}, None, {"evict_prompt": False}, False),
        ({"budget": 200}, SMALL, SMALL, True),
        ({"budget": 200}, SMALL, None, False),
        ({"evict_prompt": False}, {"evict_prompt": True}, {"evict_prompt": True}, True),
        ({"budget": None, "ratio": 0.9}, SMALL, SMALL, True),
    ],
)
def test_admission_asks_for_the_peak_of_a_prompt_under_its_own_rule(
    simulate: Make, server: dict[str, Any], first: object, second: object, at_once: bool
) -> None:
    steps = steps_until_the_second_runs(simulate(num_blocks=17, chunk=32, **server), first, second)
    # The first is prefilled in 7 steps, and decodes in 29 more, during which the second is admitted or not.
    assert steps < 10 if at_once else steps > 30


def test_counters_travel_in_the_statistics(simulate: Make) -> None:
    from nitro.integration.vllm import stats

    sim = simulate(chunk=256)
    sim.add(prompt(100, 1), 60)
    sim.drain()
    figures = [stats.take(item) for item in sim.stats]
    reports = [found.counts for found in figures if found.counts]
    assert reports[0] == {"evictions": 1, "tokens_evicted": 100 - SETTINGS["budget"], "blocks_freed": 7 - 3}
    assert sum(found["evictions"] for found in reports) == sim.evictions > 1
    assert [len(found.times["plan_seconds"]) for found in figures] == [1] * sim.steps, "one for each step"
    assert all(0 < found.times["plan_seconds"][0] < 10**9 for found in figures)
    assert not any(item.waiting_lora_adapters for item in sim.stats), "nothing of it may be left for vLLM's own loggers"


def test_slots_in_use_travel_once_a_second_and_when_the_last_request_has_ended(simulate: Make) -> None:
    from nitro.integration.vllm import stats
    from nitro.integration.vllm.slots import INTERVAL, SlotUse, SlotWatch

    sim = simulate(chunk=256)
    side, now = sim.scheduler.nitro, [100.0]  # type: ignore[attr-defined]
    side.reporter.slots = SlotWatch(side.manager, side.collector, side.rules, lambda: now[0])

    def told(report: Any) -> SlotUse | None:
        gauges = stats.take(report).gauges
        return SlotUse(**gauges) if gauges else None

    name, other = sim.add(prompt(100, 1), 40), sim.add(prompt(20, 2), 4, {"enabled": False})
    sim.step()
    sizes = {request.request_id: request.num_computed_tokens for request in sim.scheduler.running}
    total = sum(sizes.values())
    unevicted = SlotUse(7 * BLOCK + 2 * BLOCK, total, logical=total, active=1)
    assert told(sim.stats[-1]) == unevicted, "none is evicted yet, and one asks for no eviction"
    for _ in range(12):
        sim.step()
        assert told(sim.stats[-1]) is None, "the second is not over"
    assert other not in sim.scheduler.requests
    now[0] += INTERVAL
    sim.step()
    request = sim.scheduler.requests[name]
    held = len(side.manager.req_to_blocks[name]) * BLOCK
    used = request.num_computed_tokens - side.collector.evicted(name)
    assert told(sim.stats[-1]) == SlotUse(held, used, held, used, request.num_computed_tokens, active=1, evicted=1)
    assert used < request.num_computed_tokens
    assert 1 <= held / used <= 1 + BLOCK / SETTINGS["budget"]
    sim.drain()
    assert [use for item in sim.stats if (use := told(item))] == [SlotUse()], "nobody runs any more"


def test_slots_of_many_requests_are_counted_in_parts(simulate: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from nitro.integration.vllm import slots

    monkeypatch.setattr(slots, "PART", 3)
    sim = simulate(num_blocks=200, chunk=512)
    side = sim.scheduler.nitro  # type: ignore[attr-defined]
    names = [sim.add(prompt(60 + number, number), 40) for number in range(8)]
    for _ in range(12):
        sim.step()
    running, now = sim.scheduler.running, [0.0]
    assert len(running) == 8
    watch = slots.SlotWatch(side.manager, side.collector, side.rules, lambda: now[0])

    def each(names: list[str]) -> list[tuple[int, int]]:
        tables, requests = side.manager.req_to_blocks, sim.scheduler.requests
        gone = [side.collector.evicted(name) for name in names]
        assert all(gone)
        used = [requests[name].num_computed_tokens - less for name, less in zip(names, gone, strict=True)]
        return [(len(tables[name]) * BLOCK, count) for name, count in zip(names, used, strict=True)]

    def expected(names: list[str]) -> slots.SlotUse:
        found = each(names)
        worst = max(found, key=lambda use: use[0] / use[1])
        computed = sum(sim.scheduler.requests[name].num_computed_tokens for name in names)
        held, used = (sum(column) for column in zip(*found, strict=True))
        return slots.SlotUse(held, used, *worst, computed, active=len(names), evicted=len(names))

    for _ in range(2):
        assert [watch.look(running), watch.look(running)] == [None, None]
        use = watch.look(running)
        assert use is not None
        assert use == expected(names)
        assert watch.look(running) is None, "the second is not over"
        now[0] += slots.INTERVAL
    # Those that go before their turn are not counted, and a count is given up when nobody runs any more.
    assert watch.look(running) is None
    sim.abort(names[7])
    sim.abort(names[4])
    assert watch.look(running) is None
    assert watch.look(running) == expected([names[i] for i in (0, 1, 2, 3, 5, 6)])
    now[0] += slots.INTERVAL
    assert watch.look(running) is None
    assert watch.look([]) == slots.SlotUse()
    # Nor is one counted with the slots of another one that got its name.
    now[0] += slots.INTERVAL
    first, rest = names[:3], [names[i] for i in (3, 5)]
    counted = each(first)
    assert watch.look(running) is None
    sim.abort(names[6])
    sim.counter = 6
    assert sim.add(prompt(20, 50), 4) == names[6]
    sim.step()
    use = watch.look(running)
    assert use is not None
    counted += each(rest)
    assert use[:2] == (sum(held for held, _ in counted), sum(used for _, used in counted))
    sim.drain()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("asked", [(None,), MIXED], ids=["one rule", "many rules"])
@pytest.mark.parametrize("rule", [{}, {"budget": None, "ratio": 0.5}, {"evict_prompt": False}], ids=str)
def test_every_request_is_looked_at_in_the_step_in_which_it_is_due(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, lag: int, rule: dict[str, Any], asked: Sequence[object]
) -> None:
    sim = simulate(num_blocks=20, seed=lag, lag=lag, **rule)
    side = sim.scheduler.nitro  # type: ignore[attr-defined]
    look, plan, due, looked = side._look, side.plan, 0, 0

    def planned(requests: Any) -> Any:
        nonlocal due, looked
        overdue = set()
        for request in sim.scheduler.running:
            computed = request.num_computed_tokens
            physical = computed - side.collector.evicted(request.request_id)
            if side._rule(request).target(computed, physical, request.num_prompt_tokens) is not None:
                overdue.add(request.request_id)
        seen: set[str] = set()

        def looked_at(request: Any, step: Any) -> Any:
            assert request.request_id not in seen, "once a step"
            seen.add(request.request_id)
            return look(request, step)

        monkeypatch.setattr(side, "_look", looked_at)
        evictions = plan(requests)
        assert overdue <= seen
        due, looked = due + len(overdue), looked + len(seen)
        return evictions

    monkeypatch.setattr(side, "plan", planned)
    mingle(sim, 400, asked)
    assert due > 30
    assert looked < sim.steps * 4, "far fewer than all that are running"
    sim.scheduler.schedule()  # the step that tells who finished last
    assert len(side.calendar) + len(side.growing) == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("num_blocks", "slack"), [(13, 8), (60, 8), (16, 40)])
def test_early_answers_change_nothing(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, lag: int, num_blocks: int, slack: int
) -> None:
    histories, asked = [], []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(NitroKVCacheManager, "adopt", lambda *_: False)
        calls = 0
        stock = KVCacheManager.allocate_slots

        def counted(self: Any, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return stock(self, *args, **kwargs)

        sim = simulate(num_blocks=num_blocks, seed=7, lag=lag, slack=slack)
        assert isinstance(sim.scheduler.kv_cache_manager, NitroKVCacheManager) == early
        history: list[Any] = []
        step = sim.step

        def recorded(sim: Any = sim, step: Any = step, history: Any = history, **during: Any) -> Any:
            output = step(**during)
            plan = getattr(output, PLAN, None)
            history.append(
                (
                    output.num_scheduled_tokens,
                    [data.block_ids for data in output.scheduled_new_reqs],
                    output.scheduled_cached_reqs.new_block_ids,
                    sorted(output.preempted_req_ids or ()),
                    [(e.request_id, e.keep, e.dst_blocks.tolist()) for e in plan.evictions()] if plan else [],
                    sim.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                    [b.block_id for b in sim.scheduler.kv_cache_manager.block_pool.blocks if b.block_hash is not None],
                )
            )
            return output

        with monkeypatch.context() as patched:
            patched.setattr(sim, "step", recorded)
            patched.setattr(KVCacheManager, "allocate_slots", counted)
            mingle(sim, 300)
        histories.append(history)
        asked.append(calls)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 200
    assert asked[0] < asked[1] / 3


def keep_as_asked(asked: Any, logical: int, prompt_length: int) -> int | None:
    """Return how many tokens stay, from the words of the documentation; None if none is ever evicted."""
    own = json.loads(asked) if isinstance(asked, str) else asked or {}
    if own.get("enabled") is False:
        return None
    base = 0 if own.get("evict_prompt", True) else min(prompt_length, logical)
    if "ratio" in own:
        least = SETTINGS["sinks"] + SETTINGS["window"]
        return base + max(math.ceil(own["ratio"] * (logical - base)), least)
    return int(base + own.get("budget", SETTINGS["budget"]))


@pytest.mark.parametrize("lag", [0, 1])
def test_every_request_of_a_batch_is_evicted_as_it_asked(simulate: Make, lag: int) -> None:
    found: Counter[str] = Counter()
    preemptions = hits = 0
    for seed in range(3):
        sim = simulate(num_blocks=20, seed=seed, lag=lag)
        plans: list[tuple[Any, int]] = []
        plan = sim.scheduler.nitro.plan  # type: ignore[attr-defined]

        def planned(requests: Any, plan: Any = plan, plans: Any = plans) -> Any:
            lengths = {name: request.num_prompt_tokens for name, request in requests.items()}
            step = plan(requests)
            plans += [(e, lengths[e.request_id]) for e in step.evictions()] if step else []
            return step

        sim.scheduler.nitro.plan = planned  # type: ignore[attr-defined]
        asked = mingle(sim, 500, MIXED).asked
        for e, length in plans:
            own = asked[e.request_id]
            assert e.keep == keep_as_asked(own, e.logical_len, length), own
            slack = (json.loads(own) if isinstance(own, str) else own or {}).get("slack", SETTINGS["slack"])
            assert e.physical_len >= e.keep + slack
            found[json.dumps(own)] += 1
        preemptions, hits = preemptions + sim.preemptions, hits + sim.hits
    assert {own for own in map(json.dumps, MIXED) if not found[own]} == {json.dumps({"enabled": False})}
    assert preemptions > 10
    assert hits > 10


@pytest.mark.parametrize("asked", MIXED[2:], ids=str)
def test_a_request_that_was_preempted_keeps_its_rule(simulate: Make, asked: Any) -> None:
    sim = simulate(num_blocks=40, chunk=256)
    name = sim.add(prompt(100, 1), 60, asked)
    seen: list[list[tuple[int, int]]] = [[]]
    for step in range(200):
        plan = getattr(sim.step(), PLAN, None)
        seen[-1] += [(e.logical_len, e.keep) for e in plan.evictions()] if plan else []
        if step == 30:
            assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
            seen.append([])
        if name not in sim.scheduler.requests:
            break
    assert sim.preemptions == 1
    for run in seen:
        assert [keep for _, keep in run] == [keep_as_asked(asked, logical, 100) for logical, _ in run]
        assert bool(run) == (asked != {"enabled": False})
    assert_pool_whole(sim.scheduler)


def test_a_request_that_is_switched_off_shares_its_prefix_and_holds_all_blocks(simulate: Make) -> None:
    sim = simulate(chunk=256)
    tokens = prompt(100, 4)
    name = sim.add(tokens, 61, {"enabled": False})
    while len(sim.scheduler.requests[name].output_token_ids) < 60:
        sim.step()
    assert len(sim.scheduler.kv_cache_manager.get_block_ids(name)[0]) == 10
    sim.add([*tokens, 1, 2, 3], 2)
    sim.drain()
    assert sim.evictions == 1, "of the second one, after its prefill"
    assert sim.hits == 1


@pytest.mark.parametrize(
    "wrong",
    [{"budget": 1}, {"budgt": 64}, "{", "null", 7, [1], {"budget": float("nan")}, {"budget": {1, 2}}, {(1, 2): 3}],
    ids=str,
)
def test_what_came_past_the_front_end_unchecked_gets_the_servers_rule_and_one_warning(
    simulate: Make, monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    said: list[str] = []
    monkeypatch.setattr(request_rules.logger, "warning", lambda text, *values: said.append(text % values))
    sim = simulate(chunk=256)
    for number in range(2):
        sim.add(prompt(100, number), 40, wrong)
    evictions = []
    while sim.scheduler.has_requests():
        plan = getattr(sim.step(), PLAN, None)
        evictions += list(plan.evictions()) if plan else []
    assert len(evictions) > 4
    assert all(e.keep == SETTINGS["budget"] for e in evictions)
    assert len(said) == 1
    assert "request r1 is served with the server's settings" in said[0]


def test_clients_cannot_fill_the_memory_with_rules(simulate: Make) -> None:
    rules = simulate().scheduler.nitro.rules  # type: ignore[attr-defined]
    for budget in range(6, 6 + 2 * request_rules._REMEMBERED):
        request: Any = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"nitro": {"budget": budget}}))
        assert rules.of(request).budget == budget
    assert rules._parsed.cache_info().currsize == request_rules._REMEMBERED
