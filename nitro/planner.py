"""How many tokens a request keeps, and when it is compacted. Counts only: which tokens stay is the policies' choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nitro.config import Settings
    from nitro.request_settings import RequestSettings


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """The budget of requests, derived from the settings; pure arithmetic on lengths in tokens.

    With ``evict_prompt`` false the prompt is protected and comes on top of the budget, so that the rule can always
    be met, however long the prompt is. With neither ``budget`` nor ``ratio`` nothing is ever evicted.
    """

    budget: int | None
    ratio: float | None
    sinks: int
    window: int
    slack: int
    evict_prompt: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> BudgetRule:
        """Take the fields that decide counts from validated settings."""
        return cls(
            budget=settings.budget,
            ratio=settings.ratio,
            sinks=settings.sinks,
            window=settings.window,
            slack=settings.slack,
            evict_prompt=settings.evict_prompt,
        )

    def for_request(self, asked: RequestSettings) -> BudgetRule:
        """Return the rule of a request that has settings of its own, on a server that has this rule."""
        if not asked.enabled:
            return replace(self, budget=None, ratio=None)
        own = asked.budget is not None or asked.ratio is not None
        return replace(
            self,
            budget=asked.budget if own else self.budget,
            ratio=asked.ratio if own else self.ratio,
            slack=self.slack if asked.slack is None else asked.slack,
            evict_prompt=self.evict_prompt if asked.evict_prompt is None else asked.evict_prompt,
        )

    @property
    def never(self) -> bool:
        """Whether requests under this rule keep all their tokens."""
        return self.budget is None and self.ratio is None

    def keep(self, logical: int, prompt: int) -> int:
        """Return the tokens that stay when a request of ``logical`` computed tokens is compacted."""
        base = 0 if self.evict_prompt else min(prompt, logical)
        if self.budget is not None:
            return base + self.budget
        if self.ratio is None:
            return logical
        return base + max(math.ceil(self.ratio * (logical - base)), self.sinks + self.window)

    def protect(self, logical: int, prompt: int) -> int:
        """Return how many of the first slots always stay: the sinks, or the prompt where it is not to be evicted."""
        return self.sinks if self.evict_prompt else max(self.sinks, min(prompt, logical))

    def target(self, logical: int, physical: int, prompt: int) -> int | None:
        """Return the physical length to compact to, or None if the request is not due.

        A request is due when it holds ``slack`` tokens more than it may keep, so that one compaction pays for
        ``slack`` steps.
        """
        keep = self.keep(logical, prompt)
        return keep if physical - keep >= self.slack else None

    def gap(self, logical: int, physical: int, prompt: int) -> int:
        """Return how many tokens a request must at least still grow by before it is due; 0 or less if it is."""
        return self.keep(logical, prompt) + self.slack - physical

    def peak(self, tokens: int, chunk: int) -> int:
        """Return the most slots a request of ``tokens`` prompt tokens holds while it is prefilled.

        Args:
            tokens: length of the sequence that is to be computed.
            chunk: the most tokens one engine step may add to it.
        """
        if not self.evict_prompt:
            return tokens
        return min(tokens, self.keep(tokens, tokens) + self.slack - 1 + chunk)
