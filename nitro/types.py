"""Values that cross module and process boundaries. They know neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
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
        src_blocks: int32 block ids, ``ceil(physical_len / block_size)`` of them, that hold the tokens before.
    """

    request_id: str
    epoch: int
    logical_len: int
    physical_len: int
    keep: int
    protect: int
    dst_blocks: IntArray
    src_blocks: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """All evictions of one engine step, as columns; travels with vLLM's SchedulerOutput to every worker.

    Most evictions are in place: the survivors go to the first blocks that the request has. So destinations are said
    only where they differ from that.

    Attributes:
        request_ids: of R requests, each once.
        counts: int32 ``[5, R]``: ``epoch``, ``logical_len``, ``physical_len``, ``keep``, ``protect`` of ``Eviction``.
        src_blocks: int32 ``[B]``, the ``src_blocks`` of one request after the other.
        moved: int32 ``[2, M]``: where in ``src_blocks`` a destination is not the block itself, ascending, and the block
            that it is there.
        block_size: slots of a block.
    """

    request_ids: tuple[str, ...]
    counts: IntArray
    src_blocks: IntArray
    moved: IntArray
    block_size: int

    @classmethod
    def of(cls, evictions: Sequence[Eviction], block_size: int) -> StepPlan:
        """Return these evictions, at least one, as columns."""
        numbers = [(e.epoch, e.logical_len, e.physical_len, e.keep, e.protect) for e in evictions]
        places, blocks, start = [], [], 0
        for e in evictions:
            differ = np.flatnonzero(e.dst_blocks != e.src_blocks[: len(e.dst_blocks)])
            places.append(start + differ)
            blocks.append(e.dst_blocks[differ])
            start += len(e.src_blocks)
        return cls(
            request_ids=tuple(e.request_id for e in evictions),
            counts=np.ascontiguousarray(np.array(numbers, np.int32).T),
            src_blocks=np.concatenate([e.src_blocks for e in evictions]),
            moved=np.stack([np.concatenate(places), np.concatenate(blocks)]).astype(np.int32),
            block_size=block_size,
        )

    def __len__(self) -> int:
        """R."""
        return len(self.request_ids)

    @property
    def epoch(self) -> IntArray:
        """Int32 ``[R]``."""
        return self.counts[0, :]

    @property
    def logical_len(self) -> IntArray:
        """Int32 ``[R]``."""
        return self.counts[1, :]

    @property
    def physical_len(self) -> IntArray:
        """Int32 ``[R]``."""
        return self.counts[2, :]

    @property
    def keep(self) -> IntArray:
        """Int32 ``[R]``."""
        return self.counts[3, :]

    @property
    def protect(self) -> IntArray:
        """Int32 ``[R]``."""
        return self.counts[4, :]

    def num_src(self) -> IntArray:
        """Return how many blocks each request has before, int32 ``[R]``."""
        return -(-self.physical_len // self.block_size)

    def num_dst(self) -> IntArray:
        """Return how many blocks each request has after, int32 ``[R]``."""
        return -(-self.keep // self.block_size)

    def src_ends(self) -> npt.NDArray[np.int64]:
        """Return where in ``src_blocks`` each request's end, int64 ``[R]``."""
        return np.cumsum(self.num_src(), dtype=np.int64)

    def stitched_blocks(self) -> IntArray:
        """Return ``src_blocks`` with the destinations in place of what they replace: a new int32 ``[B]``.

        These are the blocks to compact in once what is shared has been copied to its destination.
        """
        blocks = self.src_blocks.copy()
        blocks[self.moved[0]] = self.moved[1]
        return blocks

    def moved_cells(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the request (an index) and the column of its block table of each entry of ``moved``, ``[M]`` each."""
        ends = self.src_ends()
        request = np.searchsorted(ends, self.moved[0], side="right")
        return request, self.moved[0] - ends[request] + self.num_src()[request]

    def evictions(self) -> tuple[Eviction, ...]:
        """Return one request after the other, for whoever takes them like this; the arrays are views."""
        after, ends = self.stitched_blocks(), self.src_ends().tolist()
        columns = (*self.counts.tolist(), (0, *ends), ends, self.num_dst().tolist())
        return tuple(
            Eviction(
                request_id=request_id,
                epoch=epoch,
                logical_len=logical,
                physical_len=physical,
                keep=keep,
                protect=protect,
                dst_blocks=after[start : start + kept],
                src_blocks=self.src_blocks[start:end],
            )
            for request_id, epoch, logical, physical, keep, protect, start, end, kept in zip(
                self.request_ids, *columns, strict=False
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepAsks:
    """Requests of which the scheduler wants to know how many tokens reach a threshold; travels like a StepPlan.

    Attributes:
        slots: of R requests, what they hold, as if all of it were kept (``keep`` equals ``physical_len``).
        numbers: uint64 ``[R]``, the scheduler's numbers of the requests, which come back with the answers.
        runs: uint32 ``[R]``, how many times each was started again.
        step: the scheduler's number of the engine step.
        threshold: scores of at least this count.
        ring: the shared memory through which rank 0's worker answers.
    """

    slots: StepPlan
    numbers: npt.NDArray[np.uint64]
    runs: npt.NDArray[np.uint32]
    step: int
    threshold: float
    ring: str

    def __len__(self) -> int:
        """R."""
        return len(self.slots)


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


@dataclass(frozen=True, slots=True)
class BridgeCounters:
    """What became of the scheduler's questions, totals since start-up.

    Attributes:
        answers: came in time.
        stale: came too late to be used.
        lost: never came, so that the question was asked again.
        corrupt: were damaged.
        replaced: waited for room in the ring until a newer one of their request took their place.
        silent: were left out by a worker, whose GPU is too far behind.
    """

    answers: int = 0
    stale: int = 0
    lost: int = 0
    corrupt: int = 0
    replaced: int = 0
    silent: int = 0


class WorkReport(NamedTuple):
    """What rank 0's worker tells the scheduler beside a step's tokens.

    Attributes:
        host_ns: for each step since the last report that had evictions or questions, nanoseconds on the host.
        device_ns: likewise on the GPU, of steps that have ended there; such a step may have been reported before.
        replaced: see ``BridgeCounters``; since the last report.
        silent: likewise.
    """

    host_ns: tuple[int, ...] = ()
    device_ns: tuple[int, ...] = ()
    replaced: int = 0
    silent: int = 0
