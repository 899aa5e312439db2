"""What an engine recorded about its evictions, merged from its tensor-parallel ranks and checked for contradictions.

Records cross vLLM's process boundary as plain values: see `nitro.types.to_wire`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nitro.errors import IntegrityError
from nitro.types import IntArray, KeepRecord, from_wire


@dataclass(frozen=True, slots=True)
class Recording:
    """Every eviction of an engine, by rank.

    Attributes:
        records_by_rank: one tuple of records per tensor-parallel rank, in the order in which they were applied.
        run_starts: per (internal) request id and run, the number of tokens known (prompt and outputs so far) when
            the run started; a request that was never preempted has one run, which starts at its prompt's length.
    """

    records_by_rank: tuple[tuple[KeepRecord, ...], ...]
    run_starts: Mapping[str, tuple[int, ...]]

    @classmethod
    def combine(cls, parts: Sequence[Mapping[str, Any]]) -> Recording:
        """Merges what `llm.collective_rpc("nitro_take_recording")` returned, one mapping per rank.

        Args:
            parts: per rank ``{"rank": int, "tp": int, "records": [KeepRecord or its wire form, ...],
                "run_starts": {request_id: [int, ...]}}``, in any order.

        Raises:
            ValueError: a rank is missing, doubled or reports another tensor-parallel size.
            IntegrityError: the ranks disagree about a request's runs.
        """
        ranks = sorted(int(part["rank"]) for part in parts)
        if not parts or ranks != list(range(len(parts))) or any(int(part["tp"]) != len(parts) for part in parts):
            sizes = [int(part["tp"]) for part in parts]
            raise ValueError(f"ranks={ranks} with tp={sizes}: give the recording of each rank of 0..tp-1 once")
        ordered = sorted(parts, key=lambda part: int(part["rank"]))
        starts = [{str(k): tuple(int(n) for n in v) for k, v in part["run_starts"].items()} for part in ordered]
        for rank, other in enumerate(starts):
            if other != starts[0]:
                differing = sorted(k for k in starts[0].keys() | other.keys() if starts[0].get(k) != other.get(k))
                raise IntegrityError(f"ranks 0 and {rank} disagree about the runs of requests {differing[:5]}")
        records = tuple(tuple(_record(r) for r in part["records"]) for part in ordered)
        return cls(records, starts[0])

    def internal_id(self, request_id: str) -> str:
        """The engine's id of a request: vLLM appends ``-`` and 8 random hex digits to the id that users see."""
        if request_id in self.run_starts:
            return request_id
        pattern = re.compile(re.escape(request_id) + r"-[0-9a-f]{8}")
        found = [key for key in self.run_starts if pattern.fullmatch(key)]
        if len(found) != 1:
            known = sorted(self.run_starts)
            raise ValueError(f"request_id={request_id!r} matches {len(found)} of {len(known)} recorded: {known[:8]}")
        return found[0]

    def of(self, request_id: str) -> tuple[tuple[tuple[KeepRecord, ...], ...], tuple[int, ...]]:
        """The request's records by rank, and its run starts.

        Args:
            request_id: the id that users see, or the engine's internal one.

        Raises:
            ValueError: no recorded request, or more than one, has that id.
        """
        key = self.internal_id(request_id)
        records = tuple(tuple(r for r in rank if r.request_id == key) for rank in self.records_by_rank)
        return records, self.run_starts[key]


def _record(record: KeepRecord | Mapping[str, Any]) -> KeepRecord:
    return record if isinstance(record, KeepRecord) else from_wire(record)


def check_records(records_by_rank: Sequence[Sequence[KeepRecord]], num_layers: int, num_local_kv_heads: int) -> None:
    """Checks that one request's records can be true at all: evicted tokens never come back, ranks agree on counts.

    Args:
        records_by_rank: per rank, the records of one request, all runs, in order.
        num_layers: layers of the model.
        num_local_kv_heads: KV heads of each rank.

    Raises:
        IntegrityError: naming the rank, the run, the length and what is impossible about the record.
    """
    first = [(r.run, r.logical_len, r.kept.shape) for r in records_by_rank[0]]
    for rank, records in enumerate(records_by_rank):
        if (here := [(r.run, r.logical_len, r.kept.shape) for r in records]) != first:
            raise IntegrityError(f"rank {rank} recorded (run, logical_len, shape) {here}, rank 0 {first}")
        previous: KeepRecord | None = None
        for record in records:
            where = f"request {record.request_id!r} rank {rank} run {record.run} logical_len {record.logical_len}"
            if record.kept.ndim != 3 or record.kept.shape[:2] != (num_layers, num_local_kv_heads):
                expected = f"[{num_layers}, {num_local_kv_heads}, keep]"
                raise IntegrityError(f"{where}: kept has shape {list(record.kept.shape)}, expected {expected}")
            if previous is not None and previous.run != record.run:
                if previous.run > record.run:
                    raise IntegrityError(f"{where}: recorded after run {previous.run}")
                previous = None
            _check_positions(record, previous, where)
            previous = record


def _check_positions(record: KeepRecord, previous: KeepRecord | None, where: str) -> None:
    kept = record.kept
    if kept.size == 0 or kept.min() < 0 or kept.max() >= record.logical_len:
        raise IntegrityError(f"{where}: kept positions must be non-empty and in [0, {record.logical_len})")
    if (np.diff(kept, axis=-1) <= 0).any():
        raise IntegrityError(f"{where}: kept positions must ascend strictly")
    if previous is None:
        return
    if record.logical_len < previous.logical_len:
        raise IntegrityError(f"{where}: recorded after logical_len {previous.logical_len} of the same run")
    for layer, head in np.ndindex(kept.shape[:2]):
        old: IntArray = kept[layer, head][kept[layer, head] < previous.logical_len]
        revived = np.setdiff1d(old, previous.kept[layer, head])
        if revived.size:
            raise IntegrityError(
                f"{where}: layer {layer} KV head {head} keeps positions {revived[:8].tolist()}, "
                f"which the eviction at {previous.logical_len} had dropped"
            )


def runs_of(positions: Iterable[int], run_starts: Sequence[int]) -> list[int]:
    """For each position of an output token, the run that generated it: the last that started at or before it."""
    return [int(np.searchsorted(np.asarray(run_starts), position, side="right")) - 1 for position in positions]
