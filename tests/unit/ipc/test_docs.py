"""docs/bridge.md has tables of the layout, which are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from nitro import _native
from nitro.ipc import MESSAGE

PAGE = (Path(__file__).resolve().parents[3] / "docs/bridge.md").read_text()


def test_offsets_in_the_documentation() -> None:
    table = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {field: int(offset) for offset, field in table if field != "magic"} == _native.RING_LAYOUT
    assert ("0", "magic") in table


def test_message_in_the_documentation() -> None:
    table = re.findall(r"^\| `(\w+)` \| (u?int\d+) \|", PAGE, re.MULTILINE)
    assert [(name, MESSAGE[name].name) for name in MESSAGE.names or ()] == table
    assert f"{MESSAGE.itemsize} bytes" in PAGE
