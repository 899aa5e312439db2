"""Processes that engines run in: each with a log of its own, and a pipe over which it reports, in lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

LAST_LINES = 25


class Child:
    """A process that reports events. Its command ends with the file descriptor to write them to.

    Attributes:
        log: the file that gets everything it prints.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], *, talk: bool = False
    ) -> None:
        """Start the process.

        Args:
            command: what to run; the number of the file descriptor is added as the last argument.
            log: file for its output; written anew.
            environment: all of its environment variables.
            talk: whether `send` will be used; if not, the process reads nothing.
        """
        self.log = log
        read_fd, write_fd = os.pipe()
        self._events: TextIO = os.fdopen(read_fd, encoding="utf-8")
        try:
            with log.open("w", encoding="utf-8") as output:
                self._process = subprocess.Popen(
                    [*command, str(write_fd)],
                    env=dict(environment),
                    stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                    start_new_session=talk,  # so that an engine's own processes end with it, whatever happens
                    text=True,
                )
        except BaseException:
            self._events.close()
            raise
        finally:
            os.close(write_fd)  # ours; the pipe ends when the child's closes
        self._talks = talk

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the process reports, until it closes its end."""
        for line in self._events:
            if line.endswith("\n"):  # else the writer died within a line
                yield json.loads(line)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line of JSON to its standard input; nothing happens if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the events that do not come will say so
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end by itself; return its status."""
        self._hang_up()
        return self._process.wait(timeout)

    def stop(self) -> None:
        """End the process now if it still runs."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        self._hang_up()
        self._events.close()

    def failure(self, name: str) -> str:
        """Say how the process ended, with the last lines it printed."""
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the {name} engine {how}: its last lines are below, all of them in {self.log}\n{last_lines(self.log)}"

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self._talks:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """Return the end of a log file."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:])
