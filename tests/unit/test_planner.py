from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro.planner import BudgetRule
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
    rule = BudgetRule(512, None, 4, 32, 64, evict_prompt=True)
    assert rule.target(5000, physical, 4000) == expected
    assert rule.protect(5000, 4000) == 4


@given(rules(), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 2000), st.booleans())
def test_a_request_that_switches_eviction_off_is_never_due(
    rule: BudgetRule, logical: int, prompt: int, evicted: int, evict_prompt: bool
) -> None:
    asked = RequestSettings(enabled=False, budget=64, evict_prompt=evict_prompt)
    off = rule.for_request(asked)
    assert off.never
    assert not rule.never
    assert off.target(logical, logical, prompt) is None
    assert off.target(logical + evicted, logical, prompt) is None, "nor if it once was under another rule"
    assert off.peak(logical, 64) == logical


def test_ratio_rounds_up_and_keeps_sinks_and_window() -> None:
    rule = BudgetRule(None, 0.25, 4, 32, 16, evict_prompt=True)
    assert rule.keep(1001, 1001) == 251
    assert rule.keep(20, 20) == 36
    assert rule.target(1001, 267, 1001) == 251
    assert rule.target(1001, 266, 1001) is None


def test_prompt_is_spared_on_top_of_the_budget() -> None:
    rule = BudgetRule(64, None, 4, 32, 16, evict_prompt=False)
    assert rule.target(3000, 3000, 3000) is None
    assert rule.target(3079, 3079, 3000) is None
    assert rule.target(3080, 3080, 3000) == 3064
    assert rule.protect(3080, 3000) == 3000
