"""Counts from the device to the host without ever waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import torch

from nitro.types import IntArray

Tag = TypeVar("Tag")


class _Copy(NamedTuple, Generic[Tag]):
    slot: int
    size: int
    tag: Tag


class AsyncCounts(Generic[Tag]):
    """A few host buffers, to which counts are copied behind the work that makes them, and which are polled.

    On a GPU the copy is queued on the current stream, into pinned memory, and an event behind it says when it is done.
    Not to be called while a CUDA graph is captured: submit after the replay that wrote the counts. The next replay may
    write them again, since it comes later on the same stream. On the CPU a copy is done at once.

    Args:
        capacity: counts in one batch at most (requests of a step).
        device: where the counts are.
        depth: batches that can be under way; a device that runs one step behind needs two.

    Raises:
        ValueError: capacity or depth is below 1.
    """

    def __init__(self, capacity: int, device: torch.device, depth: int = 4) -> None:
        if capacity < 1 or depth < 1:
            raise ValueError(f"capacity={capacity} and depth={depth} must both be at least 1: pass max_num_seqs and 4")
        self._device = torch.empty(0, device=device).device  # with its index
        self._on_gpu = device.type == "cuda"
        self._buffers = torch.empty((depth, capacity), dtype=torch.int32, pin_memory=self._on_gpu)
        self._events = [torch.Event(self._device) for _ in range(depth)] if self._on_gpu else []
        self._free = list(range(depth))
        self._under_way: deque[_Copy[Tag]] = deque()

    def submit(self, counts: torch.Tensor, tag: Tag) -> bool:
        """Queue a copy of counts.

        Args:
            counts: int32 ``[R]``, ``R <= capacity``, on the device, made on the current stream.
            tag: what :meth:`finished` returns with them: whose they are.

        Returns:
            Whether it was queued. If not, all buffers are under way: the host is ``depth`` batches ahead of the device.
            The counts of a later step will do as well.

        Raises:
            ValueError: another shape, dtype or device.
        """
        capacity = self._buffers.shape[1]
        if counts.ndim != 1 or counts.shape[0] > capacity or counts.dtype != torch.int32:
            raise ValueError(
                f"counts are {counts.dtype} of shape {list(counts.shape)}: pass int32 [R], R <= capacity={capacity}"
            )
        if counts.device != self._device:
            raise ValueError(
                f"counts are on {counts.device}, the buffers are for {self._device}: pass those of one worker"
            )
        if not self._free:
            return False
        slot, size = self._free.pop(), counts.shape[0]
        self._buffers[slot, :size].copy_(counts, non_blocking=True)
        if self._on_gpu:
            self._events[slot].record()
        self._under_way.append(_Copy(slot, size, tag))
        return True

    def finished(self) -> list[tuple[Tag, IntArray]]:
        """Return the batches that have arrived since the last call, oldest first, each int32 ``[R]`` of its own.

        A batch that has not arrived keeps later ones back, so that they come in order.
        """
        arrived = []
        while self._under_way and self._is_done(self._under_way[0].slot):
            slot, size, tag = self._under_way.popleft()
            counts: IntArray = self._buffers[slot, :size].numpy().copy()  # the buffer is used again
            arrived.append((tag, counts))
            self._free.append(slot)
        return arrived

    def _is_done(self, slot: int) -> bool:
        return not self._on_gpu or self._events[slot].query()
