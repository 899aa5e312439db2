"""Carry Nitro's counters from the engine process to the process that serves ``/metrics``.

vLLM's SchedulerStats has no field for plugins, and its decoder drops unknown ones. ``waiting_lora_adapters`` (name to
count) is always empty when it leaves the engine, since the front-end fills it; so the counters travel there under
names that no adapter has, and are taken out again before any other logger sees them. Differences travel, not totals:
with several API servers each receives a share of the reports, and the sums come out right. Slots in use are no totals:
they travel as they are, in the reports for which they were counted.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from nitro.integration.vllm.slots import SlotUse
from nitro.types import Counters

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

PREFIX = "nitro:"
NAMES = tuple(field.name for field in fields(Counters))
SLOTS = tuple(f"{PREFIX}slots_{name}" for name in SlotUse._fields)


def put(stats: SchedulerStats, before: Counters, now: Counters) -> None:
    """Add what was counted since ``before``; nothing where nothing was."""
    for name in NAMES:
        if difference := getattr(now, name) - getattr(before, name):
            stats.waiting_lora_adapters[PREFIX + name] = difference


def take(stats: SchedulerStats) -> dict[str, int]:
    """Remove Nitro's counts from the statistics and return them by name."""
    carrier = stats.waiting_lora_adapters
    return {name: carrier.pop(PREFIX + name) for name in NAMES if PREFIX + name in carrier}


def put_slots(stats: SchedulerStats, use: SlotUse) -> None:
    """Add how many slots are held and used."""
    stats.waiting_lora_adapters.update(zip(SLOTS, use, strict=True))


def take_slots(stats: SchedulerStats) -> SlotUse | None:
    """Remove the slots from the statistics and return them; None where they were not counted for these."""
    carrier = stats.waiting_lora_adapters
    return SlotUse(*map(carrier.pop, SLOTS)) if SLOTS[0] in carrier else None
