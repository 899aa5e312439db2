"""How long the GPU takes for a step's forward pass, and for its attention: by CUDA events that nothing waits for.

Events are only recorded while an engine runs, and read when the run is over. A full CUDA graph is one launch, so that
attention shows only in steps that call it one layer after the other (piecewise graphs, or none), and only in some of
them: two events for each layer take time of the host.
"""

from __future__ import annotations

import functools
from typing import Any

from nitro.bench.recorder import Recorder

ATTENTION_EVERY = 16
"""One step in so many has events around each layer's attention."""


class DeviceTimes:
    """Events of one run: (step, before, after)."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self._forward: list[tuple[int, Any, Any]] = []
        self._attention: list[tuple[int, Any, Any]] = []

    def wrap_forward(self, owner: Any, name: str, recorder: Recorder) -> None:
        """Record events around each call of a method that launches a forward pass; nothing if there is none."""
        self._wrap(owner, name, recorder, attention=False)

    def wrap_attention(self, owner: Any, name: str, recorder: Recorder) -> None:
        """Record events around a layer's attention in one step of ``ATTENTION_EVERY``."""
        self._wrap(owner, name, recorder, attention=True)

    def _wrap(self, owner: Any, name: str, recorder: Recorder, *, attention: bool) -> None:
        import torch

        original = getattr(owner, name, None)
        if original is None:
            return
        every = ATTENTION_EVERY if attention else 1

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if recorder.index < 0 or recorder.index % every or torch.cuda.is_current_stream_capturing():
                return original(*args, **kwargs)
            before, after = cuda_event(), cuda_event()
            before.record()
            result = original(*args, **kwargs)
            after.record()
            (self._attention if attention else self._forward).append((recorder.index, before, after))
            return result

        setattr(owner, name, watched)

    def take(self) -> dict[str, Any]:
        """Return milliseconds by step: ``forward`` and ``attention``, each ``{"steps": [...], "ms": [...]}``."""
        if self._forward or self._attention:
            import torch

            torch.cuda.synchronize()  # the run is over
        found = {"forward": _by_step(self._forward), "attention": _by_step(self._attention)}
        self.begin()
        return found


def cuda_event() -> Any:
    """Return an event that can be timed."""
    import torch

    make: Any = torch.cuda.Event  # torch does not annotate it
    return make(enable_timing=True)


def _by_step(events: list[tuple[int, Any, Any]]) -> dict[str, list[float]]:
    sums: dict[int, float] = {}
    for step, before, after in events:
        sums[step] = sums.get(step, 0.0) + float(before.elapsed_time(after))
    return {"steps": list(sums), "ms": [round(value, 4) for value in sums.values()]}
