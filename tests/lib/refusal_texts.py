"""The texts of errors, out of the sources, with … where something is filled in. docs/troubleshooting.md quotes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / "nitro/integration/vllm"


def text_of(node: ast.AST | None) -> str | None:
    """Return a string's text, … for what is not known before it runs; None if there is no text in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


def yielded(file: Path) -> Iterator[str]:
    """Yield the texts that a module yields."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Yield) and (text := text_of(node.value)) is not None:
            yield text


def raised(file: Path, *errors: str) -> Iterator[str]:
    """Yield the texts of the errors of these classes that a module raises."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        name = getattr(node.exc.func, "id", None)
        if name in errors and (text := text_of(node.exc.args[0])) is not None:
            yield text


def assigned(file: Path, variable: str) -> Iterator[str]:
    """Yield the texts that a module assigns to a variable."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == variable:
            text = text_of(node.value)
            if text is not None:
                yield text


def native(file: Path) -> Iterator[str]:
    """Yield the beginnings of what the C++ core says about a file in shared memory."""
    source = file.read_text(encoding="utf-8")
    yield from re.findall(r'refuse\(name, (?:text\()?"([^"]+)"', source)
    remedies = source[source.index("std::string remedy(") : source.index("void fail(")]
    yield from re.findall(r'return (?:text\((?:kSharedMemory, |needed, )?)?"([^"]+)"', remedies)


def sections() -> dict[str, list[str]]:
    """Return the texts by section of the page."""
    python = sorted(VLLM.glob("*.py"))
    errors = [
        text
        for file in python
        for text in raised(file, "UnsupportedError")
        if not text.startswith("Nitro cannot serve this configuration")  # the heading of the reasons
    ]
    return {
        "At start-up: the model, and features of vLLM": list(yielded(VLLM / "refusals.py")),
        "At start-up: versions that were not tested": list(assigned(VLLM / "compat.py", "said")),
        "When the caches are allocated": errors,
        "Settings": [
            *raised(VLLM / "activate.py", "SettingsError"),
            *raised(ROOT / "nitro/policies/__init__.py", "SettingsError"),
            *raised(ROOT / "nitro/policies/base.py", "SettingsError"),
        ],
        "Requests (status 400)": [
            *raised(VLLM / "frontend.py", "RequestSettingsError"),
            *raised(ROOT / "nitro/request_settings.py", "SettingsError"),
        ],
        "Shared memory (threshold)": [
            *raised(VLLM / "asks.py", "BridgeError"),
            *(f"… {text.strip()}" for text in native(ROOT / "native/src/segment.cpp")),
        ],
        "`nitro stats`": list(raised(ROOT / "nitro/watch/scrape.py", "WatchError")),
    }


def quoted(text: str) -> str:
    """Return a text as the page has it, in one cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
