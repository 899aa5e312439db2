"""The results directory of an evaluation: what was asked for, and a file for each cell, whole or not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nitro.bench.store import open_manifest, write_text_whole, write_whole
from nitro.errors import SettingsError
from nitro.eval.plan import Cell

SCHEMA = 1
Row = dict[str, Any]
"""What became of one case: a line of JSON."""
Likeliest = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Ids and log-probabilities ``[cases, tokens, k]`` of the k likeliest tokens."""


class EvalStore:
    """Cells that have run. The same command goes on where it was interrupted."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Open a directory, or make one.

        Raises:
            SettingsError: it belongs to other settings, or cannot be read or written.
        """
        self.folder = folder
        open_manifest(folder / "eval.json", {"schema": SCHEMA, **manifest}, ("cells",))

    def _path(self, cell: Cell, suffix: str) -> Path:
        return self.folder / "cells" / f"{cell.slug}.{suffix}"

    def has(self, cell: Cell) -> bool:
        """Return whether a cell is there."""
        return self._path(cell, "jsonl").exists()

    def put(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Keep a cell."""
        write_text_whole(self._path(cell, "jsonl"), "".join(json.dumps(row) + "\n" for row in rows))

    def get(self, cell: Cell) -> list[Row]:
        """Return a cell's rows.

        Raises:
            SettingsError: its file is damaged.
        """
        path = self._path(cell, "jsonl")
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise SettingsError(f"{path} is damaged: {error}: remove it, and the cell is run again") from error

    def put_likeliest(self, cell: Cell, likeliest: Likeliest) -> None:
        """Keep the likeliest tokens under the full cache, before its cell."""
        path = self._path(cell, "npz")
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        np.savez_compressed(temporary, ids=likeliest[0], logprobs=likeliest[1])
        temporary.replace(path)

    def likeliest(self, cell: Cell) -> Likeliest:
        """Return what `put_likeliest` has kept."""
        with np.load(self._path(cell, "npz")) as found:
            return found["ids"], found["logprobs"]

    def write(self, name: str, data: Any) -> Path:
        """Write JSON for others, and return its path."""
        write_whole(self.folder / name, data)
        return self.folder / name

    def write_lines(self, cells: Sequence[Cell]) -> Path:
        """Write all cells' rows as one file of JSON lines, and return its path."""
        path = self.folder / "results.jsonl"
        with path.open("w", encoding="utf-8") as out:
            for cell in cells:
                for row in self.get(cell):
                    where = {"task": cell.task, "length": cell.length, "policy": cell.label, "budget": cell.budget}
                    out.write(json.dumps(where | row) + "\n")
        return path
