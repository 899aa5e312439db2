"""Compaction in PyTorch, on any paged cache: gathers a request's K and V, scores them, writes the survivors back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nitro.compactor import NO_ROTATIONS, Before, Compactor
from nitro.kernels.compact import pack_ref
from nitro.kernels.pool import merge_dense_ref
from nitro.kernels.select import select_topk_ref
from nitro.policies.base import Policy, ScoreInput, checked_score
from nitro.policies.rotary import Rotations
from nitro.pooling import Merging
from nitro.types import Eviction, IntArray, StepPlan

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


class DenseCompactor(Compactor):
    """Takes the requests one by one, and keeps the order of the survivors."""

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
        rotations: Rotations = NO_ROTATIONS,
        merging: Merging | None = None,
        stable_id: Callable[[str], str] = str,
    ) -> None:
        """Take over the caches of one worker.

        Args:
            caches: one per attention layer of this worker.
            layers: their global layer indices.
            heads: global indices of this worker's KV heads, the same in all layers.
            policy: scores the tokens; see ``set_policy``.
            sinks: as in ``Compactor``, like what follows.
            window: as above.
            seed: as above.
            rotations: as above.
            merging: how evicted tokens are folded into survivors; None: they are dropped.
            stable_id: as above.
        """
        super().__init__(
            caches[0].block_size, sinks=sinks, window=window, seed=seed, rotations=rotations, stable_id=stable_id
        )
        self.caches = tuple(caches)
        device = self.caches[0].device
        self.layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self.heads = torch.tensor(heads, dtype=torch.int64, device=device)
        # int32 [num_layers, num_kv_heads, slots right after the last eviction] of each request that had one
        self._positions: dict[str, Tensor] = {}
        self._merging = merging
        self._masses: dict[str, Tensor] = {}  # likewise, if there is pooling: how many tokens each slot stands for
        self.set_policy(policy)

    def set_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, after a trial on random K and V of this worker's shape and dtype."""
        length = 2 * self.window + self.sinks + 1
        drawn = [cache.gather(torch.zeros(1, dtype=torch.int64), 1)[0] for cache in self.caches]
        shape = (len(self.caches), drawn[0].shape[0], length, drawn[0].shape[-1])
        keys, values = (torch.randn(shape, device=drawn[0].device).to(drawn[0].dtype) for _ in range(2))
        positions = torch.arange(length, dtype=torch.int32, device=keys.device).expand(shape[:3])
        checked_score(policy, self._input(keys, values, positions, slice(None), 0, length))
        self.policy = policy
        self._say_what_cannot_be_undone()

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; unknown ones are ignored."""
        super().forget(request_id)
        self._positions.pop(request_id, None)
        self._masses.pop(request_id, None)

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
            rotations=self.rotations.layers[group],
        )

    def _compact(self, plan: StepPlan, before: Before) -> list[IntArray]:
        evictions = plan.evictions()
        kept = [self._compact_one(eviction, key) for eviction, key in zip(evictions, before.keys, strict=True)]
        self._positions.update(zip(plan.request_ids, kept, strict=True))
        return [where.numpy().copy() for where in kept] if self.records is not None else []

    def _compact_one(self, eviction: Eviction, key: int) -> Tensor:
        target = torch.as_tensor(eviction.dst_blocks, dtype=torch.int64)
        kept = torch.empty(len(self.layers), len(self.heads), eviction.keep, dtype=torch.int32)
        masses = self._masses_of(eviction) if self._merging is not None else None
        for group, x, scores in self._scored(eviction, key):
            index = select_topk_ref(scores, eviction.keep, eviction.protect, self.window)
            kept[group] = x.positions.gather(-1, index)
            for offset, cache in enumerate(self.caches[group]):
                keys, values = pack_ref(x.keys[offset], index[offset]), pack_ref(x.values[offset], index[offset])
                if masses is not None:
                    of = masses[group.start + offset]
                    values, of[:, : eviction.keep] = self._merged(x, offset, of, index[offset], eviction.protect)
                cache.scatter(target, keys, values)
        if masses is not None:
            self._masses[eviction.request_id] = masses[..., : eviction.keep].clone()
        return kept

    def _merged(self, x: ScoreInput, layer: int, masses: Tensor, index: Tensor, protect: int) -> tuple[Tensor, Tensor]:
        """Return a layer's values and masses of survivors once they have taken what is evicted."""
        how, device = self._merging, x.keys.device
        assert how is not None
        values, grown = merge_dense_ref(
            x.keys[layer, None],
            x.values[layer, None],
            masses[None].to(device),
            index[None],
            protect=protect,
            least=how.least,
            own=how.own,
            most=how.most,
        )
        return values[0], grown[0]

    def _masses_of(self, eviction: Eviction) -> Tensor:
        """Return how many tokens each slot stands for, int32 [num_layers, num_kv_heads, physical_len]."""
        fresh = torch.ones(len(self.layers), len(self.heads), eviction.physical_len, dtype=torch.int32)
        known = self._masses.get(eviction.request_id)
        if known is not None:
            fresh[..., : known.shape[-1]] = known
        return fresh

    def _count(self, slots: StepPlan, before: Before, threshold: float) -> Tensor:
        rows = len(self.layers) * len(self.heads)
        counts = []
        for request, key in zip(slots.evictions(), before.keys, strict=True):
            slot = torch.arange(request.physical_len, device=self.caches[0].device)
            forced = (slot < request.protect) | (slot >= request.physical_len - self.window)
            reached = [int(((scores >= threshold) | forced).sum()) for _, _, scores in self._scored(request, key)]
            counts.append(-(-sum(reached) // rows))
        return torch.tensor(counts, dtype=torch.int32, device=self.caches[0].device)

    def _scored(self, request: Eviction, key: int) -> Iterator[tuple[slice, ScoreInput, Tensor]]:
        """Yield which layers, their gathered slots, and the scores float32 ``[layers, num_kv_heads, physical_len]``."""
        source = torch.as_tensor(request.src_blocks, dtype=torch.int64)
        positions = self._positions_of(request)
        for start, stop in self._groups(request.physical_len):
            group = slice(start, stop)
            gathered = [cache.gather(source, request.physical_len) for cache in self.caches[group]]
            keys = torch.stack([k for k, _ in gathered])
            values = torch.stack([v for _, v in gathered])
            where = positions[group].to(keys.device)
            x = self._input(keys, values, where, group, key, request.logical_len)
            yield group, x, checked_score(self.policy, x)

    def _positions_of(self, eviction: Eviction) -> Tensor:
        """Return the logical positions int32 [num_layers, num_kv_heads, physical_len] of the request's slots."""
        since = self.held(eviction.request_id).logical_len
        shape = (len(self.layers), len(self.heads), eviction.logical_len - since)
        new = torch.arange(since, eviction.logical_len, dtype=torch.int32).expand(shape)
        known = self._positions.get(eviction.request_id)
        return new if known is None else torch.cat([known, new], dim=-1)

    def _groups(self, length: int) -> list[tuple[int, int]]:
        cache, count = self.caches[0], len(self.caches)
        per_layer = 2 * 4 * cache.num_kv_heads * cache.head_dim * length  # K and V in fp32, as policies compute
        size = max(1, SCRATCH_BYTES // per_layer)
        return [(start, min(start + size, count)) for start in range(0, count, size)]
