"""Evictions of the usual size at fixed addresses, so that a CUDA graph makes them: one copy and one launch.

Planning an eviction's half a dozen kernels takes the host longer than the GPU needs for them, and it is the same each
time but for numbers. Those go to one piece of memory on the device; what reads them is captured once for each of a few
numbers of requests, of which those that are missing in a step have no slots.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nitro.kernels.paged import RaggedBatch, check_counts
from nitro.kernels.tables import Tables
from nitro.types import IntArray

SIZES = (1, 2, 4, 8, 16, 32, 64)  # requests
_VECTOR = 4  # int32 numbers; each array begins at a multiple, as kernels are compiled for


class Numbers(NamedTuple):
    """What an eviction of R requests is told, on the host; all but the tables are int32 ``[R]``.

    Attributes:
        tables: blocks of each.
        lengths: slots of each.
        keep: slots that stay.
        protect: first slots that stay.
        first: slots that are stamped already.
        shift: tokens that each has lost.
        logical: tokens of each.
    """

    tables: Tables
    lengths: IntArray
    keep: IntArray
    protect: IntArray
    first: IntArray
    shift: IntArray
    logical: IntArray


Work = Callable[[RaggedBatch, Tensor, Tensor, Tensor], None]
"""Makes an eviction: gets the requests, and on the device ``first``, ``shift`` and ``logical`` as in `Numbers`."""


class StaticEvent:
    """An eviction of up to so many requests."""

    def __init__(self, work: Work, requests: int, slots: int, *, block_size: int, window: int, blocks: int) -> None:
        """Lay out the memory.

        Args:
            work: makes the eviction; it must launch the same whatever the numbers are, and never wait.
            requests: the most at once.
            slots: the most of each.
            block_size: slots of a block.
            window: newest slots that stay.
            blocks: of the cache.
        """
        self.requests, self._slots, self._window, self._blocks = requests, slots, window, blocks
        self._block_size, self._width = block_size, -(-slots // block_size)
        sizes = {"offsets": 2 * (requests + 1), **dict.fromkeys(Numbers._fields[1:], requests)}
        sizes["tables"] = requests * self._width
        self._places, end = {}, 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += -(-size // _VECTOR) * _VECTOR
        self._words = end
        self._work = work
        self._memory: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, device: torch.device, pool: Any) -> None:
        """Allocate the memory, and on a GPU capture the graph; without requests, nothing in the cache changes.

        Args:
            device: of the caches.
            pool: of the graph's memory, which graphs may share that never run at once; None off GPUs.
        """
        self._memory = memory = torch.zeros(self._words, dtype=torch.int32, device=device)
        there = {name: memory[place] for name, place in self._places.items()}
        table = there["tables"].view(self.requests, self._width)
        batch = RaggedBatch(
            block_tables=table,
            lengths=there["lengths"],
            keep=there["keep"],
            protect=there["protect"],
            offsets=there["offsets"].view(torch.int64),
            window=self._window,
            max_length=self._slots,
            total=self.requests * self._slots,
            dst_tables=table,
        )

        def work() -> None:
            self._work(batch, there["first"], there["shift"], there["logical"])

        self._run = work
        if pool is None:
            return
        work()  # compiles
        self._graph = torch.cuda.CUDAGraph()
        # A policy may be changed while the engine's other threads use the device.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            work()

    def run(self, x: Numbers) -> None:
        """Make the eviction of these requests; does not wait for the device.

        Raises:
            ValueError: a number is out of bounds; nothing was changed then.
        """
        assert self._memory is not None, "prepared before"
        check_counts(x.lengths, x.keep, x.protect, self._window)
        blocks, counts = x.tables
        low, high = int(blocks.min(initial=0)), int(blocks.max(initial=0))
        if low < 0 or high >= self._blocks:
            raise ValueError(f"block {low if low < 0 else high} is not within the cache's {self._blocks} blocks")
        if (counts * self._block_size < x.lengths).any() or counts.max(initial=0) > self._width:
            raise ValueError(
                f"tables of {counts.tolist()} blocks do not fit lengths of {x.lengths.tolist()} slots, of which there "
                f"may be {self._slots}"
            )
        staged = torch.zeros(self._words, dtype=torch.int32, pin_memory=self._graph is not None)
        here = staged.numpy()
        count = len(x.lengths)
        ends = here[self._places["offsets"]].view(np.int64)
        np.cumsum(x.lengths, out=ends[1 : count + 1])
        ends[count + 1 :] = ends[count]
        for name, numbers in zip(Numbers._fields[1:], x[1:], strict=True):
            here[self._places[name]][:count] = numbers
        rows = here[self._places["tables"]].reshape(self.requests, self._width)[:count]
        rows[np.arange(self._width) < counts[:, None]] = blocks
        self._memory.copy_(staged, non_blocking=True)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and not meanwhile: what a graph or its memory is freed by breaks a capture."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class StaticEvents:
    """Evictions of a few sizes."""

    def __init__(self, events: Sequence[StaticEvent], device: torch.device) -> None:
        """Prepare them.

        Args:
            events: at least one.
            device: of the caches.
        """
        # The largest first: the memory that the others share is as large as it gets, then.
        self._events = sorted(events, key=lambda event: event.requests, reverse=True)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        with _no_collection():
            for event in self._events:
                event.prepare(device, pool)
        self._events.reverse()

    @property
    def most(self) -> int:
        """The most requests at once."""
        return self._events[-1].requests

    def run(self, x: Numbers) -> None:
        """Make an eviction of at most ``most`` requests, in the smallest size that holds them.

        Raises:
            ValueError: as of `StaticEvent.run`.
        """
        next(event for event in self._events if event.requests >= len(x.lengths)).run(x)
