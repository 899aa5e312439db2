"""Starts one engine in a process of its own and follows its progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nitro.demo.device import REQUIRED_ENV, Device
from nitro.demo.engine import EngineSpec
from nitro.demo.records import Run
from nitro.errors import NitroError

ENGINE_COMMAND = (sys.executable, "-m", "nitro.demo.engine")
LAST_LINES = 25


class DemoError(NitroError, RuntimeError):
    """An engine of the demo failed, or did not do what it was started for."""


def run_engine(spec: EngineSpec, device: Device, log: Path, follow: Callable[[dict[str, Any]], None]) -> Run:
    """Run one engine in a fresh process.

    Args:
        spec: what to run.
        device: whose environment variables the process gets; those set already win.
        log: file that gets everything vLLM prints.
        follow: called with each progress event of the engine.

    Returns:
        What happened.

    Raises:
        DemoError: the process failed; the message ends with the last lines it printed.
    """
    with tempfile.TemporaryDirectory(prefix="nitro-demo-") as temporary:
        spec_path, result = Path(temporary) / "spec.json", Path(temporary) / "result.json"
        spec_path.write_text(spec.to_json(), encoding="utf-8")
        read_fd, write_fd = os.pipe()
        with log.open("w", encoding="utf-8") as output, os.fdopen(read_fd, encoding="utf-8") as progress:
            try:
                process = subprocess.Popen(
                    [*ENGINE_COMMAND, str(spec_path), str(result), str(write_fd)],
                    env=device.env | dict(os.environ) | REQUIRED_ENV,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                )
            finally:
                os.close(write_fd)  # ours; the pipe ends when the child's closes
            try:
                for event in _events(progress):
                    follow(event)
                status = process.wait()
            finally:
                if process.poll() is None:  # Ctrl-C here, or an error in follow
                    process.terminate()
                    process.wait()
        if status != 0 or not result.is_file():
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise DemoError(
                f"the {spec.name} engine {how}: its last lines are below, all of them in {log}\n{last_lines(log)}"
            )
        return Run.load(result)


def _events(stream: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.endswith("\n"):  # else the writer died within a line
            yield json.loads(line)


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """Return the end of a log file."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:])
