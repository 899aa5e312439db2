#!/usr/bin/env python3
"""Record the parameters of vLLM's methods that Nitro overrides, from wheels, without installing or importing them.

Of a field of a dataclass, its name is recorded, or null where there is no such field.

    python3 ci/vllm_signatures.py WHEEL... > tests/data/vllm_signatures.json

`tests/unit/integration/test_signatures.py` holds Nitro's expectations against what is recorded. To support a further
version, `pip download --no-deps` its wheel and record all of them again. Wheels for the CPU have the same Python code
as those for GPUs.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from functools import cache
from pathlib import Path

from nitro.integration.vllm import compat


class Sources:
    """The Python sources of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self._names = set(self._archive.namelist())

    @cache  # noqa: B019 (one for each wheel)
    def module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self._names:
                return ast.parse(self._archive.read(file))
        return None

    def parameters(self, module: str, owner: str, method: str) -> list[str] | None:
        """Return the names of a method's parameters, also of one that the class inherits; None where there is none."""
        tree = self.module(module)
        if tree is None:
            return None
        found = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner), None)
        if found is None:
            home = self._home(tree, owner)
            return None if home is None else self.parameters(home, owner, method)
        for node in found.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        for base in found.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (known := self.parameters(module, name.id, method)) is not None:
                return known
        return None

    def field(self, module: str, owner: str, name: str) -> list[str] | None:
        """Return the name of a dataclass' field, or None where there is no such field."""
        tree = self.module(module)
        found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner] if tree else []
        fields = [n.target.id for c in found for n in c.body if isinstance(n, ast.AnnAssign)]
        return [name] if name in fields else None

    @staticmethod
    def _home(tree: ast.Module, name: str) -> str | None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
                return node.module
        return None


def main() -> None:
    wanted = {hook.label: hook for hook in (*compat.hooks(), *compat.v2_hooks())}
    recorded = {}
    for wheel in map(Path, sys.argv[1:]):
        version = re.match(r"vllm(?:_cpu)?-([\d.]+)", wheel.name)
        assert version, f"{wheel.name} is no wheel of vLLM"
        sources = Sources(wheel)
        recorded[version[1]] = {
            label: (sources.field if isinstance(hook, compat.Field) else sources.parameters)(
                hook.owner.__module__, hook.owner.__qualname__, hook.name
            )
            for label, hook in sorted(wanted.items())
        }
    # A line for each method: a diff between two recordings shows what changed.
    versions = [
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in methods.items())
        + "\n}"
        for version, methods in sorted(recorded.items())
    ]
    print("{\n" + ",\n".join(versions) + "\n}")


if __name__ == "__main__":
    main()
