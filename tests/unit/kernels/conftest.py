"""Kernels run on the CPU here, in Triton's interpreter."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, which tests do later

from triton import language as tl
from triton.runtime import interpreter


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
