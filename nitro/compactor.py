"""What every compactor has in common: the evictions it was given, checked, and what they left behind.

Which tokens stay is decided by the two kinds below, per layer and KV head: ``nitro.dense_compactor`` in PyTorch on any
layout of the cache, ``nitro.kernel_compactor`` in Triton on vLLM's GPU cache.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nitro.errors import IntegrityError
from nitro.policies.base import Policy
from nitro.policies.rotary import Rotations
from nitro.types import Counters, IntArray, KeepRecord, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Held(NamedTuple):
    """What a worker remembers of a request that has lost tokens.

    Attributes:
        epoch: evictions since it was last (re)started.
        evicted: tokens it has lost.
        logical_len: its tokens, evicted ones included, at the last eviction.
    """

    epoch: int = 0
    evicted: int = 0
    logical_len: int = 0


_NOTHING = Held()
NO_ROTATIONS = Rotations()


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What a worker remembers of the R requests of a step, in columns.

    Attributes:
        epoch: int32 ``[R]``; see ``Held``.
        evicted: int32 ``[R]``.
        logical_len: int32 ``[R]``.
        keys: ``[R]``, unsigned 64-bit hash of each user-visible request id; seeds the random policy.
    """

    epoch: IntArray
    evicted: IntArray
    logical_len: IntArray
    keys: list[int]

    @property
    def kept(self) -> IntArray:
        """Slots held right after the last eviction, int32 ``[R]``; 0 without one."""
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
        run_starts: while that is recorded, by request, how many tokens were known when each of its runs started.
    """

    policy: Policy

    def __init__(
        self,
        block_size: int,
        *,
        sinks: int,
        window: int,
        seed: int,
        rotations: Rotations = NO_ROTATIONS,
        stable_id: Callable[[str], str] = str,
    ) -> None:
        """Begin with no request.

        Args:
            block_size: slots of a block.
            sinks: as above, like ``window`` and ``seed``.
            window: as above.
            seed: as above.
            rotations: how RoPE rotated the keys of this worker's layers.
            stable_id: returns a request's id as its user knows it.
        """
        self.block_size, self.sinks, self.window, self.seed = block_size, sinks, window, seed
        self.rotations = rotations
        self.counters = Counters()
        self.records: list[KeepRecord] | None = None
        self.run_starts: dict[str, list[int]] = {}
        self._requests: dict[str, Held] = {}
        self._keys: dict[str, int] = {}
        self._stable_id = stable_id
        self._warned = False

    @abstractmethod
    def set_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, after a trial on this worker's shape and dtype.

        Raises:
            SettingsError: the policy breaks its contract; better now than in the first long request.
        """

    def _say_what_cannot_be_undone(self) -> None:
        """Warn, once, where the policy's scores are not what they are meant to be."""
        if self.policy.undoes_rope and self.rotations.problem is not None and not self._warned:
            self._warned = True
            logger.warning(
                "policy %s scores keys as they are in the cache, after RoPE, and keeps other tokens than it would with "
                "RoPE undone: %s",
                self.policy.name,
                self.rotations.problem,
            )

    @abstractmethod
    def _compact(self, plan: StepPlan, before: Before) -> list[IntArray] | None:
        """Move the survivors; return the logical positions of those, as in KeepRecord, if they are recorded."""

    def apply(self, plan: StepPlan) -> None:
        """Compact these requests: score their slots, keep as many as the plan says, write them to the destinations.

        Raises:
            IntegrityError: a plan does not continue what this worker knows of its request; nothing was changed then.
        """
        before = self._before(plan)
        kept = self._compact(plan, before)
        evicted = plan.logical_len - plan.keep
        after = zip((plan.epoch + 1).tolist(), evicted.tolist(), plan.logical_len.tolist(), strict=True)
        self._requests.update(zip(plan.request_ids, map(Held._make, after), strict=True))
        if self.records is not None and kept is not None:
            for request_id, logical, where in zip(plan.request_ids, plan.logical_len.tolist(), kept, strict=True):
                run = max(len(self.run_starts.get(request_id, ())) - 1, 0)
                self.records.append(KeepRecord(request_id, run, logical, np.ascontiguousarray(where, np.int32)))
        total = self.counters
        self.counters = Counters(
            evictions=total.evictions + len(plan),
            tokens_evicted=total.tokens_evicted + int((plan.physical_len - plan.keep).sum()),
            blocks_freed=total.blocks_freed + int((plan.num_src() - plan.num_dst()).sum()),
        )

    @abstractmethod
    def _count(self, slots: StepPlan, before: Before, threshold: float) -> Tensor:
        """See ``count``."""

    def count(self, slots: StepPlan, threshold: float) -> Tensor:
        """Return how many tokens of each request reach a threshold, sinks and window included; nothing moves.

        A request has one count for all layers and KV heads: their mean, rounded up.

        Args:
            slots: R requests and what they hold; where it says that they keep something, that is not looked at.
            threshold: of the policy's scores; NaN scores never reach it.

        Returns:
            int32 ``[R]`` on the caches' device, which may not have computed it yet.

        Raises:
            IntegrityError: the requests do not hold what this worker knows of them.
        """
        return self._count(slots, self._before(slots), threshold)

    def begin_run(self, request_id: str, tokens: int) -> None:
        """Note that a request, of which so many tokens are known, starts or is recomputed, if that is recorded."""
        if self.records is not None:
            self.run_starts.setdefault(request_id, []).append(tokens)

    def evicted(self, request_id: str) -> int:
        """Return how many tokens a request has lost."""
        return self._requests.get(request_id, _NOTHING).evicted

    def evicted_of(self, request_ids: Sequence[str]) -> IntArray:
        """Return how many tokens each of these requests has lost, int32 ``[R]``."""
        held = self._requests
        return np.fromiter([held.get(name, _NOTHING)[1] for name in request_ids], np.int32, len(request_ids))

    def __len__(self) -> int:
        """Return how many requests have lost tokens."""
        return len(self._requests)

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; unknown ones are ignored."""
        self._requests.pop(request_id, None)
        self._keys.pop(request_id, None)  # which one that was only counted has, too

    def held(self, request_id: str) -> Held:
        """Return what is known of a request."""
        return self._requests.get(request_id, _NOTHING)

    def _before(self, plan: StepPlan) -> Before:
        """Return what is known of a plan's requests, once it is sure that the plan continues it."""
        held = [self._requests.get(name, _NOTHING) for name in plan.request_ids]
        known = np.fromiter(chain.from_iterable(held), np.int32, 3 * len(held)).reshape(-1, 3).T
        lost = plan.logical_len - plan.physical_len
        wrong = (known[0] != plan.epoch) | (known[1] != lost)
        if wrong.any():
            at = int(wrong.argmax())
            raise IntegrityError(
                f"plan for request {plan.request_ids[at]!r} does not continue its state: (epoch, evicted) is "
                f"{tuple(held[at][:2])}, the plan says {(int(plan.epoch[at]), int(lost[at]))}. This is a bug in Nitro: "
                "please report it"
            )
        blocks = int(plan.num_src().sum())
        if plan.block_size != self.block_size or len(plan.src_blocks) != blocks:
            raise IntegrityError(
                f"plan has {len(plan.src_blocks)} blocks of {plan.block_size} slots, but needs {blocks} of "
                f"{self.block_size}. This is a bug in Nitro: please report it"
            )
        keys = self._keys
        for name in plan.request_ids:
            if name not in keys:
                keys[name] = request_key(self._stable_id(name))
        return Before(known[0], known[1], known[2], [keys[name] for name in plan.request_ids])
