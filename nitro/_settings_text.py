"""What is said about the settings: their rules in words, and error messages that name value, bound and remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from nitro._suggest import did_you_mean


class Rule(NamedTuple):
    """What error messages and the documentation say about a setting's value."""

    type: str
    bound: str
    example: str


RULES: dict[str, Rule] = {
    "policy": Rule("a string", "an installed policy", '"keydiff"'),
    "policy_options": Rule("an object", "options of the policy", '{"softening": 0.1}'),
    "budget": Rule("an integer", "budget >= max(1, sinks + window)", "512"),
    "ratio": Rule("a number", "0 < ratio < 1", "0.25"),
    "threshold": Rule("a number", "-3.4e38 <= threshold <= 3.4e38", "0.5"),
    "min_keep": Rule("an integer", "min_keep >= max(1, sinks + window)", "128"),
    "max_keep": Rule("an integer", "max_keep >= min_keep", "1024"),
    "sinks": Rule("an integer", "sinks >= 0", "4"),
    "window": Rule("an integer", "window >= 1", "32"),
    "slack": Rule("an integer", "slack >= 1", "64"),
    "evict_prompt": Rule("a boolean", "true or false", "true"),
    "pooling": Rule("a string", "none or merge", '"none"'),
    "seed": Rule("an integer", "0 <= seed < 2**63", "0"),
}


REQUEST_RULES: dict[str, Rule] = {
    "enabled": Rule("a boolean", "true or false", "false"),
    **{name: RULES[name] for name in ("budget", "ratio", "slack", "evict_prompt")},
}
"""Of what a request may say for itself."""


def explain(error: ErrorDetails, rules: Mapping[str, Rule] = RULES) -> str:
    """Return one of pydantic's errors in terms of the settings that have these rules."""
    if not error["loc"]:  # what pydantic cannot name, such as half of a surrogate pair
        return f"a key that is not valid Unicode: known keys are {', '.join(sorted(rules))}"
    key, *inner = error["loc"]
    value = error["input"]
    if error["type"] in ("extra_forbidden", "invalid_key") or key not in rules:
        hint = did_you_mean(key, rules) if isinstance(key, str) else ""
        known = ", ".join(sorted(rules))
        return f"unknown key {_cut(repr(key))} (value {show(value)}){hint or ':'} known keys are {known}"
    rule = rules[str(key)]
    if "[key]" in inner:
        return f"{key} has the key {show(value)}, {kind_of(value)}: the name of an option must be a string"
    if inner:
        return (
            f"{key}[{inner[0]!r}]={show(value)} is {kind_of(value)}: "
            f"the value of an option must be a finite number, a string or a boolean"
        )
    if error["type"].endswith("_type"):
        wrong = f"is {kind_of(value)}"
    elif error["type"] == "finite_number":
        wrong = "is not finite"
    else:
        wrong = "is out of bounds"
    return f"{key}={show(value)} {wrong}: {key} must be {rule.type}, {rule.bound}, e.g. {rule.example}"


def kind_of(value: object) -> str:
    """Return what JSON calls a value of this type, with its article."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    kinds: list[tuple[Any, str]] = [
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a floating-point number"),
        (str, "a string"),
        (type(None), "null"),
        (Mapping, "an object"),
        ((list, tuple), "a list"),
    ]
    return next((kind for cls, kind in kinds if isinstance(value, cls)), f"of type {type(value).__name__}")


def show(value: object) -> str:
    """Return the value as the user wrote it in JSON, cut if long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        try:
            text = repr(value)
        except ValueError:  # an integer of more digits than Python prints
            text = "..."
    except RecursionError:
        text = "..."
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def report(problems: list[str], about: str = "nitro settings") -> str:
    """Return the message of a SettingsError that has these problems, at least one."""
    if len(problems) == 1:
        return f"{about}: {problems[0]}"
    return f"{about}: {len(problems)} problems" + "".join(f"\n  - {problem}" for problem in problems)
