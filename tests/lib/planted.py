"""Slow Nitro down on purpose, to see that gates notice: in this process, or in all that a command starts.

With ``tests/lib/planted_site`` and ``tests/lib`` in PYTHONPATH, each Python that starts slows down what NITRO_PLANTED
says as soon as it is imported, an engine's processes included: ``apply=0.02`` (seconds in each plan that a worker
applies), ``copy`` (each compaction copies the whole cache first).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "NITRO_PLANTED"
LIB = Path(__file__).resolve().parent
Change = Callable[[Callable[..., Any]], Callable[..., Any]]

PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "apply": (
        ("nitro.integration.vllm.runner_v1", "NitroRunnerMixin._nitro_apply"),
        ("nitro.integration.vllm.runner_v2", "NitroV2ModelRunner._nitro_apply"),
    ),
    "copy": (("nitro.kernels.compact", "fill_ragged"), ("nitro.kernels.compact", "pack_ragged")),
}


def delayed(seconds: float) -> Change:
    """Return what makes a function sleep first."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **kwargs)

        return slow

    return change


def copying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function whose first argument are layers copy all their caches first."""

    @functools.wraps(function)
    def wasteful(layers: Any, *args: Any, **kwargs: Any) -> Any:
        for cache in layers.caches:
            cache.clone()
        return function(layers, *args, **kwargs)

    return wasteful


def environment(spec: str) -> dict[str, str]:
    """Return the variables that plant something in all of a command's processes."""
    path = [str(LIB / "planted_site"), str(LIB), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: spec, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def install(spec: str, places: dict[str, tuple[tuple[str, str], ...]] = PLACES) -> None:
    """Slow down what ``spec`` says once its module is imported.

    Raises:
        ValueError: there is no such fault.
    """
    name, _, amount = spec.partition("=")
    if name not in places:
        raise ValueError(f"{VARIABLE}={spec!r} is not known: use one of {', '.join(places)}")
    change = delayed(float(amount)) if amount else copying
    sys.meta_path.insert(0, _Finder(places[name], change))


class _Finder(MetaPathFinder):
    def __init__(self, places: Sequence[tuple[str, str]], change: Change) -> None:
        self.places, self.change = places, change
        self.looking = False

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        names = [where for module, where in self.places if module == fullname]
        if not names or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, names, self.change)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, names: Sequence[str], change: Change) -> None:
        self.inner, self.names, self.change = inner, names, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for name in self.names:
            *owners, last = name.split(".")
            owner: Any = functools.reduce(getattr, owners, module)
            setattr(owner, last, self.change(getattr(owner, last)))
