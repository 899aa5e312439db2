from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro.planner import BudgetRule, Rule, ThresholdRule, rule_for
from nitro.request_settings import RequestSettings


def rules() -> st.SearchStrategy[BudgetRule]:
    def build(sinks: int, window: int, extra: int, ratio: float | None, slack: int, evict_prompt: bool) -> BudgetRule:
        budget = None if ratio is not None else sinks + window + extra
        return BudgetRule(sinks, window, slack, evict_prompt, budget, ratio)

    return st.builds(
        build,
        st.integers(0, 8),
        st.integers(1, 64),
        st.integers(0, 512),
        st.none() | st.floats(0.01, 0.99),
        st.integers(1, 128),
        st.booleans(),
    )


def threshold_rules() -> st.SearchStrategy[ThresholdRule]:
    def build(sinks: int, window: int, least: int, more: int | None, slack: int, evict_prompt: bool) -> ThresholdRule:
        low = sinks + window + least
        return ThresholdRule(sinks, window, slack, evict_prompt, 0.5, low, None if more is None else low + more)

    return st.builds(
        build,
        st.integers(0, 8),
        st.integers(1, 64),
        st.integers(0, 64),
        st.none() | st.integers(0, 512),
        st.integers(1, 128),
        st.booleans(),
    )


@given(threshold_rules(), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 256), st.data())
def test_the_data_decides_within_bounds(
    rule: ThresholdRule, prompt: int, outputs: int, chunk: int, data: st.DataObject
) -> None:
    """Played as a scheduler does it: answers come some steps late, or not at all; then the bounds alone hold."""
    draw = data.draw(st.randoms(use_true_random=False))
    logical = physical = prompt_peak = 0
    asked: tuple[int, int, int] | None = None  # when the answer comes, and the slots and tokens that it is about
    next_ask, step = 0, 0
    while logical < prompt + outputs:
        spared = 0 if rule.evict_prompt else min(prompt, logical)
        most = None if rule.max_keep is None else spared + rule.max_keep
        keep = rule.target(logical, physical, prompt) if physical else None
        if keep is not None:
            assert keep == most, "what was asked before is answered all the same"
        elif asked is not None and step >= asked[0]:
            reached, since = draw.randint(0, asked[1]), logical - asked[2]
            keep, asked = rule.answered(reached, since, logical, prompt), None
            assert keep >= spared + rule.min_keep
            assert most is None or keep <= most
            assert keep >= min(reached + since, most or keep)
            keep = keep if keep < physical else None
            next_ask = step + rule.pause(logical, physical if keep is None else keep, prompt, unjudged=since)
        elif asked is None and step >= next_ask and physical and rule.gap(logical, physical, prompt) <= 0:
            asked = (step + draw.choice([2, 3, 10**6]), physical, logical)
        if keep is not None:
            assert rule.protect(logical, prompt) + rule.window <= keep < physical
            physical = keep
        grown = min(chunk, prompt - logical) if logical < prompt else 1
        logical, physical, step = logical + grown, physical + grown, step + 1
        if logical <= prompt:
            prompt_peak = max(prompt_peak, physical)
        if most is not None and logical > prompt:
            assert physical <= spared + rule.max_keep + rule.slack + chunk
    assert prompt_peak <= rule.peak(prompt, chunk)


@given(threshold_rules(), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 600))
def test_a_worker_is_asked_before_the_bounds_decide(
    rule: ThresholdRule, physical: int, evicted: int, prompt: int
) -> None:
    logical = physical + evicted
    room, pause = rule.room(logical, physical, prompt), rule.pause(logical, physical, prompt)
    assert 1 <= pause <= rule.slack
    assert (room is None) == (rule.max_keep is None)
    if room is not None and rule.slack > 1 and room >= rule.slack:
        assert pause < room
    again = rule.pause(logical, physical, prompt, unjudged=prompt)
    assert 1 <= again <= pause, "where the bounds' room is short, some unjudged tokens may change nothing"
    assert again + prompt <= max(rule.slack, prompt + 1), "with those that are not judged it is the slack at most"
    if room is not None and room > 0:
        assert rule.target(logical, physical, prompt) is None
        assert rule.target(logical + room, physical + room, prompt) is not None or not rule.evict_prompt


