"""Starts one engine in a process of its own and follows its progress."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nitro.child import Child
from nitro.demo.engine import EngineSpec
from nitro.demo.records import Run
from nitro.device import REQUIRED_ENV, Device
from nitro.errors import NitroError

ENGINE_COMMAND = (sys.executable, "-m", "nitro.demo.engine")


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
        child = Child([*ENGINE_COMMAND, str(spec_path), str(result)], log, device.env | dict(os.environ) | REQUIRED_ENV)
        try:
            for event in child.events():
                follow(event)
            status = child.wait()
        finally:
            child.stop()  # Ctrl-C here, or an error in follow
        if status != 0 or not result.is_file():
            raise DemoError(child.failure(spec.name))
        return Run.load(result)
