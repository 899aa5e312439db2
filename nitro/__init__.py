"""Nitro evicts, compacts and frees the KV cache of running requests inside stock vLLM.

Importing this package neither imports torch or vLLM nor touches a GPU.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nitro.config import Settings
from nitro.errors import IntegrityError, NitroError, SettingsError, UnsupportedError
from nitro.types import Counters

try:
    __version__ = version("nitro-kv")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+unknown"

__all__ = [
    "Counters",
    "IntegrityError",
    "NitroError",
    "Settings",
    "SettingsError",
    "UnsupportedError",
    "__version__",
    "vllm_config",
]


def vllm_config(**settings: Any) -> dict[str, dict[str, Any]]:
    """Return the value for vLLM's ``additional_config`` that switches Nitro on, validated.

    Example:
        ``LLM(model, additional_config=nitro.vllm_config(policy="keydiff", budget=512))``

    Raises:
        SettingsError: a key is unknown, has the wrong type, or contradicts another one.
    """
    return {"nitro": Settings.parse(settings).to_dict()}
