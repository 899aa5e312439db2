"""What an evaluation runs."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import nitro
from nitro import policies
from nitro._suggest import did_you_mean
from nitro.errors import SettingsError

NULLS = ("random", "streaming")
"""Policies that every other one has to beat; they always run."""
TASKS = (
    "needle-noise",
    "needle-text",
    "needle-keys",
    "needle-word",
    "dictionary",
    "labels",
    "variables",
    "perplexity",
    "transcripts",
    "stories",
)
GO_ON = ("perplexity", "transcripts")
"""Tasks without a right answer: a text is given, and how it goes on."""
SINKS, WINDOW, SLACK = 4, 32, 32
BLOCK, CHUNK = 32, 16
"""Tokens of a block, and of a chunk of the prefill; `nitro.eval.serve` says why."""
FULL = "full"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy with options.

    Attributes:
        label: as the user wrote it, ``NAME`` or ``NAME:OPTION=VALUE:...``.
        name: of the policy.
        options: of the policy.
    """

    label: str
    name: str
    options: dict[str, bool | int | float | str]

    @classmethod
    def parse(cls, text: str) -> PolicyChoice:
        """Read ``NAME:OPTION=VALUE:...``.

        Raises:
            SettingsError: there is no such policy, or an option is wrong.
        """
        name, *rest = text.split(":")
        options: dict[str, bool | int | float | str] = {}
        for item in rest:
            option, equals, value = item.partition("=")
            if not equals:
                raise SettingsError(f"policy {text!r}: {item!r} is not OPTION=VALUE: write e.g. kvdiff:recency=0.5")
            options[option] = _value(value)
        policies.get(name, **options)
        return cls(text, name, options)

    @property
    def slug(self) -> str:
        """The label as a part of a file's name."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", self.label)


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The grid, and what is common to its cells.

    Attributes:
        tasks: some of ``TASKS``.
        policies: as ``PolicyChoice.parse`` reads them; the nulls are added.
        budgets: shares of the context (of ``stories``: of prompt and answer) that stay.
        lengths: of contexts, in tokens, multiples of a block; a context has a chunk less.
        contexts: independent ones a cell.
        answer: tokens that ``stories`` generates.
        seed: of contexts, of sampling, and of the policies that draw.
        parallel: requests at once; part of what a run's bits depend on.
    """

    tasks: tuple[str, ...] = ("needle-noise", "needle-text", "dictionary", "perplexity")
    policies: tuple[str, ...] = ("kvdiff", "vdiff", "keydiff")
    budgets: tuple[float, ...] = (0.5, 0.25, 0.165)
    lengths: tuple[int, ...] = (1024,)
    contexts: int = 30
    answer: int = 400
    seed: int = 0
    parallel: int = 16

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                hint = did_you_mean(task, TASKS) or ":"
                raise SettingsError(f"unknown task {task!r}{hint} tasks are {', '.join(TASKS)}")
        for budget in self.budgets:
            if not (math.isfinite(budget) and 0 < budget < 1):
                raise SettingsError(f"budgets: {budget} must be above 0 and below 1: give shares of the context")
        least = {"contexts": 1, "answer": 16, "parallel": 1, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise SettingsError(f"{name}={getattr(self, name)} is below {low}: raise it to at least {low}")
        for name in ("tasks", "policies", "budgets", "lengths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise SettingsError(f"{name}={','.join(map(str, values))!r}: give at least one, and each only once")
        for length in self.lengths:
            if length % BLOCK or length < 256:
                raise SettingsError(f"lengths: {length} must be a multiple of {BLOCK}, and at least 256")
        shortest = min(self.lengths)
        kept = round(min(self.budgets) * (shortest - CHUNK))
        if kept < SINKS + WINDOW + 1:
            raise SettingsError(
                f"budgets: {min(self.budgets)} of {shortest} tokens is {kept}, but the first {SINKS} and the last "
                f"{WINDOW} always stay: raise the budget or the length"
            )
        kept = round(min(self.budgets) * self.answer)
        if "stories" in self.tasks and kept < SINKS + WINDOW + 1:
            raise SettingsError(
                f"answer={self.answer}: {min(self.budgets)} of that is {kept}, but the first {SINKS} and the "
                f"last {WINDOW} always stay: raise --answer or the budget"
            )
        self.choices()

    def choices(self) -> tuple[PolicyChoice, ...]:
        """Return the policies that run, the nulls last.

        Raises:
            SettingsError: one of them is wrong.
        """
        labels = [*self.policies, *(null for null in NULLS if null not in self.policies)]
        return tuple(PolicyChoice.parse(label) for label in labels)

    def nitro_config(self) -> dict[str, dict[str, Any]]:
        """Return vLLM's ``additional_config``; policies and budgets are set later, the latter by each request."""
        return nitro.vllm_config(
            policy="streaming", budget=SINKS + WINDOW, sinks=SINKS, window=WINDOW, slack=SLACK, seed=self.seed
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> EvalSettings:
        """Return what `to_dict` was made of, also after a way through JSON."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        return cls(**values)
