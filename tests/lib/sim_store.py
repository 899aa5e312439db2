"""Results of a simulated tournament: JSON lines, the first of which says what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nitro.errors import SettingsError

Row = dict[str, Any]
Key = tuple[str, int, str, str, float]
"""Task, length, case, candidate, budget."""


def key_of(row: Row) -> Key:
    """Return what a row is about."""
    return row["task"], row["length"], row["case"], row["candidate"], row["budget"]


class SimStore:
    """A file that is only added to, so that an interrupted run goes on where it was.

    Args:
        path: of the file; made if it is not there.
        manifest: what all rows depend on.

    Raises:
        SettingsError: the file belongs to another manifest, or is damaged.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.rows: dict[Key, Row] = {}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"manifest": manifest}) + "\n", encoding="utf-8")
            return
        found, rows = read(path)
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):  # an interrupted run's last line
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        if found != manifest:
            differ = sorted(name for name in found.keys() | manifest.keys() if found.get(name) != manifest.get(name))
            raise SettingsError(f"{path} was made with other settings ({', '.join(differ)}): give another --out")
        self.rows = {key_of(row): row for row in rows}

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows."""
        new = {key_of(row): row for row in rows}
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new.values())
        with self.path.open("a", encoding="utf-8") as out:
            out.write(text)
        self.rows |= new


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return a file's manifest and rows; a last line that is not whole does not count.

    Raises:
        SettingsError: the file cannot be read, or is damaged elsewhere.
    """
    try:
        whole = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}: give the --out of an earlier run") from error
    try:
        first, *rest = [json.loads(line) for line in whole[: whole.rfind("\n") + 1].splitlines()]
        return first["manifest"], rest
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} is damaged: {error}: remove it, and run again") from error
