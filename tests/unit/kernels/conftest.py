"""Kernels run on the CPU here, in Triton's interpreter.

That is chosen once in a process, by TRITON_INTERPRET=1 when triton is first imported, and the engines that other tests
start must not inherit it. So these tests need a process of their own, which `make test` gives them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

from nitro.kernels import score_combine, score_gravity

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="runs kernels on the CPU: set TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def small_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a minute to sort the tiles that GPUs sort in microseconds."""
    monkeypatch.setattr(score_combine, "SORTS", (64,))


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


def _multiply_bfloat16() -> None:
    """Make the interpreter's matrix products take bfloat16, which it holds as integers, for what it is."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def upcast(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(self, upcast(a), upcast(b), *arguments)

    interpreter.InterpreterBuilder.create_dot = dot
    score_gravity.INTERPRETER_MULTIPLIES_BFLOAT16 = True


_patch_once()
_multiply_bfloat16()
