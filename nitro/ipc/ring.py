"""The two ends of a ring. Each is used by one thread at a time, and only by the process that made it."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from nitro import _native
from nitro.errors import BridgeError
from nitro.ipc.layout import MESSAGE, Messages


class _NativeEnd(Protocol):
    def broken(self) -> bool: ...


_Core = TypeVar("_Core", bound=_NativeEnd)

_NO_MESSAGES: Messages = np.empty(0, MESSAGE)
_ALL = 2**63 - 1


class ConsumerCounters(NamedTuple):
    """Totals of a :class:`Consumer`.

    Attributes:
        received: messages handed out.
        corrupt: records that were skipped, since their sequence number or checksum is wrong.
    """

    received: int
    corrupt: int


class ProducerCounters(NamedTuple):
    """Totals of a :class:`Producer`.

    Attributes:
        published: messages written into the ring.
        replaced: messages that waited for room until a newer one of the same request took their place.
        withdrawn: messages that waited for room until their request was withdrawn.
    """

    published: int
    replaced: int
    withdrawn: int


class _End(Generic[_Core]):
    """An end that closes once: when asked to, with the last reference, or with the interpreter."""

    def __init__(self, core: _Core, name: str) -> None:
        self.name = name
        self._held: list[_Core] = [core]
        self._finalizer: weakref.finalize[[], _End[_Core]] = weakref.finalize(self, self._held.clear)

    @property
    def _core(self) -> _Core:
        if not self._held:
            raise BridgeError(f"this end of {self.name} is closed: open another one")
        return self._held[0]

    @property
    def broken(self) -> bool:
        """Whether the ring's counters contradict each other, so that nothing goes through it any more.

        Something has written over the memory. Start the engine again; until then it does without the bridge.
        """
        return self._core.broken()

    def close(self) -> None:
        """Give up this end; closing it again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Consumer(_End[_native.RingConsumer]):
    """The scheduler's end of one worker's ring. It makes the segment, and removes it when it is closed.

    Args:
        engine: the engine's random number, :func:`~nitro.ipc.new_engine_id`.
        rank: the worker's rank.
        capacity: records that the ring holds, 64 bytes each; a power of two in [2, 2**20].

    Raises:
        ValueError: the capacity is not one of these.
        BridgeError: shared memory is missing, full or not writable.

    Attributes:
        name: what the worker opens; a file in ``/dev/shm``.
    """

    def __init__(self, engine: int, rank: int, capacity: int = 4096) -> None:
        core = _native.RingConsumer(engine, rank, capacity)
        super().__init__(core, core.name)

    def poll(self, most: int | None = None) -> Messages:
        """Take the messages that have come, oldest first, without waiting.

        Args:
            most: how many at most; the others stay for the next call.

        Returns:
            ``[M]`` of dtype ``MESSAGE``. Of one request there may be several; the last one is the newest.

        Raises:
            BridgeError: in a process that was forked from the one which made this end.
        """
        return self._core.poll(_ALL if most is None else most)

    @property
    def producer_alive(self) -> bool | None:
        """Whether the worker is there; None before it comes and after it has closed, False if it was killed."""
        return self._core.producer_alive()

    @property
    def counters(self) -> ConsumerCounters:
        """Totals since the ring was made."""
        return ConsumerCounters(*self._core.counters())

    def unlink(self) -> None:
        """Remove the segment's name, once the worker has opened it: then nothing is left behind even by ``kill -9``."""
        self._core.unlink()


class Producer(_End[_native.RingProducer]):
    """A worker's end. Another one of the same ring can follow when this one is closed or its process has ended.

    Args:
        name: the segment's, :attr:`Consumer.name`.

    Raises:
        BridgeError: there is no such segment, it is not one of this user and this version of Nitro, its engine has
            ended or lives in another container, or another worker writes to it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_native.RingProducer(name), name)

    def publish(self, messages: Messages = _NO_MESSAGES) -> int:
        """Send messages, without waiting.

        What finds no room in the ring is kept here, the newest message of each request only, and goes out with the next
        call: call it in each step, with or without messages. :meth:`withdraw` what is not wanted any more.

        Args:
            messages: ``[M]`` of dtype ``MESSAGE``, those of one request in the order of their steps.

        Returns:
            How many messages wait for room.

        Raises:
            ValueError: lengths that no request has, or more than one dimension; nothing was sent.
            TypeError: another dtype.
            BridgeError: in a process that was forked from the one which opened this end.
        """
        return self._core.publish(messages)

    def withdraw(self, requests: npt.NDArray[np.uint64]) -> None:
        """Drop what waits of these requests, uint64 ``[R]``: they have finished or were preempted."""
        self._core.withdraw(requests)

    @property
    def waiting(self) -> int:
        """How many messages wait for room."""
        return self._core.waiting()

    @property
    def consumer_alive(self) -> bool:
        """Whether the scheduler's process is still there."""
        return self._core.consumer_alive()

    @property
    def counters(self) -> ProducerCounters:
        """Totals since this end was opened."""
        return ProducerCounters(*self._core.counters())
