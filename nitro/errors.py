"""The errors that Nitro raises on purpose. Every message names the value, the bound and the remedy."""

from __future__ import annotations


class NitroError(Exception):
    """Base class of all errors that Nitro raises on purpose."""


class SettingsError(NitroError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class UnsupportedError(NitroError, ValueError):
    """vLLM is configured with something that Nitro cannot serve correctly (yet)."""


class IntegrityError(NitroError, RuntimeError):
    """The block ledger contradicts itself: a bug in Nitro, never the user's fault."""


class BridgeError(NitroError, RuntimeError):
    """The bridge between worker and scheduler cannot be made, opened or used: the message names the file and why."""


class ModelFetchError(NitroError, RuntimeError):
    """A model or text for the demo could not be fetched, or its checksum is wrong."""


class WatchError(NitroError, RuntimeError):
    """A server's metrics cannot be had, or are not those of vLLM with Nitro: the message names the address and why."""
