"""Who could see what: recorded keep sets turned into attention masks, per layer and query head.

A query at position q was computed when the cache held exactly what the last eviction before it had kept, and every
token computed since. With e the last record such that ``e.logical_len <= q``, the query sees
``kept_e ∪ [e.logical_len, q]``; without one it sees ``[0, q]``. Later prompt chunks are queries like any other, so one
teacher-forced pass under this mask equals the engine's many steps, chunked prefill with evictions in between included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nitro.types import KeepRecord


def kv_owners(num_heads: int, num_kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Per query head, the rank that computes it and that rank's local KV head, as vLLM shards attention.

    Rank r holds query heads ``[r * num_heads / tp, (r + 1) * num_heads / tp)`` and ``num_kv_heads / tp`` KV heads, or
    one replica of KV head ``r * num_kv_heads // tp`` where there are fewer KV heads than ranks. Replicas choose on
    their own what they keep, hence an owner per query head and not per KV head.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    divides = num_kv_heads % tp == 0 or tp % num_kv_heads == 0
    if num_heads % tp or num_heads % num_kv_heads or not divides:
        raise ValueError(f"num_heads={num_heads}, num_kv_heads={num_kv_heads} cannot be split over tp={tp} ranks")
    local_heads = num_heads // tp
    group = local_heads // max(1, num_kv_heads // tp)
    return [(head // local_heads, head % local_heads // group) for head in range(num_heads)]


class Visibility:
    """The mask of one run of one request; built per layer on demand, since all layers at once would not fit.

    Args:
        records_by_rank: per rank, the run's records in order; empty for full attention.
        length: tokens fed to the model, T.
        num_heads: query heads of the model.
        num_kv_heads: KV heads of the model, all ranks together.
    """

    def __init__(
        self, records_by_rank: Sequence[Sequence[KeepRecord]], length: int, num_heads: int, num_kv_heads: int
    ) -> None:
        self.length = length
        self.num_heads = num_heads
        self._owners = kv_owners(num_heads, num_kv_heads, max(1, len(records_by_rank)))
        self._records = [[r for r in records if r.logical_len < length] for records in records_by_rank]

    @property
    def first_eviction(self) -> int:
        """The first position whose query sees an evicted cache; `length` if none does."""
        return min((records[0].logical_len for records in self._records if records), default=self.length)

    def mask(self, layer: int) -> npt.NDArray[np.bool_]:
        """Which key each query of a layer sees.

        Args:
            layer: index of the layer.

        Returns:
            bool ``[num_heads, T, T]``: query head, query position, key position; True where visible. ``[1, T, T]``
            when nothing was evicted.
        """
        causal = np.tri(self.length, dtype=np.bool_)[None]
        if self.first_eviction == self.length:
            return causal
        mask = np.repeat(causal, self.num_heads, axis=0)
        for head, (rank, local) in enumerate(self._owners):
            records = self._records[rank]
            ends = [record.logical_len for record in records[1:]] + [self.length]
            for record, end in zip(records, ends, strict=True):
                start = record.logical_len
                mask[head, start:end, :start] = False
                mask[head, start:end, record.kept[layer, local]] = True
        return mask
