"""One request's eviction, and one request's new blocks, by the calls that the ledger has for those of a whole step."""

from __future__ import annotations

from collections.abc import Sequence

from nitro.collector import Collector, TableEnds
from nitro.types import IntArray

_UNUSED = TableEnds([0], [0], [0])  # where the blocks themselves are given


def commit(
    collector: Collector, request_id: str, blocks: IntArray, dst: IntArray, physical: int, keep: int
) -> IntArray:
    """Record an eviction that is not in place; return the blocks that are to be given back."""
    return collector.commit_all([request_id], [physical], [keep], _UNUSED, {0: (blocks, dst)}).freed


def adopt(collector: Collector, request_id: str, blocks: Sequence[int]) -> None:
    """Book the blocks that the pool gave to one request."""
    collector.adopt_all([request_id], [len(blocks)], blocks)
