"""Nitro's proof of correctness: an oracle that shares no code with the engine, and what it needs.

`Recording` merges what the engine's ranks recorded about their evictions; `check_recording` compares every generated
token with a masked transformers model; `assert_pool_whole` shows that no block was lost. `make_tiny_model` writes
models under which a wrong eviction shows, and `NaiveDecoder` (in `nitro.testing.naive`) checks the oracle itself.
"""

from __future__ import annotations

from nitro.testing.masked import masked_logits
from nitro.testing.models import Arch, load_model, make_tiny_model
from nitro.testing.oracle import check_recording, check_request
from nitro.testing.pool import PoolState, assert_pool_whole
from nitro.testing.recording import Recording, check_records
from nitro.testing.report import Generated, Mismatch, Report
from nitro.testing.visibility import Visibility

__all__ = [
    "Arch",
    "Generated",
    "Mismatch",
    "PoolState",
    "Recording",
    "Report",
    "Visibility",
    "assert_pool_whole",
    "check_recording",
    "check_records",
    "check_request",
    "load_model",
    "make_tiny_model",
    "masked_logits",
]
