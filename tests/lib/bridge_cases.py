"""Messages to send over the bridge, and how to look at, and to damage, the memory of a ring."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nitro import _native
from nitro.ipc import MESSAGE, Messages

SHARED_MEMORY = Path(_native.SHARED_MEMORY)
RECORD_SIZE = 64
PYTHON = [sys.executable, "-P", "-c"]  # -P: the checkout must not shadow what was installed

# (request, step, run, epoch)
Key = tuple[int, int, int, int]


def message(key: Key) -> tuple[int, ...]:
    """The whole message; lengths follow from the key, so that a mixture of two messages is seen."""
    request, step, run, epoch = key
    length = (request * 31 + step * 7 + run * 5 + epoch) % 1000
    return (request, step, run, epoch, length + 20, length + 10, length, 0)


def messages(keys: Iterable[Key]) -> Messages:
    return np.array([message(key) for key in keys], MESSAGE)


def keys_of(found: Messages) -> list[Key]:
    """The keys of messages that came over the bridge, each of which must be whole."""
    keys = [(int(m["request"]), int(m["step"]), int(m["run"]), int(m["epoch"])) for m in found]
    assert found.tolist() == [message(key) for key in keys], "mixed messages"
    return keys


@contextmanager
def memory_of(name: str) -> Iterator[mmap.mmap]:
    with (SHARED_MEMORY / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def read_word(memory: mmap.mmap, field: str) -> int:
    (value,) = struct.unpack_from("=Q", memory, _native.RING_LAYOUT[field])
    return int(value)


def write_word(memory: mmap.mmap, field: str, value: int) -> None:
    struct.pack_into("=Q", memory, _native.RING_LAYOUT[field], value)


def record_at(memory: mmap.mmap, sequence: int) -> slice:
    """Where in the segment the record with this sequence number lies."""
    start = _native.RING_LAYOUT["records"] + sequence % read_word(memory, "capacity") * RECORD_SIZE
    return slice(start, start + RECORD_SIZE)


def start_ticks(key: int) -> int:
    """The start time in a process key, in ticks."""
    return key >> 22
