"""Values that cross module and process boundaries. They know neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Eviction:
    """One request's eviction in one engine step: how many tokens stay, and where they go.

    The scheduler decides this; which tokens stay is the worker's choice, per layer and KV head.

    Attributes:
        request_id: vLLM's (internal) request id.
        epoch: how many evictions the request has had before this one since it was last (re)started; a plan with
            an epoch the worker does not expect is a bug and is reported as one.
        logical_len: tokens computed before this step, counting evicted ones.
        physical_len: slots held before the eviction, ``logical_len - evicted``.
        keep: slots held after it; ``0 < keep < physical_len``.
        protect: the first slots that always stay (the sinks, or the whole prompt).
        dst_blocks: int32 block ids, ``ceil(keep / block_size)`` of them, that hold the survivors afterwards.
        src_blocks: int32 block ids, ``ceil(physical_len / block_size)`` of them, that hold the tokens before; for
            workers that do not remember them.
    """

    request_id: str
    epoch: int
    logical_len: int
    physical_len: int
    keep: int
    protect: int
    dst_blocks: IntArray
    src_blocks: IntArray = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All evictions of one engine step; travels with vLLM's SchedulerOutput to every worker."""

    evictions: tuple[Eviction, ...]


@dataclass(frozen=True, slots=True)
class KeepRecord:
    """What one worker kept in one eviction; the oracle builds its visibility mask from these.

    Attributes:
        request_id: vLLM's (internal) request id.
        run: 0 for the request's first run, +1 each time it was preempted and recomputed.
        logical_len: tokens computed before the eviction; queries at positions >= logical_len see the result.
        kept: int32 ``[num_layers, num_local_kv_heads, keep]``, logical positions, ascending along the last axis.
    """

    request_id: str
    run: int
    logical_len: int
    kept: IntArray


def to_wire(record: KeepRecord) -> dict[str, Any]:
    """Return a record as strings, ints and bytes, which every serialiser of vLLM carries (``from_wire`` inverts it).

    vLLM's message encoding passes neither dataclasses nor arrays unless its insecure (pickling) mode is on.
    """
    kept = np.ascontiguousarray(record.kept, dtype="<i4")
    return {
        "request_id": record.request_id,
        "run": record.run,
        "logical_len": record.logical_len,
        "shape": list(kept.shape),
        "kept": kept.tobytes(),
    }


def from_wire(wire: Mapping[str, Any]) -> KeepRecord:
    """Return the record that ``to_wire`` was given."""
    kept = np.frombuffer(wire["kept"], dtype="<i4").astype(np.int32).reshape(tuple(wire["shape"]))
    return KeepRecord(str(wire["request_id"]), int(wire["run"]), int(wire["logical_len"]), kept)


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since start-up.

    Attributes:
        evictions: evictions applied (one request in one step counts as one).
        tokens_evicted: tokens dropped from the cache, counted once per request (not per layer or head).
        blocks_freed: blocks given back to the pool by evictions, less the fresh blocks that these took from it.
    """

    evictions: int = 0
    tokens_evicted: int = 0
    blocks_freed: int = 0
