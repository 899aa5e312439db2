"""How many tokens a request keeps, and when it is compacted. Counts only: which tokens stay is the policies' choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nitro.config import Settings
    from nitro.request_settings import RequestSettings


@dataclass(frozen=True, slots=True)
class _Rule:
    """What rules have in common."""

    sinks: int
    window: int
    slack: int
    evict_prompt: bool

    def protect(self, logical: int, prompt: int) -> int:
        """Return how many of the first slots always stay: the sinks, or the prompt where it is not to be evicted."""
        return self.sinks if self.evict_prompt else max(self.sinks, min(prompt, logical))

    def _spared(self, logical: int, prompt: int) -> int:
        """Return how many tokens stay beside those that are counted: the prompt where it is not to be evicted."""
        return 0 if self.evict_prompt else min(prompt, logical)


@dataclass(frozen=True, slots=True)
class BudgetRule(_Rule):
    """The budget of requests, derived from the settings; pure arithmetic on lengths in tokens.

    With ``evict_prompt`` false the prompt is protected and comes on top of the budget, so that the rule can always
    be met, however long the prompt is. With neither ``budget`` nor ``ratio`` nothing is ever evicted.
    """

    budget: int | None
    ratio: float | None

    @property
    def never(self) -> bool:
        """Whether requests under this rule keep all their tokens."""
        return self.budget is None and self.ratio is None

    def keep(self, logical: int, prompt: int) -> int:
        """Return the tokens that stay when a request of ``logical`` computed tokens is compacted."""
        base = self._spared(logical, prompt)
        if self.budget is not None:
            return base + self.budget
        if self.ratio is None:
            return logical
        return base + max(math.ceil(self.ratio * (logical - base)), self.sinks + self.window)

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

    def next_cut(self, logical: int, physical: int, prompt: int, most: int) -> tuple[int, int]:
        """Return by how many tokens a request grows until it is due, and how many it then keeps.

        Args:
            logical: tokens computed.
            physical: slots held.
            prompt: tokens of the prompt.
            most: tokens that are to come at all; if it is not due within them, as many or more are returned.
        """
        if self.budget is not None:
            keep = self.keep(logical, prompt)
            return keep + self.slack - physical, keep
        tokens = 0
        if self.ratio is not None:
            # What it may keep grows with it. It has as far to go as if nothing were rounded up, or a little farther.
            base = self._spared(logical, prompt)
            short = base + self.ratio * (logical - base) + self.slack - physical
            tokens = max(math.floor(min(short / (1 - self.ratio), most)) if self.ratio < 1 else most, 0)
        while tokens < most and (gap := self.gap(logical + tokens, physical + tokens, prompt)) > 0:
            tokens += gap
        return tokens, self.keep(logical + tokens, prompt)

    def peak(self, tokens: int, chunk: int) -> int:
        """Return the most slots a request of ``tokens`` prompt tokens holds while it is prefilled.

        Args:
            tokens: length of the sequence that is to be computed.
            chunk: the most tokens one engine step may add to it.
        """
        if not self.evict_prompt:
            return tokens
        return min(tokens, self.keep(tokens, tokens) + self.slack - 1 + chunk)


@dataclass(frozen=True, slots=True)
class ThresholdRule(_Rule):
    """The data decides how many tokens stay, within bounds; a worker is asked whenever ``slack`` tokens have come.

    With ``evict_prompt`` false the prompt comes on top of the bounds, as it does on top of a budget.

    Attributes:
        threshold: of the scores; tokens that reach it stay.
        min_keep: tokens that stay at least.
        max_keep: tokens that stay at most; None: any number.
    """

    threshold: float
    min_keep: int
    max_keep: int | None

    @property
    def never(self) -> bool:
        """Whether requests under this rule keep all their tokens."""
        return False

    def target(self, logical: int, physical: int, prompt: int) -> int | None:
        """Return the physical length to compact to whatever the data says; None if the bounds do not ask for that."""
        if self.max_keep is None:
            return None
        keep = self._spared(logical, prompt) + self.max_keep
        return keep if physical - keep >= self.slack else None

    def gap(self, logical: int, physical: int, prompt: int) -> int:
        """Return how many tokens a request must at least still grow by before a worker is asked; 0 or less: now."""
        return self._spared(logical, prompt) + self.min_keep + self.slack - physical

    def room(self, logical: int, physical: int, prompt: int) -> int | None:
        """Return by how many tokens a request can still grow until the bounds ask for an eviction; None: any number."""
        if self.max_keep is None:
            return None
        return self._spared(logical, prompt) + self.max_keep + self.slack - physical

    def pause(self, logical: int, physical: int, prompt: int, *, unjudged: int = 0) -> int:
        """Return how many tokens are to come, at least one, until a worker is asked again.

        With those that it has not judged yet they are ``slack``, but half of it where the bounds would ask for an
        eviction by then: it shall know the answer.

        Args:
            logical: tokens computed.
            physical: slots held.
            prompt: tokens of the prompt.
            unjudged: tokens that came after the question whose answer was just used.
        """
        room = self.room(logical, physical, prompt)
        return max(self.left(room, unjudged), 1) if room is None else max(min(self.left(room, unjudged), room), 1)

    def left(self, room: int | None, unjudged: int) -> int:
        """Return how many tokens are to come until a worker is asked again; 0 or less if it may be asked now.

        Args:
            room: what ``room`` returns.
            unjudged: tokens that came after the last question.
        """
        return (self.slack if room is None or room > self.slack else self.slack // 2) - unjudged

    def answered(self, reached: int, since: int, logical: int, prompt: int) -> int:
        """Return how many tokens stay, given a worker's answer.

        Args:
            reached: tokens that stay by their scores, of those that were scored.
            since: tokens that have come since; too new to be judged.
            logical: tokens computed by now.
            prompt: tokens of the prompt.
        """
        spared = self._spared(logical, prompt)
        keep = max(reached + since, spared + self.min_keep)
        return keep if self.max_keep is None else min(keep, spared + self.max_keep)

    def peak(self, tokens: int, chunk: int) -> int:
        """Return the most slots a request holds while it is prefilled; see ``BudgetRule.peak``."""
        if not self.evict_prompt or self.max_keep is None:
            return tokens
        return min(tokens, self.max_keep + self.slack - 1 + chunk)


Rule = BudgetRule | ThresholdRule


def rule_of(settings: Settings) -> Rule:
    """Return the rule of requests that say nothing, from validated settings."""
    common: dict[str, Any] = {
        "sinks": settings.sinks,
        "window": settings.window,
        "slack": settings.slack,
        "evict_prompt": settings.evict_prompt,
    }
    if settings.threshold is None:
        return BudgetRule(**common, budget=settings.budget, ratio=settings.ratio)
    least = settings.sinks + settings.window if settings.min_keep is None else settings.min_keep
    return ThresholdRule(**common, threshold=settings.threshold, min_keep=least, max_keep=settings.max_keep)


def rule_for(rule: Rule, asked: RequestSettings) -> Rule:
    """Return the rule of a request that has settings of its own, on a server that has this rule."""
    slack = rule.slack if asked.slack is None else asked.slack
    evict_prompt = rule.evict_prompt if asked.evict_prompt is None else asked.evict_prompt
    if asked.enabled and asked.budget is None and asked.ratio is None:
        return replace(rule, slack=slack, evict_prompt=evict_prompt)
    # With neither, as where a request is not to be evicted at all, nothing ever is.
    budget, ratio = (asked.budget, asked.ratio) if asked.enabled else (None, None)
    return BudgetRule(
        sinks=rule.sinks, window=rule.window, slack=slack, evict_prompt=evict_prompt, budget=budget, ratio=ratio
    )
