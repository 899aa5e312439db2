"""What killed engines leave behind is removed, nothing else is; and what is said when there is no shared memory."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from bridge_cases import PYTHON, SHARED_MEMORY, keys_of, messages

from nitro.ipc import Consumer, Producer, collect_stale, new_engine_id

ENGINE = """
import sys, time
from nitro.ipc import Consumer, new_engine_id
consumers = [Consumer(new_engine_id(), rank, 4) for rank in range(2)]
print(*(consumer.name for consumer in consumers), flush=True)
time.sleep(600)
"""


@contextmanager
def engine(*prefix: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """An engine's process and the names of its two segments; it is killed in the end, and they are removed."""
    child = subprocess.Popen([*prefix, *PYTHON, ENGINE], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    names = child.stdout.readline().split()
    try:
        yield child, names
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        for name in names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def present(names: list[str]) -> list[str]:
    return [name for name in names if (SHARED_MEMORY / name).exists()]


def unshared(*options: str) -> list[str]:
    """What runs a command in namespaces of its own, which some machines do not let users have."""
    prefix = ["unshare", "--user", *options]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"this machine does not let us run {' '.join(prefix)}")
    return prefix


def test_two_engines_never_meet() -> None:
    one, other = (Consumer(new_engine_id(), 0, 4) for _ in range(2))
    assert one.name != other.name
    with Producer(one.name) as a, Producer(other.name) as b:
        a.publish(messages([(1, 1, 0, 0)]))
        b.publish(messages([(1, 2, 0, 0)]))
    assert keys_of(one.poll()) == [(1, 1, 0, 0)]
    assert keys_of(other.poll()) == [(1, 2, 0, 0)]


def test_segments_of_a_killed_engine_are_removed_and_no_other_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nitro")
    strangers = [SHARED_MEMORY / f"nitro-{os.geteuid()}-{new_engine_id():016x}-0" for _ in range(3)]
    strangers[0].touch(mode=0o600)
    strangers[1].write_bytes(bytes(4096))
    strangers[2].symlink_to("/etc/hostname")
    try:
        with engine() as (_, living), engine() as (child, names):
            ours = Consumer(new_engine_id(), 0, 4)
            collect_stale()
            assert present(names) == names
            child.kill()
            child.wait()
            assert collect_stale() == sorted(names)
            assert present(names) == []
            assert present(living) == living
            assert present([ours.name])
            assert "removed from /dev/shm what ended engines had left there: " + ", ".join(sorted(names)) in caplog.text
            assert collect_stale() == []
        assert all(os.path.lexists(path) for path in strangers)
    finally:
        for path in strangers:
            path.unlink()


@pytest.mark.parametrize(
    "name", [b"\xff\xfe-0", b"x" * 16 + b"-0", b"0" * 16 + b"-99999999999", b"0" * 16 + b"-0\n", b""]
)
def test_names_that_no_segment_has_are_passed_over(name: bytes) -> None:
    """Anybody may write to /dev/shm: what others call their files must not keep an engine from starting."""
    path = os.fsencode(SHARED_MEMORY / f"nitro-{os.geteuid()}-") + name
    with open(path, "wb") as file:
        file.write(bytes(4096))
    try:
        assert collect_stale() == []
        assert os.path.exists(path)
    finally:
        os.unlink(path)


def test_an_engine_starts_beside_what_a_killed_one_left() -> None:
    """Its worker may still write there: into memory that only the worker has."""
    with engine() as (child, names):
        orphan = Producer(names[0])
        child.kill()
        child.wait()
        assert not orphan.consumer_alive
        assert collect_stale() == sorted(names)
        fresh = Consumer(new_engine_id(), 0, 4)
        orphan.publish(messages([(1, 1, 0, 0)]))
        assert fresh.poll().size == 0
        assert fresh.producer_alive is None


def test_an_unlinked_segment_leaves_nothing_behind() -> None:
    consumer = Consumer(new_engine_id(), 0, 4)
    with Producer(consumer.name) as producer:
        consumer.unlink()
        assert present([consumer.name]) == []
        producer.publish(messages([(1, 1, 0, 0)]))
        assert keys_of(consumer.poll()) == [(1, 1, 0, 0)]
    consumer.close()


def test_an_engine_in_another_pid_namespace_keeps_its_segments_while_it_lives() -> None:
    """Containers that share /dev/shm: here the engine's process id is somebody else's, or nobody's."""
    with engine(*unshared("--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")) as (child, names):
        assert len(names) == 2
        collect_stale()
        assert present(names) == names
        child.kill()
        assert child.stdout is not None
        assert child.stdout.read() == ""  # it ends with the last process that has it
        assert collect_stale() == sorted(names)


def test_a_worker_in_another_pid_namespace_is_refused() -> None:
    consumer = Consumer(new_engine_id(), 0, 4)
    code = f"from nitro.ipc import Producer; Producer({consumer.name!r})"
    command = [*unshared("--map-current-user", "--pid", "--fork", "--mount-proc"), *PYTHON, code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "BridgeError: " in done.stderr
    assert "another pid or time namespace: run scheduler and workers in one container" in done.stderr
    assert consumer.producer_alive is None


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        (
            "mount -t tmpfs -o size=64k tmpfs /dev/shm",
            r"262656 bytes are needed and 65536 of 65536 are free.*--shm-size",
        ),
        ("mount -t tmpfs -o ro tmpfs /dev/shm", r"Read-only file system.*cannot write to /dev/shm"),
        ("mount -t tmpfs tmpfs /dev", r"/dev/shm is missing: mount a tmpfs there"),
        ("mount -t tmpfs tmpfs /proc", r"/proc/self/ns/pid cannot be read.*mount proc on /proc"),
    ],
)
def test_without_shared_memory_the_error_says_what_to_do(mount: str, message: str) -> None:
    program = "from nitro.ipc import Consumer, collect_stale\nprint(collect_stale())\nConsumer(1, 0, 4096)"
    command = f"{mount} && exec {shlex.join([*PYTHON, program])}"
    prefix = unshared("--map-root-user", "--mount")
    done = subprocess.run([*prefix, "sh", "-c", command], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("nitro.errors.BridgeError: ")
    assert re.search(message, error), error


def test_a_full_file_system_is_left_as_it_was() -> None:
    program = (
        "import os, nitro.ipc as i, nitro.errors as e\n"
        "try: i.Consumer(1, 0, 4096)\n"
        "except e.BridgeError: print(os.listdir('/dev/shm'))"
    )
    command = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {shlex.join([*PYTHON, program])}"
    prefix = unshared("--map-root-user", "--mount")
    assert subprocess.run([*prefix, "sh", "-c", command], capture_output=True, text=True).stdout == "[]\n"
