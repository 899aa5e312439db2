"""Which versions of packages are installed."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import nitro


def installed(*names: str) -> dict[str, str]:
    """Return the versions of those of these distributions that are installed, in their order."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def figures_depend_on(*names: str) -> dict[str, str]:
    """Return the versions of Nitro, of Python, and of these distributions: what belongs beside measured figures."""
    return {"nitro-kv": nitro.__version__, "python": sys.version.split()[0], **installed(*names)}
