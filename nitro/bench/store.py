"""A results directory: what was asked for, and a file for each run; an interrupted benchmark goes on there.

``bench.json`` holds the settings. A directory of other settings is refused, since its results would not belong
together; only the number of rounds may grow. A run's file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nitro.errors import SettingsError

SCHEMA = 1


class Store:
    """The results of one benchmark.

    Attributes:
        folder: where they are.
        session: how often a command has worked on them before this one: runs of different commands are less comparable.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Open a directory, or make one.

        Raises:
            SettingsError: it belongs to other settings, or cannot be read or written.
        """
        self.folder = folder
        self.session = open_manifest(folder / "bench.json", {"schema": SCHEMA, **manifest}, ("runs", "logs"))

    def path(self, load: int, number: int, engine: str) -> Path:
        """Return the file of one run: of a load, a round, an engine (by its slug)."""
        return self.folder / "runs" / f"load{load}-round{number}-{engine}.json"

    def has(self, load: int, number: int, engine: str) -> bool:
        """Return whether a run is there."""
        return self.path(load, number, engine).exists()

    def put(self, load: int, number: int, engine: str, run: dict[str, Any]) -> None:
        """Keep a run, with the number of this command."""
        write_whole(self.path(load, number, engine), {"session": self.session, **run})

    def get(self, load: int, number: int, engine: str) -> dict[str, Any]:
        """Return a run.

        Raises:
            SettingsError: its file is damaged.
        """
        path = self.path(load, number, engine)
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError(f"{path} is damaged: {error}: remove it, and the run is done again") from error
        return found


def open_manifest(path: Path, manifest: dict[str, Any], folders: Sequence[str]) -> int:
    """Open a results directory, or make one; return how often that was done before.

    Args:
        path: file of the settings, in the directory.
        manifest: the settings.
        folders: in the directory, made if need be.

    Raises:
        SettingsError: it belongs to other settings, or cannot be read or written.
    """
    folder = path.parent
    wanted = json.loads(json.dumps(manifest))
    try:
        for name in folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"results directory {folder}: {error}: repair or remove it, or give another one with --out"
        ) from error
    if found is not None and (differ := list(differences(found["settings"], wanted))):
        raise SettingsError(
            f"results directory {folder} was begun with other settings: {'; '.join(differ)}: give another one with "
            "--out, or the same settings to go on"
        )
    sessions = 0 if found is None else int(found["sessions"])
    write_whole(path, {"settings": wanted, "sessions": sessions + 1})
    return sessions


def differences(before: Any, now: Any, at: str = "") -> Iterator[str]:
    """Yield where two JSON values differ, as ``key=before, now after``."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{at}.{key}" if at else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{at}[{index}]")
    elif before != now:
        yield f"{at} was {json.dumps(before)}, now {json.dumps(now)}"


def write_whole(path: Path, data: Any) -> None:
    """Write JSON such that the file is never seen half-written."""
    write_text_whole(path, json.dumps(data))


def write_text_whole(path: Path, text: str) -> None:
    """Write text such that the file is never seen half-written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
