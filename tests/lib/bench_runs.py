"""Runs as an engine of `nitro bench explain` would have measured them."""

from __future__ import annotations

from typing import Any

from nitro.bench.recorder import COUNTS, SECTIONS


def make_run(name: str, number: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """A run of 16 tokens whose steps take 0.9 of its time, half of that in the scheduler."""
    count = 8
    columns: dict[str, list[float]] = {count_name: [1] * count for count_name in COUNTS}
    columns |= {"seconds": [0.9 * seconds / count] * count, "requests": [1, 2, 3, 4, 5, 6, 7, 8]}
    columns |= {f"{section}_s": [0.0] * count for section in SECTIONS}
    columns["scheduler_s"] = [0.45 * seconds / count] * count
    nothing: dict[str, list[float]] = {"steps": [], "ms": []}
    return {
        "session": 0,
        "load": "2 x (8 + 8)",
        "engine": name,
        "round": number,
        "copy_bytes_per_s": 1e9,
        "seconds": seconds,
        "tokens_per_s": 16 / seconds,
        "peak_blocks": 7,
        "peak_running": 2,
        "mean_running": 1.5,
        "preemptions": 1,
        "steps": count,
        "evictions": 3,
        "series": {"time_s": [0.5], "running": [2], "blocks": [7], "preemptions": [1], "tokens": [10]},
        "recording": {"columns": columns, "device": {"forward": nothing, "attention": nothing}},
    } | changes