@given(rules(), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 256))
def test_a_request_never_holds_more_than_it_may(rule: BudgetRule, prompt: int, outputs: int, chunk: int) -> None:
    logical = physical = peak = 0
    prompt_peak = 0
    while logical < prompt + outputs:
        target = rule.target(logical, physical, prompt) if physical else None
        if target is not None:
            protect = rule.protect(logical, prompt)
            assert 0 < target < physical, "an eviction drops something and leaves something"
            assert protect + rule.window <= target, "sinks (or the prompt) and window always fit into what stays"
            assert physical - target >= rule.slack, "one compaction pays for slack steps"
            physical = target
        step = min(chunk, prompt - logical) if logical < prompt else 1
        logical, physical = logical + step, physical + step
        peak = max(peak, physical)
        if logical <= prompt:
            prompt_peak = max(prompt_peak, physical)
    assert peak <= rule.keep(logical, prompt) + rule.slack + chunk
    assert prompt_peak <= rule.peak(prompt, chunk), "vLLM's admission check reserves enough for the prefill"


@pytest.mark.parametrize(
    ("physical", "expected"),
    [(100, None), (575, None), (576, 512), (4000, 512)],
    ids=["small", "below", "due", "prompt"],
)
def test_budget(physical: int, expected: int | None) -> None:
    rule = BudgetRule(4, 32, 64, evict_prompt=True, budget=512, ratio=None)
    assert rule.target(5000, physical, 4000) == expected
    assert rule.protect(5000, 4000) == 4


@given(rules() | threshold_rules(), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 2000), st.booleans())
def test_a_request_that_switches_eviction_off_is_never_due(
    rule: Rule, logical: int, prompt: int, evicted: int, evict_prompt: bool
) -> None:
    asked = RequestSettings(enabled=False, budget=64, evict_prompt=evict_prompt)
    off = rule_for(rule, asked)
    assert isinstance(off, BudgetRule)
    assert off.never
    assert not rule.never
    assert off.target(logical, logical, prompt) is None
    assert off.target(logical + evicted, logical, prompt) is None, "nor if it once was under another rule"
    assert off.peak(logical, 64) == logical


def test_ratio_rounds_up_and_keeps_sinks_and_window() -> None:
    rule = BudgetRule(4, 32, 16, evict_prompt=True, budget=None, ratio=0.25)
    assert rule.keep(1001, 1001) == 251
    assert rule.keep(20, 20) == 36
    assert rule.target(1001, 267, 1001) == 251
    assert rule.target(1001, 266, 1001) is None


def test_prompt_is_spared_on_top_of_the_budget() -> None:
    rule = BudgetRule(4, 32, 16, evict_prompt=False, budget=64, ratio=None)
    assert rule.target(3000, 3000, 3000) is None
    assert rule.target(3079, 3079, 3000) is None
    assert rule.target(3080, 3080, 3000) == 3064
    assert rule.protect(3080, 3000) == 3000


@given(rules(), st.integers(1, 300), st.integers(0, 300), st.integers(0, 400), st.integers(0, 600))
def test_the_next_cut_is_where_a_request_is_due(
    rule: BudgetRule, prompt: int, output: int, evicted: int, most: int
) -> None:
    """Followed token by token, from whatever it holds."""
    logical = prompt + output
    physical = max(logical - evicted, 1)
    due = next((n for n in range(most) if rule.target(logical + n, physical + n, prompt) is not None), None)
    tokens, keep = rule.next_cut(logical, physical, prompt, most)
    assert max(tokens, 0) >= most if due is None else max(tokens, 0) == due
    assert keep == rule.keep(logical + max(tokens, 0), prompt)
