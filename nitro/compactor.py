"""What every compactor has in common: the evictions it was given, checked, and what they left behind.

Which tokens stay is decided by the two kinds below, per layer and KV head: ``nitro.dense_compactor`` in PyTorch on any
layout of the cache, ``nitro.kernel_compactor`` in Triton on vLLM's GPU cache.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nitro.errors import IntegrityError
from nitro.policies.base import Policy
from nitro.types import Counters, Eviction, IntArray, KeepRecord


@dataclass(frozen=True, slots=True)
class Planned:
    """An eviction, and what its worker knows of the request.

    Attributes:
        eviction: what the scheduler decided.
        blocks: the request's block ids before it.
        stable_id: the request's id as its user knows it; seeds the random policy.
        run: how often the request was preempted before; only recorded.
    """

    eviction: Eviction
    blocks: Sequence[int]
    stable_id: str
    run: int = 0
    key: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", request_key(self.stable_id))


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker remembers of a request that has lost tokens.

    Attributes:
        epoch: evictions since it was last (re)started.
        evicted: tokens it has lost.
        logical_len: its tokens, evicted ones included, at the last eviction.
    """

    epoch: int = 0
    evicted: int = 0
    logical_len: int = 0

    @property
    def kept(self) -> int:
        """Slots it held right after the last eviction; 0 without one."""
        return self.logical_len - self.evicted


def request_key(request_id: str) -> int:
    """Return an unsigned 64-bit hash of a request id, the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


class Compactor(ABC):
    """Applies evictions to the caches of one worker, and knows how much each request has lost.

    Attributes:
        sinks: first tokens that always stay.
        window: newest tokens that always stay.
        seed: of the policies that draw random numbers.
        counters: totals since the start.
        records: what was kept, if a list; None does not record.
    """

    policy: Policy

    def __init__(self, block_size: int, *, sinks: int, window: int, seed: int) -> None:
        """Begin with no request."""
        self.block_size, self.sinks, self.window, self.seed = block_size, sinks, window, seed
        self.counters = Counters()
        self.records: list[KeepRecord] | None = None
        self._requests: dict[str, Held] = {}

    @abstractmethod
    def set_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, after a trial on this worker's shape and dtype.

        Raises:
            SettingsError: the policy breaks its contract; better now than in the first long request.
        """

    @abstractmethod
    def _compact(self, planned: Sequence[Planned]) -> list[IntArray] | None:
        """Move the survivors; return the logical positions of those, as in KeepRecord, if they are recorded."""

    def apply(self, planned: Sequence[Planned]) -> None:
        """Compact these requests: score their slots, keep as many as the plans say, write them to the destinations.

        Args:
            planned: one engine step's evictions, at most one of each request.

        Raises:
            IntegrityError: a plan does not continue what this worker knows of its request; nothing was changed then.
        """
        for item in planned:
            self._check(item)
        if not planned:
            return
        kept = self._compact(planned)
        for number, item in enumerate(planned):
            eviction = item.eviction
            evicted = eviction.logical_len - eviction.keep
            self._requests[eviction.request_id] = Held(eviction.epoch + 1, evicted, eviction.logical_len)
            if self.records is not None and kept is not None:
                where = np.ascontiguousarray(kept[number], np.int32)
                self.records.append(KeepRecord(eviction.request_id, item.run, eviction.logical_len, where))
        total = self.counters
        self.counters = Counters(
            evictions=total.evictions + len(planned),
            tokens_evicted=total.tokens_evicted + sum(p.eviction.physical_len - p.eviction.keep for p in planned),
            blocks_freed=total.blocks_freed + sum(len(p.blocks) - len(p.eviction.dst_blocks) for p in planned),
        )

    def evicted(self, request_id: str) -> int:
        """Return how many tokens a request has lost."""
        known = self._requests.get(request_id)
        return known.evicted if known else 0

    def __len__(self) -> int:
        """Return how many requests have lost tokens."""
        return len(self._requests)

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; unknown ones are ignored."""
        self._requests.pop(request_id, None)

    def held(self, request_id: str) -> Held:
        """Return what is known of a request."""
        return self._requests.get(request_id, Held())

    def _check(self, item: Planned) -> None:
        eviction, known = item.eviction, self.held(item.eviction.request_id)
        have = (known.epoch, known.evicted)
        want = (eviction.epoch, eviction.logical_len - eviction.physical_len)
        if have != want or len(item.blocks) * self.block_size < eviction.physical_len:
            raise IntegrityError(
                f"plan for request {eviction.request_id!r} does not continue its state: (epoch, evicted) is {have}, "
                f"the plan says {want}; physical_len={eviction.physical_len} in {len(item.blocks)} blocks of "
                f"{self.block_size}. This is a bug in Nitro: please report it"
            )
