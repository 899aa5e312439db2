"""Names of segments, and what is left of those whose engine was killed."""

from __future__ import annotations

import logging
import os
import re
import secrets

from nitro import _native

logger = logging.getLogger("nitro")


def new_engine_id() -> int:
    """A random number of 64 bits: what tells the segments of one engine from those of all others on the machine."""
    return secrets.randbits(64)


def collect_stale() -> list[str]:
    """Remove this user's segments whose engines have ended; to be called when an engine starts.

    A living engine's segment stays, also one in another container, and so does everything that is not for certain a
    segment of Nitro's, of this user: docs/bridge.md has the rules.

    Returns:
        The names of the segments that were removed.
    """
    prefix = _native.segment_name(0, 0).rsplit("-", 2)[0]
    # Anybody may put files there, under any name: one that is not even text must not keep an engine from starting.
    ours = re.compile(re.escape(prefix) + "-[0-9a-f]{16}-[0-9]{1,10}")
    try:
        names = sorted(filter(ours.fullmatch, os.listdir(_native.SHARED_MEMORY)))
    except OSError as error:
        logger.debug("no old segments are looked for: %s", error)  # who makes one will be told what is wrong
        return []
    removed = [name for name in names if _native.remove_if_stale(name)]
    if removed:
        logger.info("removed from %s what ended engines had left there: %s", _native.SHARED_MEMORY, ", ".join(removed))
    return removed
