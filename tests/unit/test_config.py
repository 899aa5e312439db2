"""Settings: what is accepted, and that every error says key, value, bound and remedy."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nitro._settings_docs import settings_markdown
from nitro._settings_text import RULES
from nitro.config import Settings
from nitro.errors import NitroError, SettingsError

ROOT = Path(__file__).parents[2]


def problems_of(obj: object) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(obj)
    return str(caught.value)


def test_defaults() -> None:
    settings = Settings.parse({"budget": 512})
    assert settings.to_dict() == {
        "policy": "keydiff",
        "policy_options": {},
        "budget": 512,
        "sinks": 4,
        "window": 32,
        "slack": 64,
        "evict_prompt": True,
        "pooling": "none",
        "seed": 0,
    }
    assert settings.ratio is None


def test_every_field_is_taken() -> None:
    given_settings = {
        "policy": "gravity",
        "policy_options": {"softening": 0.5},
        "ratio": 0.25,
        "sinks": 0,
        "window": 1,
        "slack": 1,
        "evict_prompt": False,
        "pooling": "merge",
        "seed": 2**63 - 1,
    }
    assert Settings.parse(given_settings).to_dict() == given_settings


def test_is_frozen_and_parse_passes_settings_on() -> None:
    settings = Settings.parse({"budget": 512})
    assert Settings.parse(settings) is settings
    with pytest.raises(ValidationError):
        settings.budget = 1


def test_does_not_share_the_users_options() -> None:
    options: dict[str, float] = {"softening": 0.5}
    settings = Settings.parse({"policy": "gravity", "budget": 512, "policy_options": options})
    options["softening"] = 99.0
    assert settings.policy_options == {"softening": 0.5}


@given(
    sinks=st.integers(0, 100),
    window=st.integers(1, 100),
    over=st.integers(-5, 5),
    slack=st.integers(1, 1000),
    seed=st.integers(0, 2**63 - 1),
    evict_prompt=st.booleans(),
)
def test_budget_bound_is_exact_and_settings_survive_json(over: int, **values: Any) -> None:
    budget = max(1, values["sinks"] + values["window"] + over)
    obj = {"budget": budget, "policy": "streaming", **values}
    if budget < values["sinks"] + values["window"]:
        assert "sinks + window" in problems_of(obj)
        return
    settings = Settings.parse(obj)
    assert Settings.parse(json.loads(json.dumps(settings.to_dict()))) == settings


def test_budget_below_sinks_and_window() -> None:
    assert problems_of({"budget": 12}) == (
        "nitro settings: budget=12 is below sinks + window = 36: raise budget to at least 36, or lower sinks or window"
    )


@pytest.mark.parametrize("empty", [{}, {"budget": None}, {"budget": None, "ratio": None}, {"threshold": None}])
def test_nothing_says_how_many_tokens_stay(empty: dict[str, None]) -> None:
    assert "none of budget, ratio and threshold is set" in problems_of(empty)


@pytest.mark.parametrize("name", ["min_keep", "max_keep"])
def test_a_bound_of_a_threshold_that_is_not_set_is_named_beside_it(name: str) -> None:
    said = problems_of({name: 100})
    assert "none of budget, ratio and threshold is set" in said
    assert f"{name}=100 is set without a threshold" in said


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"budget": 512, "ratio": 0.5}, "budget=512 and ratio=0.5 are both set"),
        ({"budget": 512, "threshold": 0.5}, "budget=512 and threshold=0.5 are both set"),
        ({"budget": 512, "ratio": 0.5, "threshold": -1.0}, "budget=512 and ratio=0.5 and threshold=-1.0 are all set"),
    ],
)
def test_several_say_how_many_tokens_stay(counts: dict[str, float], said: str) -> None:
    message = problems_of(counts)
    assert said in message
    assert "remove the others" in message


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_keep": 20}, "min_keep=20 is below sinks + window = 36: raise min_keep to at least 36"),
        ({"max_keep": 20}, "max_keep=20 is below sinks + window = 36"),
        ({"min_keep": 200, "max_keep": 100}, "max_keep=100 is below min_keep=200: raise max_keep, or lower min_keep"),
        ({"threshold": math.nan}, "threshold=NaN is not finite"),
        ({"threshold": 5.0}, "threshold=5.0 is more than policy 'keydiff' ever scores (1), so that requests"),
        (
            {"threshold": 0.5, "policy": "streaming"},
            "threshold=0.5 is more than policy 'streaming' ever scores (-1)",
        ),
        ({"threshold": 3.0, "policy": "kvdiff"}, "threshold=3.0 is more than policy 'kvdiff' ever scores (2.25024)"),
        ({"threshold": -1e39}, "threshold=-1e+39 is out of bounds: threshold must be a number, -3.4e38 <= threshold"),
    ],
)
def test_bounds_of_a_threshold(wrong: dict[str, float], said: str) -> None:
    message = problems_of({"threshold": 0.5, **wrong})
    assert said in message
    assert "\n" not in message, "one mistake must be one problem"


def test_bounds_without_a_threshold() -> None:
    message = problems_of({"budget": 512, "min_keep": 64})
    assert "min_keep=64 is set without a threshold, whose bound it is: remove it" in message


def test_a_threshold_with_bounds() -> None:
    obj = {"threshold": 0.5, "min_keep": 36, "max_keep": 36, "policy": "gravity"}
    assert obj.items() <= Settings.parse(obj).to_dict().items()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("budgt", "budget"),
        ("Budget", "budget"),
        ("evict-prompt", "evict_prompt"),
        ("windows", "window"),
        ("sink", "sinks"),
    ],
)
def test_unknown_key_names_the_nearest(wrong: str, right: str) -> None:
    message = problems_of({wrong: 512} if right == "budget" else {wrong: 512, "ratio": 0.5})
    assert f"unknown key {wrong!r} (value 512), did you mean {right!r}?" in message
    assert "\n" not in message, "one mistake must be one problem"


def test_unknown_key_that_is_like_nothing_lists_the_known_ones() -> None:
    message = problems_of({"zzz": 1, "ratio": 0.5})
    assert "did you mean" not in message
    assert all(name in message for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("budget", "512", '"512" is a string'),
        ("budget", True, "true is a boolean"),
        ("budget", 0.5, "0.5 is a floating-point number"),
        ("budget", 512.0, "512.0 is a floating-point number"),
        ("budget", 0, "0 is out of bounds"),
        ("budget", math.inf, "Infinity is not finite"),
        ("ratio", math.nan, "NaN is not finite"),
        ("ratio", 0.0, "0.0 is out of bounds"),
        ("ratio", 1, "1 is out of bounds"),
        ("ratio", "0.5", '"0.5" is a string'),
        ("ratio", True, "true is a boolean"),
        ("sinks", -1, "-1 is out of bounds"),
        ("sinks", None, "null is null"),
        ("window", 0, "0 is out of bounds"),
        ("slack", 0, "0 is out of bounds"),
        ("evict_prompt", 1, "1 is an integer"),
        ("evict_prompt", "false", '"false" is a string'),
        ("pooling", "mean", '"mean" is out of bounds'),
        ("seed", -1, "-1 is out of bounds"),
        ("seed", 2**63, f"{2**63} is out of bounds"),
        ("policy", 3, "3 is an integer"),
        ("policy_options", [], "[] is a list"),
    ],
)
def test_wrong_value(key: str, value: object, said: str) -> None:
    obj = {key: value} if key in ("budget", "ratio") else {key: value, "budget": 512}
    message = problems_of(obj)
    rule = RULES[key]
    assert message == f"nitro settings: {key}={said}: {key} must be {rule.type}, {rule.bound}, e.g. {rule.example}"


@pytest.mark.parametrize(
    ("obj", "said"),
    [(None, "got null"), ([1], "got [1], a list"), ("x", 'got "x", a string'), (True, "got true, a boolean")],
)
def test_settings_must_be_an_object(obj: object, said: str) -> None:
    assert said in problems_of(obj)


def test_keys_must_be_strings() -> None:
    assert "unknown key 1" in problems_of({1: 2, "budget": 512})
    assert "has the key 1, an integer" in problems_of({"policy_options": {1: 2}, "budget": 512})


def test_long_values_are_cut() -> None:
    assert len(problems_of({"budget": "x" * 10_000})) < 300


def test_unknown_policy_names_nearest_and_all() -> None:
    message = problems_of({"budget": 512, "policy": "keydif"})
    assert "unknown policy 'keydif', did you mean 'keydiff'?" in message
    assert all(name in message for name in ("gravity", "keydiff", "knorm", "random", "streaming", "vnorm"))


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        (
            "gravity",
            {"softning": 1},
            "unknown option 'softning' (value 1) of policy 'gravity', did you mean 'softening'?",
        ),
        ("gravity", {"softening": 0}, "softening=0 of policy 'gravity' must be a number between 0.001 and 10"),
        ("gravity", {"softening": "1"}, "softening='1' of policy 'gravity' must be a number"),
        ("gravity", {"softening": True}, "softening=True of policy 'gravity' must be a number"),
        ("gravity", {"softening": math.nan}, "policy_options['softening']=NaN is not finite"),
        ("gravity", {"softening": [1]}, "policy_options['softening']=[1] is a list"),
        ("keydiff", {"softening": 1}, "policy 'keydiff': it has no options"),
        ("keydiff", {"name": "x"}, "policy 'keydiff': it has no options"),
    ],
)
def test_policy_options(policy: str, options: dict[str, object], said: str) -> None:
    message = problems_of({"budget": 512, "policy": policy, "policy_options": options})
    assert said in message
    assert "\n" not in message


def test_all_problems_are_reported_at_once() -> None:
    message = problems_of({"budget": 12, "slak": 3, "seed": -1, "policy": "x"})
    lines = message.splitlines()
    assert lines[0] == "nitro settings: 4 problems"
    for said in ("unknown key 'slak'", "seed=-1", "sinks + window = 36", "unknown policy 'x'"):
        assert sum(said in line for line in lines) == 1


def test_no_verdict_on_what_depends_on_a_mistake() -> None:
    # With the window misspelled or wrong, nobody knows whether the budget is large enough; nor which policy is meant.
    assert "sinks + window = " not in problems_of({"budget": 12, "windw": 3})
    assert "sinks + window = " not in problems_of({"budget": 12, "window": 0})
    assert (
        "option"
        not in problems_of({"budget": 512, "polcy": "gravity", "policy_options": {"softening": 1}}).split("?")[0]
    )


def test_constructor_keeps_the_rules() -> None:
    for bad in ({"budget": 12}, {}, {"budget": 512, "ratio": 0.5}, {"budget": "512"}, {"budgt": 512}):
        with pytest.raises(ValueError, match=r"budg"):
            Settings(**bad)


def test_settings_error_is_a_value_error() -> None:
    assert issubclass(SettingsError, ValueError)
    assert issubclass(SettingsError, NitroError)


def test_import_is_light() -> None:
    code = (
        "import sys, nitro.config, nitro.request_settings, nitro.policies; nitro.policies.available();"
        "print(*sorted({'torch', 'triton', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_documentation_is_up_to_date() -> None:
    path = ROOT / "docs" / "settings.md"
    assert path.read_text(encoding="utf-8") == settings_markdown(), (
        "regenerate docs/settings.md: python -c 'from nitro._settings_docs import *; print(settings_markdown(), "
        'end="")\' > docs/settings.md'
    )


def test_documentation_covers_every_setting() -> None:
    assert set(RULES) == set(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())
    assert all(f"| `{name}` |" in settings_markdown() for name in Settings.model_fields)


def test_half_a_surrogate_is_no_key() -> None:
    assert "a key that is not valid Unicode" in problems_of({"budget": 512, "\ud800": 1})
