"""The scheduler's questions to rank 0's worker: how many of a request's tokens reach the threshold.

A question travels with the step whose cache is to be scored, its answer through shared memory, some steps later. Until
then a request may have finished or been preempted: an answer counts only if nothing of that has happened. (It may have
been evicted, too, as the bounds ask for it whatever the data says: that takes the lowest scores, and leaves the count.)
A question whose answer is lost is asked again; nothing ever waits for one.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger

from nitro.errors import BridgeError
from nitro.ipc import Consumer, collect_stale, new_engine_id
from nitro.types import BridgeCounters, IntArray, StepAsks, StepPlan, WorkReport

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = init_logger("vllm.plugins.nitro")
CAPACITY = 4096  # answers that may wait to be read; a power of two
MOST = 256  # questions in a step: their blocks are listed one by one, which takes some 20 µs each
PATIENCE = 16  # steps until a question counts as lost; an answer takes two or three


def try_bridge(capacity: int = CAPACITY) -> None:
    """Make the shared memory of ``Asks`` and give it up again, to learn early whether that is possible.

    Raises:
        BridgeError: shared memory is missing, full or not writable.
    """
    collect_stale()
    try:
        Consumer(new_engine_id(), 0, capacity).close()
    except BridgeError as error:
        raise BridgeError(
            f"threshold needs shared memory for the workers' answers, or set budget or ratio instead: {error}"
        ) from error


class Answer(NamedTuple):
    """What a worker found of a request.

    Attributes:
        request_id: the request.
        logical_len: its tokens when it was asked.
        keep: how many of the slots that it held then stay by their scores.
    """

    request_id: str
    logical_len: int
    keep: int


class _Open(NamedTuple):
    """A question without an answer."""

    step: int
    run: int
    epoch: int
    logical: int
    physical: int


class _Asked(NamedTuple):
    """A question that is not on its way yet; see ``Asks.ask``."""

    name: str
    epoch: int
    logical: int
    physical: int
    protect: int
    blocks: Sequence[int]


class Asks:
    """Questions of the step that is being scheduled, those without an answer yet, and the answers that came.

    Attributes:
        answered: answers that came in time.
        stale: answers that came too late to be used.
        lost: questions that were asked again, since no answer came.
    """

    def __init__(self, threshold: float, block_size: int, capacity: int = CAPACITY) -> None:
        """Make the shared memory that answers come through.

        Args:
            threshold: scores of at least this count.
            block_size: slots of a block.
            capacity: answers that may wait to be read; a power of two.

        Raises:
            BridgeError: shared memory is missing, full or not writable.
        """
        collect_stale()
        self._ring = Consumer(new_engine_id(), 0, capacity)
        self._linked = True
        self._threshold, self._block_size = threshold, block_size
        self._step = 0
        self._asked = 0  # requests that ever had a question
        self._numbers: dict[str, tuple[int, int]] = {}  # of each request: its number, and how often it began again
        self._names: dict[int, str] = {}
        self._open: dict[str, _Open] = {}
        self._asked_at: dict[str, int] = {}
        self._new: list[_Asked] = []
        self._put_off = 0  # requests that were to be asked about in this step, had there not been so many
        self._dead = False
        self._depth = 0
        self.answered = self.stale = self.lost = 0

    def close(self) -> None:
        """Give up the shared memory."""
        self._ring.close()

    def begin_step(self) -> list[Answer]:
        """Begin the next step, and return the answers that have come, the newest of each request."""
        self._step += 1
        self._put_off = 0
        if self._linked and self._ring.producer_alive:
            # The worker has opened it: without a name, nothing is left behind however this process ends.
            self._ring.unlink()
            self._linked = False
        if self._ring.broken:
            self._dead = True
            logger.warning_once(
                "something has written over the shared memory through which workers answer: thresholds evict nothing "
                "any more, only max_keep does; start the engine again"
            )
            return []
        messages = self._ring.poll()
        self._depth = max(self._depth, len(messages))
        return [answer for message in messages if (answer := self._match(*message.item())) is not None]

    @property
    def open(self) -> int:
        """Return how many questions have no answer yet."""
        return len(self._open)

    def take_depth(self) -> int:
        """Return the most answers that were found in the ring in one step since the last call."""
        depth, self._depth = self._depth, 0
        return depth

    def counters(self, work: WorkReport) -> BridgeCounters:
        """Return what became of all questions so far, given the worker's newest report."""
        corrupt = self._ring.counters.corrupt
        return BridgeCounters(self.answered, self.stale, self.lost, corrupt, work.replaced, work.silent)

    def _match(
        self, number: int, _: int, run: int, epoch: int, logical: int, physical: int, keep: int, __: int
    ) -> Answer | None:
        name = self._names.get(number)
        asked = None if name is None else self._open.get(name)
        if name is None or asked is None or (run, epoch, logical, physical) != asked[1:]:
            self.stale += 1
            return None
        del self._open[name]
        self.answered += 1
        return Answer(name, logical, keep)

    def waits(self, name: str) -> bool:
        """Return whether a request is not to be asked about: a question is open, or none will ever be answered."""
        if self._dead:
            return True
        asked = self._open.get(name)
        if asked is None:
            return False
        if self._step - asked.step < PATIENCE:
            return True
        del self._open[name]
        self._asked_at.pop(name, None)
        self.lost += 1
        return False

    def later(self) -> int:
        """Return in how many steps a request is to be asked about, 0 for now.

        Requests that began together are due together. Each answer may come some steps later at the price of memory
        only, so that no step asks about more than ``MOST``; from then on they are due one part after the other.
        """
        if len(self._new) < MOST:
            return 0
        self._put_off += 1
        return -(-self._put_off // MOST)

    def asked_at(self, name: str) -> int | None:
        """Return how many tokens a request had when it was last asked about in this run; None: never, or in vain."""
        return self._asked_at.get(name)

    def ask(self, name: str, epoch: int, logical: int, physical: int, protect: int, blocks: Sequence[int]) -> None:
        """Ask of a request in this step.

        Args:
            name: the request.
            epoch: evictions that it has had in this run.
            logical: tokens computed.
            physical: slots held.
            protect: the first slots, which always stay.
            blocks: the blocks of these slots, one after the other.
        """
        if name not in self._numbers:
            self._asked += 1
            self._numbers[name] = self._asked, 0
            self._names[self._asked] = name
        self._open[name] = _Open(self._step, self._numbers[name][1], epoch, logical, physical)
        self._asked_at[name] = logical
        self._new.append(_Asked(name, epoch, logical, physical, protect, blocks))

    def finished(self, name: str) -> None:
        """Forget a request."""
        self._open.pop(name, None)
        self._asked_at.pop(name, None)
        if (number := self._numbers.pop(name, None)) is not None:
            del self._names[number[0]]

    def preempted(self, name: str) -> None:
        """Note that a request will begin again."""
        self._open.pop(name, None)
        self._asked_at.pop(name, None)
        if (number := self._numbers.get(name)) is not None:
            self._numbers[name] = number[0], number[1] + 1

    def take(self) -> StepAsks | None:
        """Return the questions since the last call, without those of requests that have been preempted since."""
        asked = [column for column in self._new if column.name in self._open]
        self._new.clear()
        if not asked:
            return None
        names = tuple(column.name for column in asked)
        numbers = [self._numbers[name] for name in names]
        counts = np.array([(c.epoch, c.logical, c.physical, c.physical, c.protect) for c in asked], np.int32).T
        blocks = np.fromiter(chain.from_iterable(column.blocks for column in asked), np.int32)
        return StepAsks(
            slots=StepPlan(names, np.ascontiguousarray(counts), blocks, _NOTHING_MOVED, self._block_size),
            numbers=np.array([number for number, _ in numbers], np.uint64),
            runs=np.array([run for _, run in numbers], np.uint32),
            step=self._step,
            threshold=self._threshold,
            ring=self._ring.name,
        )


_NOTHING_MOVED: IntArray = np.empty((2, 0), np.int32)
