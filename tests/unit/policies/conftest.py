"""Inputs for policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nitro.policies.base import ScoreInput

MakeInput = Callable[..., ScoreInput]


def _make_input(
    keys: Tensor | None = None,
    values: Tensor | None = None,
    *,
    shape: tuple[int, int, int, int] = (3, 2, 50, 8),
    positions: Tensor | None = None,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    request_key: int = 0x9F3A_0000_1234_5678,
    window: int = 8,
    seed: int = 0,
) -> ScoreInput:
    generator = torch.Generator().manual_seed(7)
    if keys is None:
        # Real keys share large offsets in some channels; without one, the distances of gravity would be too easy.
        keys = torch.randn(shape, generator=generator) + 5 * torch.randn(*shape[:2], 1, shape[3], generator=generator)
    if values is None:
        values = torch.randn(keys.shape, generator=generator)
    num_layers, num_heads, num_slots, _ = keys.shape
    if positions is None:
        positions = torch.arange(num_slots, dtype=torch.int32).expand(num_layers, num_heads, num_slots)
    return ScoreInput(
        keys=keys,
        values=values,
        positions=positions,
        layers=torch.tensor(layers if layers is not None else range(num_layers), dtype=torch.int64),
        heads=torch.tensor(heads if heads is not None else range(num_heads), dtype=torch.int64),
        request_key=request_key,
        logical_len=int(positions.max()) + 1,
        sinks=2,
        window=window,
        seed=seed,
    )


@pytest.fixture
def make_input() -> MakeInput:
    return _make_input
