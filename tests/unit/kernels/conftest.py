"""Kernels run on the CPU here, in Triton's interpreter.

That is chosen once in a process, by TRITON_INTERPRET=1 when triton is first imported, and the engines that other tests
start must not inherit it. So these tests need a process of their own, which `make test` gives them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="runs kernels on the CPU: set TRITON_INTERPRET=1"
)


def _patch_once() -> None:
    """Make the interpreter patch triton.language once a launch, not once more for every jitted helper that is called.

    It spends nine tenths of the time on that. A helper sees the same modules patched either way.
    """
    patch = interpreter._patch_lang
    patched: set[ModuleType] = set()

    class Scope:
        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            patched.clear()
            self.scope.restore()

    def patch_lang(fn: Any) -> Any:
        modules = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        scope = Scope(patch(fn))
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_lang


_patch_once()
