"""One engine step's evictions in the scheduler: where survivors go, what is booked, what vLLM's pool gets back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from nitro.collector import Collector, TableEnds
from nitro.types import IntArray, StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from nitro.integration.vllm.manager import NitroFullAttentionManager


class StepEvictions:
    """Evictions that are gathered one request after the other, and then made all at once.

    All destinations are fixed before the first block is freed: a freed block is the first to be reused, so that
    otherwise one request's destination could be another one's source within the same step.
    """

    def __init__(self, manager: NitroFullAttentionManager, pool: BlockPool, collector: Collector) -> None:
        """Begin with none.

        Args:
            manager: has the requests' block lists, which are cut.
            pool: gives fresh blocks, and gets the freed ones.
            collector: the ledger of evicted requests.
        """
        self._manager, self._pool, self._collector = manager, pool, collector
        self._names: list[str] = []
        self._tables: list[list[KVCacheBlock]] = []
        # What goes into the plan, and what of a request's table is compared with the ledger, in columns.
        self._logical: list[int] = []
        self._physical: list[int] = []
        self._keep: list[int] = []
        self._protect: list[int] = []
        self._size: list[int] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._moves: dict[int, tuple[IntArray, IntArray]] = {}
        self._fresh: dict[int, list[tuple[int, KVCacheBlock]]] = {}  # where in its table each goes

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def add(self, name: str, logical: int, physical: int, keep: int, protect: int) -> bool:
        """Add a request's eviction, at most one; return False if there is no room for it yet.

        Args:
            name: the request.
            logical: tokens computed, counting evicted ones.
            physical: slots it holds.
            keep: slots it shall hold.
            protect: the first slots, which always stay.
        """
        blocks = self._manager.req_to_blocks[name]
        # After a first eviction all its blocks are its own, and in the ledger: survivors stay where they are.
        if logical == physical and not self._move(name, blocks, physical, keep):
            return False
        self._names.append(name)
        self._tables.append(blocks)
        self._logical.append(logical)
        self._physical.append(physical)
        self._keep.append(keep)
        self._protect.append(protect)
        self._size.append(len(blocks))
        self._first.append(blocks[0].block_id)
        self._last.append(blocks[-1].block_id)
        return True

    def _move(self, name: str, blocks: list[KVCacheBlock], physical: int, keep: int) -> bool:
        """Choose the destinations of a request that has had no eviction, and may share blocks."""
        ids = np.fromiter([block.block_id for block in blocks], np.int32, len(blocks))
        count = -(-keep // self._manager.block_size)
        reusable = [block.ref_cnt == 1 and block.block_hash is None for block in blocks[:count]]
        destination = self._collector.plan(name, ids, np.fromiter(reusable, np.uint8, len(reusable)), physical, keep)
        missing = np.flatnonzero(destination < 0)
        short = int(missing.size) - self._pool.get_num_free_blocks()
        if short > 0:
            # No room for copies: take as many of the request's own cached blocks as needed out of the prefix cache
            # and reuse them, the last first, since others are more likely to hit the beginning.
            own = [i for i in missing[::-1] if blocks[i].ref_cnt == 1][:short]
            if len(own) < short:
                return False  # the rest is shared with other requests; try again in the next step
            self._pool.evict_blocks({blocks[i].block_id for i in own})
            destination[own] = ids[own]
            missing = np.flatnonzero(destination < 0)
        if missing.size:
            fresh = self._pool.get_new_blocks(int(missing.size))
            destination[missing] = [block.block_id for block in fresh]
            self._fresh[len(self._names)] = list(zip(missing.tolist(), fresh, strict=True))
        self._moves[len(self._names)] = (ids, destination)
        return True

    @property
    def tokens(self) -> int:
        """Return how many tokens they evict together."""
        return sum(self._physical) - sum(self._keep)

    def commit(self) -> StepPlan:
        """Book the evictions, at least one, cut the requests' block lists, and free what they give up."""
        size = self._manager.block_size
        ends = TableEnds(self._size, self._first, self._last)
        done = self._collector.commit_all(self._names, self._physical, self._keep, ends, self._moves)
        freed: list[KVCacheBlock] = []  # the end of each table first, as vLLM does, so that prefixes live longest
        for index, (name, blocks, keep) in enumerate(zip(self._names, self._tables, self._keep, strict=True)):
            self._manager.nitro_enough.pop(name, None)
            count = -(-keep // size)
            freed += blocks[: count - 1 : -1]
            del blocks[count:]
            for place, block in reversed(self._fresh.get(index, ())):
                freed.append(blocks[place])
                blocks[place] = block
        if freed:
            self._pool.free_blocks(freed)
        columns = (done.epochs, self._logical, self._physical, self._keep, self._protect)
        flat = np.fromiter(chain.from_iterable(columns), np.int32, len(columns) * len(self))
        return StepPlan(
            request_ids=tuple(self._names),
            counts=flat.reshape(len(columns), -1),
            src_blocks=done.src,
            moved=done.moved,
            block_size=size,
        )
