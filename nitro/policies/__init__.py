"""The registry of policies: Nitro's own, and those of other packages.

Another package adds a policy with an entry point in the group ``nitro.policies``, whose name is the policy's name and
whose object is its class (`nitro.policies.base.Policy` says what that must be)::

    [project.entry-points."nitro.policies"]
    mine = "my_package.mine:Mine"

Listing the names imports neither torch nor any policy; a policy's module is imported when the policy is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from nitro._suggest import did_you_mean
from nitro.errors import SettingsError

if TYPE_CHECKING:
    from nitro.policies.base import Policy

__all__ = ["ENTRY_POINT_GROUP", "available", "get", "policy_class"]

ENTRY_POINT_GROUP = "nitro.policies"

_BUILT_IN: dict[str, tuple[str, str]] = {
    "gravity": ("nitro.policies.gravity", "Gravity"),
    "keydiff": ("nitro.policies.keydiff", "KeyDiff"),
    "knorm": ("nitro.policies.knorm", "KNorm"),
    "kvdiff": ("nitro.policies.kvdiff", "KVDiff"),
    "random": ("nitro.policies.random", "Random"),
    "streaming": ("nitro.policies.streaming", "Streaming"),
    "vdiff": ("nitro.policies.vdiff", "VDiff"),
    "vnorm": ("nitro.policies.vnorm", "VNorm"),
}

logger = logging.getLogger(__name__)


def available() -> tuple[str, ...]:
    """Return the names that `get` accepts, sorted. A third party's policy may still turn out to be broken."""
    return tuple(sorted({*_BUILT_IN, *_third_party()}))


def get(name: str, /, **options: object) -> Policy:
    """Return the policy of that name with these options.

    Raises:
        SettingsError: if there is no such policy, it is broken, or an option is unknown or out of bounds.
    """
    cls = policy_class(name)
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for option, value in options.items():
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options, so leave policy_options empty"
            hint = did_you_mean(option, known) or ":"
            raise SettingsError(f"unknown option {option!r} (value {value!r}) of policy {name!r}{hint} {has}")
    try:
        return cls(**options)
    except SettingsError:
        raise
    except (TypeError, ValueError) as error:
        raise SettingsError(f"policy {name!r} refuses the options {options!r}: {error}") from error


def policy_class(name: str) -> type[Policy]:
    """Return the class of the policy of that name, importing its module; raise SettingsError as `get` does."""
    third_party = _third_party()  # also when the name is built in: a collision is reported whatever is asked for
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return _checked(name, lambda: getattr(importlib.import_module(module), attribute), module)
    if name not in third_party:
        names = available()
        hint = did_you_mean(name, names) or ":"
        raise SettingsError(f"unknown policy {name!r}{hint} available policies are {', '.join(names)}")
    points = third_party[name]
    if len(points) > 1:
        raise SettingsError(
            f"policy {name!r} is provided {len(points)} times, by {' and by '.join(map(_origin, points))}: "
            f"uninstall all but one of them"
        )
    return _checked(name, points[0].load, _origin(points[0]))


def _checked(name: str, load: Callable[[], object], origin: str) -> type[Policy]:
    from nitro.policies.base import Policy

    try:
        cls = load()
    except Exception as error:
        if name in _BUILT_IN:  # our own bug or a broken installation of torch: the traceback says more than we could
            raise
        raise SettingsError(
            f"policy {name!r} of {origin} cannot be loaded ({type(error).__name__}: {error}): "
            f"repair or uninstall it, or choose another policy"
        ) from error
    frozen = isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not (isinstance(cls, type) and issubclass(cls, Policy) and frozen and getattr(cls, "name", None) == name):
        raise SettingsError(
            f"policy {name!r} of {origin} is {cls!r}, but must be a frozen dataclass derived from "
            f"nitro.policies.base.Policy whose name is {name!r}: repair or uninstall it, or choose another policy"
        )
    return cls


@functools.cache
def _third_party() -> dict[str, tuple[EntryPoint, ...]]:
    """Return other packages' entry points by name, in a stable order; reading them imports nothing."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=_origin):
        if point.name in _BUILT_IN:
            logger.warning(
                "ignoring policy %r of %s: that name is Nitro's own; the package must rename its policy",
                point.name,
                _origin(point),
            )
        else:
            # One installation may be listed twice (say, editable and built): the same object is no conflict.
            found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: tuple(points.values()) for name, points in found.items()}


def _origin(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
    return f"{package} ({point.value})"
