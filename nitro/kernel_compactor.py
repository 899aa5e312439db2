"""Compaction in Triton, on vLLM's GPU cache: all requests and layers of a step in a fixed number of launches."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nitro.compactor import NO_ROTATIONS, Before, Compactor
from nitro.kernels.blocks import copy_blocks, stamp_positions
from nitro.kernels.compact import fill_ragged
from nitro.kernels.newest import force_newest
from nitro.kernels.paged import PagedLayers, RaggedBatch, to_device
from nitro.kernels.select import TILES, select_ragged, threshold_ragged
from nitro.kernels.tables import Tables
from nitro.policies.base import Policy, ScoreInput, checked_score, checked_score_ragged
from nitro.policies.ragged import RaggedInput
from nitro.policies.rotary import Rotations
from nitro.static_events import SIZES, Numbers, StaticEvent, StaticEvents
from nitro.types import IntArray, StepPlan

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 256 * 2**20
"""What scores, masks and what a policy needs beside them may take; larger steps are worked off in parts."""
STATIC_BYTES = 64 * 2**20
"""Of those, what evictions of the usual size may take for themselves."""
_BYTES_PER_SLOT = 32  # of one layer and KV head: scores and mask 5, scores that are combined and their ranks 24
_TRIAL_LAYERS = 2
T = TypeVar("T")
_Use = Callable[[RaggedInput, Tensor, RaggedBatch], T]


def positions_bytes(num_kv_heads: int, block_size: int) -> int:
    """Return what the logical positions of one block of one layer take, in bytes."""
    return num_kv_heads * block_size * 4


def _drawn_like(cache: Tensor, blocks: int) -> Tensor:
    """Return a cache of a few blocks of random K and V, with the same strides."""
    shape = (blocks, *cache.shape[1:])
    drawn = torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return drawn.copy_(torch.randn(shape, device=cache.device))  # FP8 cannot be drawn itself


def _keep_selected(x: RaggedInput, scores: Tensor, chosen: RaggedBatch) -> None:
    mask, _ = select_ragged(scores, chosen)
    fill_ragged(x.layers, x.batch, mask, x.positions, scratch=scores.view(torch.int32))


class KernelCompactor(Compactor):
    """Moves survivors of the tail into the holes of the head, so that a request's slots are in no order afterwards."""

    def __init__(
        self,
        layers: PagedLayers,
        layer_ids: Sequence[int],
        head_ids: Sequence[int],
        policy: Policy,
        *,
        sinks: int,
        window: int,
        seed: int,
        longest: int,
        usual: int = 0,
        counts: bool = False,
        rotations: Rotations = NO_ROTATIONS,
        stable_id: Callable[[str], str] = str,
    ) -> None:
        """Take over the caches of one worker, none of whose blocks is in use yet.

        Args:
            layers: the caches of this worker.
            layer_ids: their global layer indices.
            head_ids: global indices of this worker's KV heads, the same in all layers.
            policy: scores the tokens; see ``set_policy``.
            sinks: as in ``Compactor``, like what follows.
            window: as above.
            seed: as above.
            longest: most slots of a request; the kernels for all lengths up to it are compiled here and now.
            usual: slots that most evictions begin with, at most; those are made at fixed addresses, on GPUs by CUDA
                graphs, if the policy is ``capturable``. 0: none are.
            counts: whether ``count`` will be called, so that its kernels are compiled, too.
            rotations: as in ``Compactor``.
            stable_id: as in ``Compactor``.
        """
        super().__init__(
            layers.block_size, sinks=sinks, window=window, seed=seed, rotations=rotations, stable_id=stable_id
        )
        self.layers = layers
        device = layers.device
        self.layer_ids = torch.tensor(layer_ids, dtype=torch.int64, device=device)
        self.head_ids = torch.tensor(head_ids, dtype=torch.int64, device=device)
        shape = (layers.num_layers, layers.num_blocks, layers.num_kv_heads, layers.block_size)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self._static: StaticEvents | None
        self._longest, self._counts = longest, counts
        self._usual, self._static = 0, None
        self.set_policy(policy)
        self._warm_up(policy)
        self._usual = usual
        self._static = self._make_static()

    def set_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, after a trial on random K and V of this worker's shape and dtype.

        The trial is of two layers: with a large window, all of them would take gigabytes that the cache has already.
        """
        length = 2 * self.window + self.sinks + 1
        caches = self.layers.caches[:_TRIAL_LAYERS]
        layer_ids = self.layer_ids[:_TRIAL_LAYERS]
        shape = (len(caches), self.layers.num_kv_heads, length, self.layers.head_dim)
        dtype = torch.float32 if self.layers.scales is not None else self.layers.dtype  # as policies get it
        keys, values = (torch.randn(shape, device=self.layers.device).to(dtype) for _ in range(2))
        where = torch.arange(length, dtype=torch.int32, device=keys.device).expand(shape[:3])
        trial = ScoreInput(
            keys=keys,
            values=values,
            positions=where,
            layers=layer_ids,
            heads=self.head_ids,
            request_key=0,
            logical_len=length,
            sinks=self.sinks,
            window=self.window,
            seed=self.seed,
            rotations=self.rotations.layers[: len(caches)],
        )
        checked_score(policy, trial)
        blocks = -(-length // self.block_size)
        scales = None if self.layers.scales is None else self.layers.scales[: len(caches)]
        drawn = PagedLayers.of([_drawn_like(cache, blocks) for cache in caches], scales)
        positions = torch.arange(blocks * self.block_size, dtype=torch.int32, device=keys.device)
        positions = positions.view(1, blocks, 1, self.block_size).expand(shape[0], -1, shape[1], -1).contiguous()
        batch, (logical,) = self._batch(
            [np.array([length], np.int32)], [list(range(blocks))], [length], [length], [self.sinks]
        )
        x = self._ragged(batch, [length], [length], logical, [0], newest_last=True)
        for newest_last in (True, False):
            x = dataclasses.replace(
                x,
                layers=drawn,
                layer_ids=layer_ids,
                positions=positions,
                newest_last=newest_last,
                rotations=trial.rotations,
            )
            checked_score_ragged(policy, x)
        self.policy = policy
        self._say_what_cannot_be_undone()
        self._static = None  # its memory is free for the new one's
        self._static = self._make_static()

    def _make_static(self) -> StaticEvents | None:
        """Return what makes evictions of the usual size, if there are any and their memory suffices."""
        each = _BYTES_PER_SLOT * self.layers.num_layers * self.layers.num_kv_heads * self._usual
        sizes = [requests for requests in SIZES if requests * each <= STATIC_BYTES]
        if not self._usual or not sizes or not self.policy.capturable:
            return None
        started = time.monotonic()
        shape = {"block_size": self.block_size, "window": self.window, "blocks": self.layers.num_blocks}
        events = [StaticEvent(self._evict_static, requests, self._usual, **shape) for requests in sizes]
        made = StaticEvents(events, self.layers.device)
        logger.info(
            "prepared evictions of up to %d requests of %d slots in %.1f s",
            made.most,
            self._usual,
            time.monotonic() - started,
        )
        return made

    def _evict_static(self, batch: RaggedBatch, first: Tensor, shift: Tensor, logical: Tensor) -> None:
        """Launch what an eviction takes; of the numbers, only the device's may be used (``Policy.capturable``)."""
        slots, keys = [batch.max_length] * batch.num_requests, [0] * batch.num_requests
        x = self._ragged(batch, slots, slots, logical, keys, newest_last=True)
        stamp_positions(self.layers, batch, self.positions, first, shift)
        self._score_part(x, _keep_selected)

    def _warm_up(self, policy: Policy) -> None:
        """Compile what a step may launch, on blocks that nobody uses yet."""
        started = time.monotonic()
        longest = min(self._longest, self.layers.num_blocks * self.block_size)
        theta = torch.zeros((1, 1, 1), dtype=torch.float32, device=self.layers.device)

        def use(x: RaggedInput, scores: Tensor, chosen: RaggedBatch) -> None:
            if self._counts:
                threshold_ragged(scores, chosen, theta)
            _keep_selected(x, scores, chosen)

        for length in [*(tile for tile in TILES if tile < longest), longest]:
            table = list(range(-(-length // self.block_size)))
            keep = min(max(self.sinks + self.window, length // 2), length)
            for newest_last in (True, False):
                numbers = [np.array([x], np.int32) for x in (0, 0, length)]
                batch = self._batch(numbers, [table], [length], [keep], [min(self.sinks, length)])
                self._score(*batch, [length], [length], [0], newest_last, use)
        pair = torch.tensor([[0], [min(1, self.layers.num_blocks - 1)]], dtype=torch.int32, device=self.layers.device)
        copy_blocks(self.layers, self.positions, pair)
        logger.info("compiled the kernels of policy %s in %.1f s", policy.name, time.monotonic() - started)

    def _batch(
        self,
        others: Sequence[IntArray],
        tables: Tables | Sequence[Sequence[int]],
        lengths: Sequence[int] | IntArray,
        keep: Sequence[int] | IntArray,
        protect: Sequence[int] | IntArray,
    ) -> tuple[RaggedBatch, list[Tensor]]:
        return RaggedBatch.with_others(
            others, tables, lengths, keep, protect=protect, window=self.window, device=self.layers.device
        )

    def _compact(self, plan: StepPlan, before: Before) -> list[IntArray] | None:
        if plan.moved.size:
            # Each request gets a copy of what it shares with others, or with the prefix cache, before anything moves.
            pairs = np.stack([plan.src_blocks[plan.moved[0]], plan.moved[1]])
            copy_blocks(self.layers, self.positions, to_device([pairs], self.layers.device)[0])
        blocks, ends = plan.stitched_blocks(), plan.src_ends()
        kept = []
        for group, usual in self._kinds(plan, before):
            part = blocks[ends[group.start - 1] if group.start else 0 : ends[group.stop - 1]]
            (self._compact_usual if usual else self._compact_group)(plan, before, group, part)
            if self.records is not None:
                tables = np.split(part, ends[group][:-1] - ends[group.start] + plan.num_src()[group.start])
                kept += [self._kept(*item) for item in zip(tables, plan.keep[group].tolist(), strict=True)]
        return kept if self.records is not None else None

    def _kinds(self, plan: StepPlan, before: Before) -> Iterator[tuple[slice, bool]]:
        """Yield parts of a step, and whether their evictions are usual ones."""
        lengths = plan.physical_len
        usual = np.zeros(len(plan), bool)
        if self._static is not None:
            usual = (lengths <= self._usual) & self._newest_last(before, lengths, slice(None))
        # Those of prompts come last in a plan, so that there are hardly more parts than kinds.
        edges = [0, *(np.flatnonzero(np.diff(usual)) + 1).tolist(), len(plan)]
        for start, stop in itertools.pairwise(edges):
            if self._static is not None and usual[start]:
                for at in range(start, stop, self._static.most):
                    yield slice(at, min(at + self._static.most, stop)), True
            else:
                for part in self._groups(lengths[start:stop]):
                    yield slice(start + part.start, start + part.stop), False

    def _newest_last(self, before: Before, lengths: IntArray, group: slice) -> npt.NDArray[np.bool_]:
        """Return of which requests the newest slots stand last and in order; older ones may be in any order."""
        result: npt.NDArray[np.bool_] = (before.epoch[group] == 0) | (lengths - before.kept[group] >= self.window)
        return result

    def _compact_usual(self, plan: StepPlan, before: Before, group: slice, blocks: IntArray) -> None:
        assert self._static is not None
        self._static.run(
            Numbers(
                Tables(blocks, plan.num_src()[group]),
                plan.physical_len[group],
                plan.keep[group],
                plan.protect[group],
                before.kept[group],
                before.evicted[group],
                plan.logical_len[group],
            )
        )

    def _groups(self, lengths: IntArray) -> Iterator[slice]:
        """Yield parts of a step whose scratch memory is bounded, unless a request is too large by itself."""
        room = self._scratch() // (_BYTES_PER_SLOT * self.layers.num_layers * self.layers.num_kv_heads)
        ends = np.cumsum(lengths, dtype=np.int64)
        start = taken = 0
        while start < len(lengths):
            stop = max(int(np.searchsorted(ends, taken + room, side="right")), start + 1)
            yield slice(start, stop)
            start, taken = stop, int(ends[stop - 1])

    def _scratch(self) -> int:
        """Return how much memory evictions may take that are not usual ones."""
        return SCRATCH_BYTES if self._static is None else SCRATCH_BYTES - STATIC_BYTES

    def _compact_group(self, plan: StepPlan, before: Before, group: slice, blocks: IntArray) -> None:
        """Compact some of a step's requests."""
        self._score_group(plan, before, group, blocks, _keep_selected)

    def _count(self, slots: StepPlan, before: Before, threshold: float) -> Tensor:
        ends, rows = slots.src_ends(), self.layers.num_layers * self.layers.num_kv_heads
        theta = torch.full((1, 1, 1), threshold, dtype=torch.float32, device=self.layers.device)

        def reached(_: RaggedInput, scores: Tensor, chosen: RaggedBatch) -> Tensor:
            return threshold_ragged(scores, chosen, theta)[1].sum(dim=(1, 2))

        counted = []
        for group in self._groups(slots.physical_len):
            blocks = slots.src_blocks[ends[group.start - 1] if group.start else 0 : ends[group.stop - 1]]
            counted.append(torch.stack(self._score_group(slots, before, group, blocks, reached)).sum(dim=0))
        return ((torch.cat(counted) + (rows - 1)) // rows).to(torch.int32)

    def _score_group(self, plan: StepPlan, before: Before, group: slice, blocks: IntArray, use: _Use[T]) -> list[T]:
        """Score some of a step's requests, in ``blocks``: one request after the other; see ``_score``."""
        lengths, first = plan.physical_len[group], before.kept[group]
        logical = plan.logical_len[group]
        batch = self._batch(
            [first, before.evicted[group], logical],
            Tables(blocks, plan.num_src()[group]),
            lengths,
            plan.keep[group],
            plan.protect[group],
        )
        newest_last = bool(self._newest_last(before, lengths, group).all())
        return self._score(*batch, lengths.tolist(), logical.tolist(), before.keys[group], newest_last, use)

    def _layers_at_once(self, total: int) -> int:
        """Return how many layers' scratch memory fits; an even number, or all."""
        fit = self._scratch() // max(_BYTES_PER_SLOT * self.layers.num_kv_heads * total, 1)
        return self.layers.num_layers if fit >= self.layers.num_layers else max(2, fit // 2 * 2)

    def _ragged(
        self,
        batch: RaggedBatch,
        lengths: Sequence[int],
        logical: Sequence[int],
        logical_there: Tensor,
        keys: Sequence[int],
        newest_last: bool,
    ) -> RaggedInput:
        return RaggedInput(
            layers=self.layers,
            batch=batch,
            positions=self.positions,
            layer_ids=self.layer_ids,
            head_ids=self.head_ids,
            request_keys=keys,
            lengths=lengths,
            logical_lens=logical,
            logical_lengths=logical_there,
            newest_last=newest_last,
            sinks=self.sinks,
            seed=self.seed,
            rotations=self.rotations.layers,
        )

    def _score(
        self,
        batch: RaggedBatch,
        numbers: Sequence[Tensor],
        lengths: Sequence[int],
        logical: Sequence[int],
        keys: Sequence[int],
        newest_last: bool,
        use: _Use[T],
    ) -> list[T]:
        """Score all layers, as many at a time as have room for what they need beside the cache.

        Args:
            batch: the requests.
            numbers: on the device, int32 ``[R]``: slots of each that are stamped already, tokens that it has lost, and
                tokens of it.
            lengths: slots of each; ``[R]``, as are the next.
            logical: tokens of each.
            keys: hashes of the requests.
            newest_last: see ``RaggedInput``.
            use: gets the layers and requests, their scores float32 ``[L, H, total]``, which are its own, and the
                batch to select from them with.
        """
        first_there, shift_there, logical_there = numbers
        x = self._ragged(batch, lengths, logical, logical_there, keys, newest_last)
        num_layers, step = self.layers.num_layers, self._layers_at_once(batch.total)
        found = []
        for start in range(0, num_layers, step):
            part = x if step == num_layers else self._part(x, start, min(start + step, num_layers))
            stamp_positions(part.layers, batch, part.positions, first_there, shift_there)
            found.append(self._score_part(part, use))
        return found

    def _score_part(self, x: RaggedInput, use: _Use[T]) -> T:
        scores, chosen = checked_score_ragged(self.policy, x), x.batch
        if not x.newest_last:
            # The window is not in its place, as the sinks are, since nothing moves those.
            force_newest(x.layers, x.batch, scores, x.logical_lengths, x.positions)
            chosen = dataclasses.replace(x.batch, window=0)
        return use(x, scores, chosen)

    @staticmethod
    def _part(x: RaggedInput, start: int, stop: int) -> RaggedInput:
        layers, part = x.layers.part(start, stop), slice(start, stop)
        return dataclasses.replace(
            x,
            layers=layers,
            positions=x.positions[part],
            layer_ids=x.layer_ids[part],
            rotations=x.rotations[part],
        )

    def _kept(self, blocks: IntArray, keep: int) -> IntArray:
        """Return the logical positions int32 ``[L, H, keep]`` of what a request holds now, ascending; waits."""
        slots = torch.arange(keep, device=self.layers.device)
        table = torch.from_numpy(blocks).to(self.layers.device, torch.int64)
        size = self.layers.block_size
        where = self.positions[:, table[slots // size], :, slots % size].permute(1, 2, 0)
        return where.sort(dim=-1).values.cpu().numpy()
