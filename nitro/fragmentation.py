"""Fragmentation: slots that a request holds over slots that are live, by what becomes of the dead ones.

Three ways of giving memory back, accounted for the same evictions:

- ``block``: nothing moves. A block goes when no layer and KV head keeps any of its slots; the others keep their holes.
- ``pack``: in each layer and head the survivors move together, in their order.
- ``fill``: the survivors behind the first ``keep`` slots move into the holes before, as many as there are.

Nitro serves the latter two, which hold the same number of blocks and differ in what they move. ``block`` is here to be
compared with: vLLM's attention reads every slot of a block, dead ones too, so that it could not be served exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from nitro.collector import dead_blocks
from nitro.types import IntArray, KeepRecord

Mode = Literal["block", "pack", "fill"]
MODES: tuple[Mode, ...] = ("block", "pack", "fill")
DEAD = -1


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Sums over the steps of one request, or of several.

    Attributes:
        allocated: slots held, in each layer and KV head, summed over the steps.
        live: slots held that a layer and KV head uses, likewise (equal for all of them).
        moved: slots that evictions have moved, in all layers and heads together.
    """

    allocated: int = 0
    live: int = 0
    moved: int = 0

    @property
    def ratio(self) -> float:
        """Slots held for each one in use; 1 is the least."""
        return self.allocated / self.live

    def __add__(self, other: Fragmentation) -> Fragmentation:
        """Return the sums of both."""
        return Fragmentation(self.allocated + other.allocated, self.live + other.live, self.moved + other.moved)


class Placement:
    """Where one request's tokens stand, in each layer and KV head, in one mode.

    Attributes:
        positions: int32 ``[layers, heads, slots]``, the logical position in each slot as of the last eviction, or
            ``DEAD``. Slot ``s`` is in the request's block ``s // block_size``.
        held: int32 ``[b]``, which of those blocks it still holds.
        logical_len: tokens computed at the last eviction.
        moved: slots that evictions have moved.
    """

    def __init__(self, mode: Mode, layers: int, heads: int, block_size: int) -> None:
        """Begin with no token."""
        self.mode, self.block_size = mode, block_size
        self.positions: IntArray = np.empty((layers, heads, 0), np.int32)
        self.held: IntArray = np.empty(0, np.int32)
        self.logical_len = 0
        self.moved = 0
        self._kept = 0

    def live(self, logical_len: int) -> int:
        """Return the slots in use, in each layer and head, when so many tokens are computed."""
        return self._kept + logical_len - self.logical_len

    def allocated(self, logical_len: int) -> int:
        """Return the slots held when so many tokens are computed: new ones follow the last slot."""
        slots = self.positions.shape[-1]
        ends = slots + logical_len - self.logical_len
        return (len(self.held) + self._blocks(ends) - self._blocks(slots)) * self.block_size

    def grow(self, logical_len: int) -> None:
        """Write the tokens up to this length behind those that are there."""
        layers, heads, slots = self.positions.shape
        new = np.arange(self.logical_len, logical_len, dtype=np.int32)
        self._kept = self.live(logical_len)
        self.logical_len = logical_len
        self.positions = np.concatenate([self.positions, np.broadcast_to(new, (layers, heads, len(new)))], axis=-1)
        added = np.arange(self._blocks(slots), self._blocks(self.positions.shape[-1]), dtype=np.int32)
        self.held = np.concatenate([self.held, added])

    def evict(self, kept: IntArray) -> None:
        """Drop what is not kept.

        Args:
            kept: int32 ``[layers, heads, keep]``, logical positions.
        """
        alive = self._alive(kept)
        keep = kept.shape[-1]
        self._kept = keep
        if self.mode == "block":
            self.positions = np.where(alive, self.positions, DEAD)
            live = np.nonzero(alive)[-1].astype(np.int64)
            gone = dead_blocks(self.held, live, self.block_size)
            self.held = np.setdiff1d(self.held, gone, assume_unique=True)
            return
        if self.mode == "pack":
            slots = np.nonzero(alive)[-1].reshape(kept.shape)
            self.moved += int((slots != np.arange(keep)).sum())
            packed = np.take_along_axis(self.positions, slots, axis=-1)
        else:
            packed, tail = self.positions[..., :keep].copy(), self.positions[..., keep:]
            movers = alive[..., keep:]
            # As many holes as movers in each layer and head, so that rank to rank they fit, one row after the other.
            packed[~alive[..., :keep]] = tail[movers]
            self.moved += int(movers.sum())
        self.positions = packed
        self.held = self.held[: self._blocks(keep)]

    def _alive(self, kept: IntArray) -> npt.NDArray[np.bool_]:
        chosen = np.zeros((*kept.shape[:2], self.logical_len + 1), np.bool_)  # DEAD looks up the last, which is False
        np.put_along_axis(chosen, kept.astype(np.int64), True, axis=-1)
        alive = np.take_along_axis(chosen, self.positions.astype(np.int64) % (self.logical_len + 1), axis=-1)
        if (alive.sum(axis=-1) != kept.shape[-1]).any():
            raise ValueError(f"at {self.logical_len} tokens, kept has positions that were dropped before, or twice")
        return alive

    def _blocks(self, slots: int) -> int:
        return -(-slots // self.block_size)


def place(records: Sequence[KeepRecord], mode: Mode, block_size: int) -> Placement:
    """Return where a request's tokens stand after these evictions of one run, at least one."""
    layers, heads, _ = records[0].kept.shape
    placement = Placement(mode, layers, heads, block_size)
    for record in records:
        placement.grow(record.logical_len)
        placement.evict(record.kept)
    return placement


def measure(records: Sequence[KeepRecord], prompt: int, end: int, mode: Mode, block_size: int) -> Fragmentation:
    """Add up one request's slots over its decode steps.

    Args:
        records: the evictions of one run, at least one, in order.
        prompt: tokens of the prompt; the first step that counts has them.
        end: tokens computed in the last step.
        mode: what becomes of dead slots.
        block_size: slots of a block.

    Raises:
        ValueError: a record keeps a token that an earlier one has dropped.
    """
    layers, heads, _ = records[0].kept.shape
    placement = Placement(mode, layers, heads, block_size)
    allocated = live = 0
    waiting = list(records)
    for length in range(min(prompt, records[0].logical_len), end + 1):
        # An eviction comes before the step that computes the next token.
        while waiting and waiting[0].logical_len < length:
            record = waiting.pop(0)
            placement.grow(record.logical_len)
            placement.evict(record.kept)
        if length >= prompt:
            allocated += placement.allocated(length)
            live += placement.live(length)
    return Fragmentation(allocated, live, placement.moved)
