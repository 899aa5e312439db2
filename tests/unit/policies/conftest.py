"""Inputs for policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nitro.policies.base import ScoreInput
from nitro.policies.rotary import Rotation

MakeInput = Callable[..., ScoreInput]


def make_rotation(length: int, dim: int, *, interleaved: bool = False, rotary: int | None = None) -> Rotation:
    """Return the rotation of plain RoPE with theta 100."""
    rotary = dim if rotary is None else rotary
    angles = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    return Rotation(torch.cat([angles.cos(), angles.sin()], dim=-1), interleaved)


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
    rotations: tuple[Rotation | None, ...] = ()
    if (dim := keys.shape[3]) % 2 == 0 and (last := int(positions.max())) < 4096:
        kinds = (make_rotation(last + 1, dim), make_rotation(last + 1, dim, interleaved=True), None)
        rotations = tuple(kinds[layer % 3] for layer in range(num_layers))
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
        rotations=rotations,
    )


@pytest.fixture
def make_input() -> MakeInput:
    return _make_input
