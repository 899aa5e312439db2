"""What requests hold while they live, from Nitro's own rule (``nitro.planner``), step by step."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nitro.capacity.pool import Layout
    from nitro.planner import BudgetRule


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike.

    Attributes:
        prompt: tokens of a prompt.
        answer: tokens of an answer. The last one is never fed back, and takes no slot.
    """

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What one request holds.

    Attributes:
        prefill_peak: most blocks in a step that computes its prompt.
        decode_peak: most blocks later.
        mean_blocks: mean over the steps after the prompt.
        mean_slots: the same, in slots.
        mean_read: mean of the slots that a decoded token attends to, over the layers.
    """

    prefill_peak: int
    decode_peak: int
    mean_blocks: float
    mean_slots: float
    mean_read: float


def after_prompt(rule: BudgetRule, load: Load, physical: int) -> Iterator[int]:
    """Yield the slots held in each step after the prompt, of which ``physical`` slots are left.

    As the scheduler does: a request is compacted if it is due, and then takes the slot of the step's token.
    """
    for logical in range(load.prompt, load.prompt + load.answer - 1):
        physical = _compacted(rule, logical, physical, load.prompt) + 1
        yield physical


def _compacted(rule: BudgetRule, logical: int, physical: int, prompt: int) -> int:
    target = rule.target(logical, physical, prompt)
    return physical if target is None else min(target, physical)


def hold(rule: BudgetRule, load: Load, layout: Layout, chunk: int) -> Holding:
    """Return what a request holds that has an engine's whole step of ``chunk`` tokens for its prompt."""
    logical = physical = prefill_peak = 0
    while logical < load.prompt:
        physical = _compacted(rule, logical, physical, load.prompt)
        new = min(chunk, load.prompt - logical)
        logical, physical = logical + new, physical + new
        prefill_peak = max(prefill_peak, layout.blocks(physical, new))
    slots = list(after_prompt(rule, load, physical)) or [physical]
    blocks = [layout.blocks(held) for held in slots]
    return Holding(
        prefill_peak=prefill_peak,
        decode_peak=max(blocks),
        mean_blocks=statistics.fmean(blocks),
        mean_slots=statistics.fmean(slots),
        mean_read=statistics.fmean(layout.read_slots(held) for held in slots),
    )


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that come at once, in a pool without limit.

    Attributes:
        peak_blocks: most blocks in use in a step.
        peak_running: most requests at once.
        steps: of the engine.
    """

    peak_blocks: int
    peak_running: int
    steps: int


def burst(rule: BudgetRule, load: Load, layout: Layout, *, requests: int, chunk: int, max_seqs: int) -> Burst:
    """Play how vLLM serves requests that come at once: those that run first, a token each, then prompts in order.

    Args:
        rule: of how many tokens each keeps.
        load: their lengths.
        layout: of the cache.
        requests: how many come.
        chunk: tokens of a step (``max_num_batched_tokens``), at least ``max_seqs``.
        max_seqs: requests that may run at once.
    """

    @cache
    def answering(physical: int) -> tuple[int, ...]:
        return tuple(layout.blocks(held) for held in after_prompt(rule, load, physical))

    waiting, steps, peak, peak_running = requests, 0, 0, 0
    prefilling: list[tuple[int, int]] = []  # logical and physical lengths, in the order they came
    decoding: deque[list[int]] = deque()  # of those whose prompts ended alike in one step: how many, slots, steps since
    while waiting or prefilling or decoding:
        steps += 1
        left = chunk - sum(count for count, _, _ in decoding)
        used = sum(count * answering(slots)[since] for count, slots, since in decoding)
        running = sum(count for count, _, _ in decoding) + len(prefilling)
        ended: dict[int, int] = {}
        still = []
        while left > 0 and (prefilling or (waiting and running < max_seqs)):
            if prefilling:
                logical, physical = prefilling.pop(0)
            else:
                waiting, running, logical, physical = waiting - 1, running + 1, 0, 0
            new = min(left, load.prompt - logical)
            physical = _compacted(rule, logical, physical, load.prompt) + new
            left, logical = left - new, logical + new
            used += layout.blocks(physical, new)
            if logical == load.prompt:
                ended[physical] = ended.get(physical, 0) + 1
            else:
                still.append((logical, physical))
        used += sum(layout.blocks(physical) for _, physical in prefilling)
        prefilling = still + prefilling
        peak, peak_running = max(peak, used), max(peak_running, running)
        for cohort in decoding:
            cohort[2] += 1
        while decoding and decoding[0][2] == load.answer - 1:
            decoding.popleft()
        if load.answer > 1:
            decoding.extend([count, physical, 0] for physical, count in ended.items())
    return Burst(peak, peak_running, steps)
