"""The ledger of the KV-cache blocks of requests that have had evictions: the Python face of the C++ core.

The core books blocks under integer handles; this file gives them the names that vLLM's requests have, and keeps what
the scheduler asks for every request in every step (``evicted``) in a dict, so that the answer costs no call into C++.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nitro import _native
from nitro.errors import IntegrityError
from nitro.types import Counters, IntArray


def dead_blocks(blocks: IntArray, live: npt.NDArray[np.int64], block_size: int) -> IntArray:
    """Return the blocks in which no slot is live, in time linear in both arrays; runs without the GIL.

    Args:
        blocks: int32 ``[B]``, those that are asked about; one may occur several times.
        live: int64 ``[N]``, the slots in use, ``block * block_size + offset``; one may occur several times.
        block_size: slots of a block.

    Returns:
        int32 ``[m]``: each such block once, in the order of their first occurrence.

    Raises:
        ValueError: a block or the block size is out of range, or an array has not one dimension.
        IntegrityError: a slot is live in none of the blocks.
    """
    return _native.dead_blocks(blocks, live, block_size)


class TableEnds(NamedTuple):
    """What is compared of R requests' block tables, ``[R]`` each.

    Attributes:
        size: how many blocks.
        first: the first block.
        last: the last block.
    """

    size: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


class Committed(NamedTuple):
    """What :meth:`Collector.commit_all` did. Lists of blocks hold one request after the other.

    Attributes:
        epochs: ``[R]``, evictions that each request had had before since it was last (re)started.
        src: int32 ``[B]``, the first ``ceil(physical / block_size)`` blocks of each table before.
        moved: int32 ``[2, M]``: where in ``src`` a destination is not the block itself, and what it is there.
        freed: int32 ``[F]``, the blocks that are given up, in the order in which to give them back to the pool (the
            last block of each table first).
    """

    epochs: list[int]
    src: IntArray
    moved: IntArray
    freed: IntArray


class PoolView(NamedTuple):
    """The block pool as :meth:`Collector.check_integrity` compares it with the ledger; the null block is in neither.

    Attributes:
        free: int32 ``[F]``, the blocks in the free list, in any order.
        live: int32 ``[L]``, the blocks that some request refers to, in any order.
    """

    free: IntArray
    live: IntArray


class Collector:
    """Who owns which block, and how much was evicted, for each request that has had an eviction.

    A request enters with its first eviction (:meth:`commit_all`) and leaves with :meth:`release`. In between it owns
    its whole block table, privately: the caller reports each new block (:meth:`adopt_all`) and publishes none to the
    prefix cache. All calls are linear in the arrays they get, and either succeed or leave the ledger as it was. Not
    thread-safe.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens in a block.
        null_block: the id of the pool's placeholder block, which nobody owns.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, num_blocks: int, block_size: int, null_block: int = 0) -> None:
        self._core = _native.Collector(num_blocks, block_size, null_block)
        self._block_size = block_size
        self._handles: dict[str, int] = {}
        self._spare: list[int] = []  # handles of released requests, to be used again so that they stay small
        self._evicted: dict[str, int] = {}
        self.releases = 0  # requests that have left the ledger

    def plan(
        self, request_id: str, blocks: IntArray, reusable: npt.NDArray[np.uint8], physical: int, keep: int
    ) -> IntArray:
        """Choose where the survivors of an eviction go. Changes nothing.

        Args:
            request_id: the request, in the ledger or not.
            blocks: int32 ``[n]``, its block table.
            reusable: uint8 ``[>= ceil(keep / block_size)]``, 1 where nobody else reads the block or may find it in
                the prefix cache.
            physical: slots in use before the eviction; ``ceil(physical / block_size) <= n``.
            keep: slots in use after it; ``0 < keep < physical``.

        Returns:
            int32 ``[ceil(keep / block_size)]``: the request's own block where it is reusable, else -1, for which the
            caller must put a fresh block.

        Raises:
            ValueError: lengths that no eviction has, or arrays that don't fit each other.
            IntegrityError: the table contradicts the ledger.
        """
        handle = self._handles.get(request_id, self._next_handle(0))
        try:
            return self._core.plan(handle, blocks, reusable, physical, keep)
        except IntegrityError as error:
            raise self._named(error, {request_id: handle}) from None

    def commit_all(
        self,
        request_ids: Sequence[str],
        physical: Sequence[int],
        keep: Sequence[int],
        tables: TableEnds,
        moves: Mapping[int, tuple[IntArray, IntArray]],
    ) -> Committed:
        """Record the evictions of one step: all of them or, if one is wrong, none.

        Args:
            request_ids: R requests, each once.
            physical: ``[R]``, slots in use before; as in :meth:`plan`.
            keep: ``[R]``, slots in use after; as in :meth:`plan`.
            tables: the requests' block tables, in short. Of a request whose eviction is in place this alone is compared
                with the ledger.
            moves: by index of the request, where its eviction is not in place, as a request's first one is not: its
                block table int32 ``[n]``, and its destinations int32 ``[ceil(keep / block_size)]``, which is what
                :meth:`plan` returned, each -1 replaced by a fresh block. The survivors of all others stay in the first
                blocks of what they own.

        Raises:
            ValueError: lengths that no eviction has, or arrays that don't fit each other.
            IntegrityError: a table contradicts the ledger, a request occurs twice or is new and not in ``moves``, or a
                destination is the null block, out of range, named twice, a wrong block of the same table, another
                request's, or in the table of another eviction of this step.
        """
        handles = self._handles
        found = [handles.get(request_id, -1) for request_id in request_ids]
        newcomers: dict[str, int] = {}
        for index, handle in enumerate(found):
            if handle < 0:
                found[index] = newcomers.setdefault(request_ids[index], self._next_handle(len(newcomers)))
        try:
            done = Committed(*self._core.commit_all(found, physical, keep, *tables, moves))
        except IntegrityError as error:
            raise self._named(error, newcomers) from None
        if newcomers:
            handles.update(newcomers)
            del self._spare[max(len(self._spare) - len(newcomers), 0) :]
        evicted = self._evicted
        for request_id, before, after in zip(request_ids, physical, keep, strict=True):
            evicted[request_id] = evicted.get(request_id, 0) + before - after
        return done

    def adopt_all(self, request_ids: Sequence[str], counts: Sequence[int], blocks: Sequence[int]) -> None:
        """Book the blocks that the pool has given out in one step: all of them or, if one is wrong, none.

        Args:
            request_ids: R requests, in any order; what those without evictions were given is not looked at.
            counts: ``[R]``, how many blocks each was given.
            blocks: ``[sum(counts)]``, those of one request after the other, in the order in which they were appended to
                its table.

        Raises:
            ValueError: the arguments do not fit each other.
            IntegrityError: a block is the null block, out of range, named twice, or owned already.
        """
        handles = self._handles
        try:
            self._core.adopt_all([handles.get(request_id, -1) for request_id in request_ids], counts, blocks)
        except IntegrityError as error:
            raise self._named(error) from None

    def release(self, request_id: str) -> int:
        """Forget a request that has finished or was preempted; returns its evicted tokens, 0 if it had none."""
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return 0
        self.releases += 1
        self._spare.append(handle)
        del self._evicted[request_id]
        return self._core.release(handle)

    def evicted(self, request_id: str) -> int:
        """Tokens evicted from a request since it was last (re)started; 0 if it is not in the ledger."""
        return self._evicted.get(request_id, 0)

    def epoch(self, request_id: str) -> int:
        """Evictions that a request has had since it was last (re)started; 0 if it is not in the ledger."""
        handle = self._handles.get(request_id)
        return 0 if handle is None else self._core.epoch(handle)

    def owned(self, request_id: str) -> IntArray:
        """The blocks that a request owns, int32 ``[n]`` in block-table order; empty if it is not in the ledger."""
        handle = self._handles.get(request_id)
        return np.empty(0, np.int32) if handle is None else self._core.owned(handle)

    @property
    def counters(self) -> Counters:
        """Totals since construction, released requests included."""
        evictions, tokens_evicted, blocks_freed = self._core.counters()
        return Counters(evictions=evictions, tokens_evicted=tokens_evicted, blocks_freed=blocks_freed)

    def __len__(self) -> int:
        return len(self._handles)

    def dead_blocks(self, request_ids: Iterable[str], live: npt.NDArray[np.int64]) -> IntArray:
        """Find what requests own without using it. Linear in their blocks and slots; runs without the GIL.

        Args:
            request_ids: the requests; those without an eviction own nothing.
            live: int64 ``[N]``, every slot in use of theirs, ``block * block_size + offset``, in any order and as often
                as there are layers and heads that keep it.

        Returns:
            int32 ``[m]``: the blocks without a live slot, each once, in the order of the requests and their tables.

        Raises:
            IntegrityError: a slot is live in a block that none of the requests owns.
        """
        owned = [self.owned(request_id) for request_id in request_ids]
        return dead_blocks(np.concatenate(owned) if owned else np.empty(0, np.int32), live, self._block_size)

    def check_integrity(self, pool: PoolView | None = None) -> None:
        """Prove that the ledger agrees with itself and, if given, with the pool, in time linear in the pool.

        Args:
            pool: which blocks are free, and which are live. The ledger does not mirror the pool, which also serves
                requests without evictions, so that the caller looks there.

        Raises:
            IntegrityError: a block has two owners, the null block has one, an owner and a table disagree, an epoch has
                fallen since the last proof, or the counters are not the sum of the requests' histories. With a pool:
                free + live + null is not the whole, a block is in the free list twice, or is free and has an owner.
        """
        try:
            if pool is None:
                self._core.check_integrity()
            else:
                self._core.check_pool(*pool)
        except IntegrityError as error:
            raise self._named(error) from None
        booked = {request_id: self._core.evicted(handle) for request_id, handle in self._handles.items()}
        if booked != self._evicted or len(self._core) != len(self._handles):
            raise IntegrityError(
                f"the core books {booked} evicted tokens for {len(self._core)} requests, the mirror {self._evicted}: "
                "report this as a bug in nitro.collector"
            )

    def _next_handle(self, later: int) -> int:
        """The handle of the next newcomer, or of a later one: those in use and spare ones are together 0, 1, 2, ..."""
        return self._spare[-1 - later] if later < len(self._spare) else len(self._handles) + later

    def _named(self, error: IntegrityError, newcomers: Mapping[str, int] | None = None) -> IntegrityError:
        """Return an error of the core with request ids in place of handles."""
        names = {handle: request_id for request_id, handle in (self._handles | dict(newcomers or {})).items()}
        return IntegrityError(re.sub(r"#(\d+)", lambda match: repr(names.get(int(match[1]), match[0])), str(error)))
