"""The same sweep three ways, on the same arrays: what `ci/bench_sweep.py` and `tests/perf/test_sweep.py` time.

Which blocks hold no live token any longer? Requests own blocks of 16 slots; a fifth of the blocks are dead, and of the
slots of the others about a third are live, in the order of the tables, as a mask of their slots has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from ledger import adopt, commit

from nitro.collector import Collector, TableEnds, dead_blocks
from nitro.types import IntArray

BLOCK = 16
REQUESTS = 2048
# Of all requests together: 49 to 488 for each of 2,048.
SIZES = (100_000, 200_000, 400_000, 700_000, 1_000_000)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Arguments of a sweep.

    Attributes:
        blocks: int32 ``[B]``, the blocks of all requests, one table after the other.
        live: int64 ``[N]``, the slots in use.
    """

    blocks: IntArray
    live: npt.NDArray[np.int64]


def make_pool(slots: int, seed: int = 0) -> Pool:
    """Return the tables of requests over so many slots, with ids in the order of a pool that was used a lot."""
    generator = np.random.default_rng(seed)
    count = slots // BLOCK
    blocks = generator.permutation(np.arange(1, count + 1, dtype=np.int32))
    alive = blocks[generator.random(count) < 0.8].astype(np.int64)
    mask = generator.random((len(alive), BLOCK)) < 1 / 3
    mask[np.arange(len(alive)), generator.integers(0, BLOCK, len(alive))] = True
    live = (alive[:, None] * BLOCK + np.arange(BLOCK))[mask]
    return Pool(blocks, live)


def nested_loops(blocks: Sequence[int], live: Sequence[int], block_size: int = BLOCK) -> list[int]:
    """For each block, look through the live slots for one of its own: blocks × slots steps."""
    dead = []
    for block in blocks:
        for slot in live:
            if slot // block_size == block:
                break
        else:
            dead.append(block)
    return dead


def hash_sweep(blocks: Sequence[int], live: Sequence[int], block_size: int = BLOCK) -> list[int]:
    """Put the live slots' blocks into a set, and ask it for each block: blocks + slots steps."""
    alive = {slot // block_size for slot in live}
    return [block for block in blocks if block not in alive]


def native_sweep(pool: Pool) -> IntArray:
    """Do it in C++."""
    return dead_blocks(pool.blocks, pool.live, BLOCK)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest processor time of several calls; other work on the machine can only lengthen it."""
    best = math.inf
    for _ in range(repeats):
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    return best


def growth(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the exponent b of time = a · size^b, fitted to the logarithms by least squares: 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


class EssayLedger:
    """The ledger at the essay's shape: 2,048 requests that decode, budget 330 and slack 64.

    In each step a 64th of the requests is evicted from, and about a sixteenth gets a block.
    """

    BUDGET, SLACK = 330, 64

    def __init__(self, requests: int = REQUESTS) -> None:
        """Let each request have had its first eviction, with lengths spread evenly between budget and due."""
        most = -(-(self.BUDGET + self.SLACK) // BLOCK)
        self.kept = -(-self.BUDGET // BLOCK)
        self.collector = Collector(requests * (most + 1) + 1, BLOCK)
        self.names = [f"request-{i}" for i in range(requests)]
        self.free = list(range(1, requests * (most + 1) + 1))
        self.tables: dict[str, list[int]] = {}
        self.slots: dict[str, int] = {}
        for number, name in enumerate(self.names):
            table = np.array(self._take(most), np.int32)
            physical = self.BUDGET + self.SLACK
            self._give(commit(self.collector, name, table, table[: self.kept], physical, self.BUDGET).tolist())
            self.tables[name], self.slots[name] = table[: self.kept].tolist(), self.BUDGET
            self._grow(name, number % self.SLACK, partial(adopt, self.collector))

    def step(self) -> tuple[float, int, int]:
        """Let each request grow by a token; return the ledger's processor time, evictions and adoptions.

        Taking blocks and making lists is the scheduler's part, and is not timed.
        """
        due = [name for name in self.names if self.slots[name] == self.BUDGET + self.SLACK]
        tables = [self.tables[name] for name in due]
        ends = TableEnds([len(t) for t in tables], [t[0] for t in tables], [t[-1] for t in tables])
        physical, keep = [self.BUDGET + self.SLACK] * len(due), [self.BUDGET] * len(due)
        spent = 0.0
        if due:
            started = time.thread_time()
            done = self.collector.commit_all(due, physical, keep, ends, {})
            spent = time.thread_time() - started
            self._give(done.freed.tolist())
        for name, table in zip(due, tables, strict=True):
            del table[self.kept :]
            self.slots[name] = self.BUDGET
        grown: list[tuple[str, list[int]]] = []
        for name in self.names:
            self._grow(name, 1, lambda *call: grown.append(call))
        names, given = [name for name, _ in grown], [new for _, new in grown]
        counts, blocks = [len(new) for new in given], [block for new in given for block in new]
        started = time.thread_time()
        self.collector.adopt_all(names, counts, blocks)
        spent += time.thread_time() - started
        return spent, len(due), len(grown)

    def _take(self, count: int) -> list[int]:
        taken, self.free[-count:] = self.free[-count:], []
        return taken

    def _give(self, blocks: list[int]) -> None:
        self.free += blocks

    def _grow(self, name: str, tokens: int, adopt: Callable[[str, list[int]], object]) -> None:
        self.slots[name] += tokens
        table = self.tables[name]
        if missing := -(-self.slots[name] // BLOCK) - len(table):
            new = self._take(missing)
            table += new
            adopt(name, new)
