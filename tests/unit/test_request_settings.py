"""What a request may say for itself: accepted values, errors, and the rule that comes of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro._settings_docs import settings_markdown
from nitro._settings_text import REQUEST_RULES
from nitro.config import Settings
from nitro.errors import SettingsError
from nitro.planner import Rule, rule_for, rule_of
from nitro.request_settings import SERVER_ONLY, RequestSettings

SERVER = Settings.parse({"policy": "streaming", "budget": 72, "sinks": 4, "window": 16, "slack": 24})
BY_RATIO = Settings.parse({"policy": "streaming", "ratio": 0.25, "sinks": 0, "window": 1})


def problems_of(obj: object, server: Settings = SERVER) -> str:
    with pytest.raises(SettingsError) as caught:
        RequestSettings.parse(obj, server)
    return str(caught.value)


def asked_rule(obj: object, server: Settings = SERVER) -> Rule:
    return rule_for(rule_of(server), RequestSettings.parse(obj, server))


kept = st.one_of(
    st.fixed_dictionaries({}, optional={"budget": st.none() | st.integers(20, 10**6)}),
    st.fixed_dictionaries(
        {}, optional={"ratio": st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True, allow_subnormal=False)}
    ),
)
others = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "slack": st.none() | st.integers(1, 1000),
        "evict_prompt": st.none() | st.booleans(),
    },
)


@given(kept, others, st.sampled_from([SERVER, BY_RATIO]))
def test_what_is_asked_for_replaces_what_the_server_has_and_the_rest_stays(
    kept: dict[str, Any], others: dict[str, Any], server: Settings
) -> None:
    asked = {**kept, **others}
    rule, default = asked_rule(asked, server), rule_of(server)
    assert rule == asked_rule(json.dumps(asked), server), "a string is the same as the object"
    said = {name: value for name, value in asked.items() if value is not None}
    assert rule.never is (said.get("enabled") is False)
    assert (rule.sinks, rule.window) == (server.sinks, server.window)
    if rule.never:
        return
    if {"budget", "ratio"} & said.keys():
        assert (rule.budget, rule.ratio) == (said.get("budget"), said.get("ratio"))
    else:
        assert (rule.budget, rule.ratio) == (default.budget, default.ratio)
    assert rule.slack == said.get("slack", server.slack)
    assert rule.evict_prompt == said.get("evict_prompt", server.evict_prompt)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*REQUEST_RULES, *SERVER_ONLY, "budgt", ""]) | st.text(max_size=8)


@given(st.dictionaries(names, json_values, max_size=5) | json_values)
def test_anything_else_is_a_settings_error(asked: object) -> None:
    # Whatever a client sends, no other exception may come out of it, since a server would answer with 500.
    for form in (asked, json.dumps(asked)):
        try:
            found = RequestSettings.parse(form, SERVER)
        except SettingsError:
            continue
        assert found.budget is None or found.budget >= 20
        assert found.ratio is None or 0 < found.ratio < 1
        assert found.budget is None or found.ratio is None


@given(st.integers(-5, 5), st.integers(0, 50), st.integers(1, 50))
def test_the_least_budget_is_the_servers_sinks_and_window(over: int, sinks: int, window: int) -> None:
    server = Settings.parse({"policy": "streaming", "ratio": 0.5, "sinks": sinks, "window": window})
    least = sinks + window
    budget = max(1, least + over)
    if budget >= least:
        assert asked_rule({"budget": budget}, server).budget == budget
    else:
        assert problems_of({"budget": budget}, server) == (
            f"nitro settings of a request: budget={budget} is below sinks + window = {least}: "
            f"raise budget to at least {least} (sinks and window are the server's)"
        )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("budget", "64", '"64" is a string'),
        ("budget", True, "true is a boolean"),
        ("budget", 64.0, "64.0 is a floating-point number"),
        ("budget", 0, "0 is out of bounds"),
        ("ratio", 1.0, "1.0 is out of bounds"),
        ("ratio", math.nan, "NaN is not finite"),
        ("slack", 0, "0 is out of bounds"),
        ("slack", [1], "[1] is a list"),
        ("evict_prompt", 0, "0 is an integer"),
        ("enabled", 1, "1 is an integer"),
        ("enabled", None, "null is null"),
    ],
)
def test_wrong_value(key: str, value: object, said: str) -> None:
    rule = REQUEST_RULES[key]
    for form in ({key: value}, json.dumps({key: value})):
        assert problems_of(form) == (
            f"nitro settings of a request: {key}={said}: {key} must be {rule.type}, {rule.bound}, e.g. {rule.example}"
        )


def test_a_request_may_not_have_both_even_where_the_server_has_one() -> None:
    assert "budget=64 and ratio=0.5 are both set" in problems_of({"budget": 64, "ratio": 0.5})
    assert asked_rule({"ratio": 0.5}).budget is None
    assert asked_rule({"budget": 64}, BY_RATIO).ratio is None


def test_unknown_keys_name_the_nearest() -> None:
    assert problems_of({"budgt": 64}) == (
        "nitro settings of a request: unknown key 'budgt' (value 64), did you mean 'budget'? known keys are "
        "budget, enabled, evict_prompt, ratio, slack"
    )


@pytest.mark.parametrize("key", SERVER_ONLY)
def test_what_is_the_servers_says_so_and_why(key: str) -> None:
    message = problems_of({key: 8})
    assert f"{key}=8 cannot be set by a request: the evictions of a step are scored together" in message
    assert "set it in the server's --additional-config" in message


def test_all_problems_are_reported_at_once() -> None:
    message = problems_of({"budget": 12, "slak": 3, "window": 1, "evict_prompt": 2})
    assert message.splitlines()[0] == "nitro settings of a request: 4 problems"
    for said in ("unknown key 'slak'", "window=1 cannot", "evict_prompt=2", "sinks + window = 20"):
        assert said in message
    assert "sinks + window" not in problems_of({"budgt": 12, "budget": 12}), "nobody knows which was meant"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"budget": 64', "is not JSON"),
        ("budget=64", "is not JSON"),
        ("[" * 4000, "is not JSON"),
        ("9" * 4000, "an integer"),
        ("", "is not JSON"),
        ("null", "null"),
        ("64", "an integer"),
        ('"{}"', "a string"),
        ("[64]", "a list"),
    ],
)
def test_strings_must_hold_an_object(text: str, said: str) -> None:
    message = problems_of(text)
    assert message.startswith("nitro settings of a request must be")
    assert said in message
    assert len(message) < 400


def test_other_things_are_no_settings() -> None:
    for obj in (64, [64], True, 0.5):
        assert "must be an object" in problems_of(obj)
    assert "unknown key 1" in problems_of({1: 2})


def test_documentation_covers_every_setting() -> None:
    assert set(REQUEST_RULES) == set(RequestSettings.model_fields)
    section = settings_markdown().split("## Settings of a request")[1]
    assert all(f"| `{name}` |" in section for name in RequestSettings.model_fields)
    assert all(f"`{name}`" in section for name in SERVER_ONLY)


def test_what_is_long_is_refused_before_it_is_looked_at() -> None:
    assert problems_of('{"budget": 64}' + " " * 5000) == (
        "nitro settings of a request have 5014 characters, may have 4096: shorten the string"
    )
    assert "have 65 keys, may have 64" in problems_of({f"key{i}": i for i in range(65)})
    assert len(problems_of({"k" * 10_000: 1})) < 400


@pytest.mark.parametrize("key", ["\ud800", '{"\\ud800": 1}'])
def test_half_a_surrogate_is_no_key(key: str) -> None:
    assert "a key that is not valid Unicode" in problems_of(key if key.startswith("{") else {key: 1})


def test_integers_too_long_to_print() -> None:
    assert "budget=..." in problems_of({"budget": -(10**5000)})
