"""After a run nothing may be left: every block free, every ledger empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nitro.collector import PoolView


@dataclass(frozen=True, slots=True)
class PoolState:
    """The block pool in plain numbers, which also cross process boundaries.

    Attributes:
        total_blocks: blocks of the pool, the null block included.
        free_blocks: distinct blocks in the free queue, as found by walking it.
        free_counter: the queue's own count of them.
        referenced_blocks: blocks other than the null block that somebody still refers to.
        table_entries: requests that still have a block table or a count of cached blocks, over all KV cache groups.
        requests: requests that the scheduler still knows.
        ledger_entries: requests in Nitro's ledger; 0 for stock vLLM.
    """

    total_blocks: int
    free_blocks: int
    free_counter: int
    referenced_blocks: int = 0
    table_entries: int = 0
    requests: int = 0
    ledger_entries: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> PoolState:
        """From vLLM's scheduler, Nitro's or stock; ``llm.llm_engine.engine_core.engine_core.scheduler`` in process."""
        pool = scheduler.kv_cache_manager.block_pool
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        collector = getattr(getattr(scheduler, "nitro", None), "collector", None)
        if collector is not None:
            collector.check_integrity(view_of(pool))
        return cls(
            total_blocks=pool.num_gpu_blocks,
            free_blocks=len({block.block_id for block in pool.free_block_queue.get_all_free_blocks()}),
            free_counter=pool.get_num_free_blocks(),
            referenced_blocks=sum(block.ref_cnt != 0 for block in pool.blocks if not block.is_null),
            table_entries=sum(len(m.req_to_blocks.keys() | m.num_cached_block.keys()) for m in managers),
            requests=len(scheduler.requests),
            ledger_entries=0 if collector is None else len(collector),
        )


def view_of(pool: Any) -> PoolView:
    """Return which blocks of vLLM's pool are free, and which are live, for the ledger's `check_integrity`."""
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    live = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    return PoolView(np.array(free, np.int32), np.array(live, np.int32))


def assert_pool_whole(source: Any) -> PoolState:
    """Asserts that no request holds, counts or remembers a block.

    Args:
        source: vLLM's scheduler, a `PoolState`, or a mapping with its fields.

    Returns:
        The state, for further checks.

    Raises:
        AssertionError: naming everything that was left behind.
    """
    if isinstance(source, PoolState):
        state = source
    else:
        state = PoolState(**source) if isinstance(source, Mapping) else PoolState.of(source)
    expected = PoolState(state.total_blocks, state.total_blocks - 1, state.total_blocks - 1)
    left = [
        f"{name}={getattr(state, name)} (expected {getattr(expected, name)})"
        for name in PoolState.__dataclass_fields__
        if getattr(state, name) != getattr(expected, name)
    ]
    if left:
        raise AssertionError(f"the block pool is not whole after the run: {', '.join(left)}")
    return state
