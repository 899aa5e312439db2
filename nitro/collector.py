"""The ledger of the KV-cache blocks of requests that have had evictions: the Python face of the C++ core.

The core books blocks under integer handles; this file gives them the names that vLLM's requests have, and keeps what
the scheduler asks for every request in every step (``evicted``) in a dict, so that the answer costs no call into C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nitro import _native
from nitro.errors import IntegrityError
from nitro.types import Counters, IntArray

T = TypeVar("T")


class Collector:
    """Who owns which block, and how much was evicted, for each request that has had an eviction.

    A request enters with its first :meth:`commit` and leaves with :meth:`release`. In between it owns its whole block
    table, privately: the caller reports each new block (:meth:`adopt`) and publishes none to the prefix cache. All
    calls are linear in the arrays they get, and either succeed or leave the ledger as it was. Not thread-safe.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens in a block.
        null_block: the id of the pool's placeholder block, which nobody owns.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, num_blocks: int, block_size: int, null_block: int = 0) -> None:
        self._core = _native.Collector(num_blocks, block_size, null_block)
        self._handles: dict[str, int] = {}
        self._spare: list[int] = []  # handles of released requests, to be used again so that they stay small
        self._evicted: dict[str, int] = {}

    def plan(
        self, request_id: str, blocks: IntArray, reusable: npt.NDArray[np.uint8], physical: int, keep: int
    ) -> IntArray:
        """Choose where the survivors of an eviction go. Changes nothing.

        Args:
            request_id: the request, in the ledger or not.
            blocks: int32 ``[n]``, its block table.
            reusable: uint8 ``[n]``, 1 where nobody else reads the block or may find it in the prefix cache.
            physical: slots in use before the eviction; ``ceil(physical / block_size) <= n``.
            keep: slots in use after it; ``0 < keep < physical``.

        Returns:
            int32 ``[ceil(keep / block_size)]``: the request's own block where it is reusable, else -1, for which the
            caller must put a fresh block.

        Raises:
            ValueError: lengths that no eviction has, or arrays that don't fit each other.
            IntegrityError: the table contradicts the ledger.
        """
        handle = self._handle_for(request_id)
        return self._named(request_id, handle, lambda: self._core.plan(handle, blocks, reusable, physical, keep))

    def commit(self, request_id: str, blocks: IntArray, dst: IntArray, physical: int, keep: int) -> IntArray:
        """Record an eviction; afterwards the request owns exactly ``dst``.

        Args:
            request_id: the request; its first eviction puts it into the ledger.
            blocks: int32 ``[n]``, its block table before the eviction.
            dst: int32 ``[ceil(keep / block_size)]``, what :meth:`plan` returned, each -1 replaced by a fresh block.
            physical: as in :meth:`plan`.
            keep: as in :meth:`plan`.

        Returns:
            int32 ``[m]``: the blocks of the table that are not in ``dst``, to be given back to the pool in this order
            (the table's last block first).

        Raises:
            ValueError: lengths that no eviction has, or arrays that don't fit each other.
            IntegrityError: the table contradicts the ledger, or a block of ``dst`` is the null block, out of range,
                named twice, a wrong block of the same table, or another request's.
        """
        handle = self._handle_for(request_id)
        freed = self._named(request_id, handle, lambda: self._core.commit(handle, blocks, dst, physical, keep))
        if request_id not in self._handles:
            self._handles[request_id] = handle
            if self._spare:
                self._spare.pop()
        self._evicted[request_id] = self._evicted.get(request_id, 0) + physical - keep
        return freed

    def adopt(self, request_id: str, blocks: Sequence[int] | IntArray) -> None:
        """Book blocks that the pool has appended to a request's table; does nothing for requests without evictions.

        Raises:
            IntegrityError: a block is the null block, out of range, named twice, or owned already.
        """
        handle = self._handles.get(request_id)
        if handle is None or len(blocks) == 0:
            return
        new = np.asarray(blocks, dtype=np.int32)
        self._named(request_id, handle, lambda: self._core.adopt(handle, new))

    def release(self, request_id: str) -> int:
        """Forget a request that has finished or was preempted; returns its evicted tokens, 0 if it had none."""
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return 0
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

    def check_integrity(self) -> None:
        """Prove that the ledger agrees with itself, in time linear in the pool.

        Raises:
            IntegrityError: a block has two owners, the null block has one, an owner and a table disagree, or the
                counters are not the sum of the requests' histories.
        """
        self._core.check_integrity()
        booked = {request_id: self._core.evicted(handle) for request_id, handle in self._handles.items()}
        if booked != self._evicted or len(self._core) != len(self._handles):
            raise IntegrityError(
                f"the core books {booked} evicted tokens for {len(self._core)} requests, the mirror {self._evicted}: "
                "report this as a bug in nitro.collector"
            )

    def _handle_for(self, request_id: str) -> int:
        """The request's handle, or the one it will get: handles in use and spare ones are together 0, 1, 2, ..."""
        handle = self._handles.get(request_id)
        if handle is not None:
            return handle
        return self._spare[-1] if self._spare else len(self._handles)

    def _named(self, request_id: str, handle: int, call: Callable[[], T]) -> T:
        """Run a call of the core; put request ids for handles into the message of an IntegrityError."""
        try:
            return call()
        except IntegrityError as error:
            names = {number: name for name, number in self._handles.items()} | {handle: request_id}
            message = re.sub(r"#(\d+)", lambda match: repr(names.get(int(match[1]), match[0])), str(error))
            raise IntegrityError(message) from None
