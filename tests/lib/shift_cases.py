"""What `shift_to_slots` must do, token by token in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Shift = Callable[..., None]


def check_shift(shift: Shift, counts: list[int], *, seed: int = 0, device: str = "cpu") -> None:
    """``counts`` are the tokens of each request in this step; buffers are longer than that, and keep their tails."""
    rng = np.random.default_rng(seed)
    evicted = rng.integers(0, 50, len(counts)) * rng.integers(0, 2, len(counts))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(starts[-1])
    lengths = evicted + np.asarray(counts, np.int64) + rng.integers(0, 100, len(counts))
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)] or [[]])

    def there(x: object, dtype: torch.dtype, tail: int = 0) -> torch.Tensor:
        return torch.tensor([*np.asarray(x).tolist(), *[-7] * tail], dtype=dtype, device=device)

    seq_lens, logical = there(lengths, torch.int32, 4), there([0] * len(counts), torch.int32, 4)
    physical = there([0] * total, torch.int64, 5)
    shift(
        there(evicted, torch.int32),
        there(starts, torch.int32),
        there(positions, torch.int64, 5),
        seq_lens,
        physical,
        logical,
    )
    lost = evicted.tolist()
    assert seq_lens.tolist() == [*(int(n) - e for n, e in zip(lengths, lost, strict=True)), *[-7] * 4]
    assert logical.tolist() == [*map(int, lengths), *[-7] * 4]
    want = [int(p) - e for i, e in enumerate(lost) for p in positions[starts[i] : starts[i + 1]]]
    assert physical.tolist() == [*want, *[-7] * 5]
