"""Score, select and compact the caches of one worker: which tokens stay is decided here.

Works on any paged cache through ``PagedCache``; knows torch, but not vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nitro.errors import IntegrityError
from nitro.kernels.compact import pack_ref
from nitro.kernels.select import select_topk_ref
from nitro.policies.base import Policy, ScoreInput, checked_score
from nitro.types import Counters, Eviction, KeepRecord

SCRATCH_BYTES = 256 * 2**20
"""How much gathered K and V one scoring call may hold; layers are taken in groups that stay below it."""


class PagedCache(Protocol):
    """The paged K and V of one attention layer, whatever their layout in memory."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    device: torch.device

    def gather(self, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return K and V, ``[num_kv_heads, length, head_dim]`` each, of the first ``length`` slots of these blocks."""

    def scatter(self, block_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite these blocks with K and V ``[num_kv_heads, length, head_dim]``; the last one's rest is zeroed."""


@dataclass(slots=True)
class _Request:
    """What a worker remembers of a request that has lost tokens."""

    epoch: int
    evicted: int
    logical_len: int
    positions: Tensor  # int32 [num_layers, num_kv_heads, slots held right after the last eviction]


def request_key(request_id: str) -> int:
    """Return an unsigned 64-bit hash of a request id, the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


class Compactor:
    """Applies evictions to the caches of one worker and remembers the logical position of every kept token."""

    def __init__(
        self,
        caches: Sequence[PagedCache],
        layers: Sequence[int],
        heads: Sequence[int],
        policy: Policy,
        *,
        sinks: int,
        window: int,
        seed: int,
    ) -> None:
        """Take over the caches of one worker.

        Args:
            caches: one per attention layer of this worker.
            layers: their global layer indices.
            heads: global indices of this worker's KV heads, the same in all layers.
            policy: scores the tokens; see ``set_policy``.
            sinks: first tokens that always stay.
            window: newest tokens that always stay.
            seed: of the policies that draw random numbers.
        """
        self.caches = tuple(caches)
        device = self.caches[0].device
        self.layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self.heads = torch.tensor(heads, dtype=torch.int64, device=device)
        self.sinks, self.window, self.seed = sinks, window, seed
        self.counters = Counters()
        self.records: list[KeepRecord] | None = None
        self._requests: dict[str, _Request] = {}
        self.set_policy(policy)

    def set_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, after a trial on random K and V of this worker's shape and dtype.

        Raises:
            SettingsError: the policy breaks its contract; better now than in the first long request.
        """
        length = 2 * self.window + self.sinks + 1
        drawn = [cache.gather(torch.zeros(1, dtype=torch.int64), 1)[0] for cache in self.caches]
        shape = (len(self.caches), drawn[0].shape[0], length, drawn[0].shape[-1])
        keys, values = (torch.randn(shape, device=drawn[0].device).to(drawn[0].dtype) for _ in range(2))
        positions = torch.arange(length, dtype=torch.int32, device=keys.device).expand(shape[:3])
        checked_score(policy, self._input(keys, values, positions, slice(None), 0, length))
        self.policy = policy

    def _input(
        self, keys: Tensor, values: Tensor, positions: Tensor, group: slice, key: int, logical_len: int
    ) -> ScoreInput:
        return ScoreInput(
            keys=keys,
            values=values,
            positions=positions,
            layers=self.layers[group],
            heads=self.heads,
            request_key=key,
            logical_len=logical_len,
            sinks=self.sinks,
            window=self.window,
            seed=self.seed,
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

    def apply(self, eviction: Eviction, src_blocks: Sequence[int], *, stable_id: str, run: int = 0) -> None:
        """Compact one request: score its slots, keep ``eviction.keep`` of them, write these to the destination.

        Args:
            eviction: what the scheduler decided.
            src_blocks: the request's block ids before it.
            stable_id: the request's id as its user knows it; seeds the random policy.
            run: how often the request was preempted before; only recorded.

        Raises:
            IntegrityError: the plan does not continue what this worker knows of the request.
        """
        known = self._requests.get(eviction.request_id)
        self._check(eviction, known, len(src_blocks))
        length, keep = eviction.physical_len, eviction.keep
        device = self.caches[0].device
        source = torch.as_tensor(src_blocks, dtype=torch.int64)[: -(-length // self.caches[0].block_size)]
        target = torch.as_tensor(eviction.dst_blocks, dtype=torch.int64)
        positions = self._positions(eviction, known)
        kept = torch.empty(*positions.shape[:2], keep, dtype=torch.int32)
        key = request_key(stable_id)
        for start, stop in self._groups(length):
            gathered = [cache.gather(source, length) for cache in self.caches[start:stop]]
            keys = torch.stack([k for k, _ in gathered])
            values = torch.stack([v for _, v in gathered])
            where = positions[start:stop].to(device)
            group = slice(start, stop)
            scores = checked_score(self.policy, self._input(keys, values, where, group, key, eviction.logical_len))
            index = select_topk_ref(scores, keep, eviction.protect, self.window)
            kept[start:stop] = where.gather(-1, index)
            for offset, cache in enumerate(self.caches[start:stop]):
                cache.scatter(target, pack_ref(keys[offset], index[offset]), pack_ref(values[offset], index[offset]))
        self._remember(eviction, kept, len(src_blocks), run)

    def _check(self, eviction: Eviction, known: _Request | None, blocks: int) -> None:
        epoch, evicted = (known.epoch, known.evicted) if known else (0, 0)
        have = (epoch, evicted)
        want = (eviction.epoch, eviction.logical_len - eviction.physical_len)
        if have != want or blocks * self.caches[0].block_size < eviction.physical_len:
            raise IntegrityError(
                f"plan for request {eviction.request_id!r} does not continue its state: (epoch, evicted) is {have}, "
                f"the plan says {want}; physical_len={eviction.physical_len} in {blocks} blocks of "
                f"{self.caches[0].block_size}. This is a bug in Nitro: please report it"
            )

    def _positions(self, eviction: Eviction, known: _Request | None) -> Tensor:
        """Return the logical positions int32 [num_layers, num_kv_heads, physical_len] of the request's slots."""
        since = known.logical_len if known else 0
        shape = (len(self.layers), len(self.heads), eviction.logical_len - since)
        new = torch.arange(since, eviction.logical_len, dtype=torch.int32).expand(shape)
        return torch.cat([known.positions, new], dim=-1) if known else new

    def _groups(self, length: int) -> list[tuple[int, int]]:
        cache, count = self.caches[0], len(self.caches)
        per_layer = 2 * 4 * cache.num_kv_heads * cache.head_dim * length  # K and V in fp32, as policies compute
        size = max(1, SCRATCH_BYTES // per_layer)
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def _remember(self, eviction: Eviction, kept: Tensor, old_blocks: int, run: int) -> None:
        evicted = eviction.logical_len - eviction.keep
        self._requests[eviction.request_id] = _Request(eviction.epoch + 1, evicted, eviction.logical_len, kept)
        total = self.counters
        self.counters = Counters(
            evictions=total.evictions + 1,
            tokens_evicted=total.tokens_evicted + eviction.physical_len - eviction.keep,
            blocks_freed=total.blocks_freed + old_blocks - len(eviction.dst_blocks),
        )
        if self.records is not None:
            self.records.append(KeepRecord(eviction.request_id, run, eviction.logical_len, kept.numpy().copy()))
