"""Block tables on the host, before they go to the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


def int32(name: str, x: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return integers as an int32 array.

    Raises:
        TypeError: they are no integers.
        ValueError: one of them has more than 32 bits.
    """
    found = np.asarray(x)
    if found.dtype == np.int32:
        return found
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {found.dtype} ({found.flat[0]!s}, ...): convert them")
    bounds = np.iinfo(np.int32)
    if found.size and not bounds.min <= found.min() <= found.max() <= bounds.max:
        raise ValueError(f"{name} holds {found.min()} to {found.max()}, must lie within {bounds.min} and {bounds.max}")
    return found.astype(np.int32)


class Tables(NamedTuple):
    """Block tables of R requests, one after the other.

    Attributes:
        blocks: int32 ``[B]``.
        counts: int32 ``[R]``, blocks of each request, B together.
    """

    blocks: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> Tables:
        """Put tables one after the other."""
        counts = np.fromiter(map(len, tables), np.int32, len(tables))
        return cls(int32("block ids", list(itertools.chain.from_iterable(tables))), counts)

    def padded(self, name: str) -> npt.NDArray[np.int32]:
        """Return ``[R, longest]``, padded with -1, which no kernel may read.

        Raises:
            ValueError: a block id of these tables, which are called ``name``, is negative, or there are not B.
        """
        if int(self.counts.sum()) != len(self.blocks):
            raise ValueError(f"{name} has {len(self.blocks)} blocks, but counts add up to {self.counts.sum()}")
        inside = np.arange(self.counts.max(initial=0)) < self.counts[:, None]
        if self.blocks.min(initial=0) < 0:
            request = int(np.repeat(np.arange(len(self.counts)), self.counts)[self.blocks.argmin()])
            raise ValueError(
                f"{name} of request {request} holds block {self.blocks.min()}: block ids must not be negative"
            )
        out = np.full(inside.shape, -1, np.int32)
        out[inside] = self.blocks
        return out

    def min_block_size(self, slots: npt.NDArray[np.int32]) -> int:
        """Return the least slots of a block with which each table has room for so many slots, ``[R]``."""
        sizes = np.where(slots > 0, -(-slots.astype(np.int64) // np.maximum(self.counts, 1)), 1)
        return int(np.where((self.counts == 0) & (slots > 0), np.iinfo(np.int32).max, sizes).max(initial=1))
