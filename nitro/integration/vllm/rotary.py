"""Find out how RoPE rotated the keys of each layer, from the model's own rotary embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from nitro.policies.rotary import Rotation, Rotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_ROUNDING = 16  # units in the last place that a rotation and its inverse may differ by


def find_rotations(model: nn.Module, names: Sequence[str], dtype: torch.dtype, rotates: bool) -> Rotations:
    """Return how the keys of these layers were rotated.

    Whether a rotation can be undone is tried out: the model's own embedding rotates random keys, and its table has to
    give them back. So all variants can be that only change the table: partial, scaled, NTK, YaRN, interleaved.

    Args:
        model: the loaded model.
        names: of its attention layers, as vLLM's ``static_forward_context`` has them.
        dtype: of its keys.
        rotates: whether the model's configuration speaks of RoPE.
    """
    embeddings = [_embedding_of(model, name) for name in names]
    known: dict[int, tuple[Rotation | None, str | None]] = {}
    layers: list[Rotation | None] = []
    problems: dict[str, None] = {}
    for name, embedding in zip(names, embeddings, strict=True):
        if embedding is None:
            layers.append(None)
            if rotates:
                problems[f"{name} has no rotary embedding of its own that vLLM shows"] = None
            continue
        if id(embedding) not in known:
            known[id(embedding)] = _try(embedding, dtype)
        rotation, problem = known[id(embedding)]
        layers.append(rotation)
        if problem is not None:
            problems[problem] = None
    return Rotations(tuple(layers), "; ".join(problems) or None)


def speaks_of_rope(model_config: Any) -> bool:
    """Return whether a model's configuration has any of RoPE's parameters."""
    text = getattr(model_config, "hf_text_config", None)
    return any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim"))


def _embedding_of(model: nn.Module, name: str) -> RotaryEmbeddingBase | None:
    """Return the rotary embedding beside an attention layer, which it shares with no other module's children."""
    try:
        parent = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # the layer's name is not its place in the model
        return None
    found = [child for child in parent.children() if isinstance(child, RotaryEmbeddingBase)]
    return found[0] if len(found) == 1 else None


def _try(embedding: RotaryEmbeddingBase, dtype: torch.dtype) -> tuple[Rotation | None, str | None]:
    """Return a rotation that undoes what the embedding does, or why there is none."""
    kind = type(embedding).__name__
    table = getattr(embedding, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or not _is_table(table, embedding.head_size, embedding.rotary_dim):
        return None, f"{kind} has no table of cosines and sines for each position"
    rotation = Rotation(table, not embedding.is_neox_style)
    try:
        error = _error(embedding, rotation, dtype)
    except Exception as problem:  # other versions' embeddings may want to be called otherwise
        return None, f"{kind} could not be tried out ({type(problem).__name__}: {problem})"
    if not error <= _ROUNDING * torch.finfo(dtype).eps:
        return None, f"{kind} does more than its table says"
    return rotation, None


def _is_table(table: Tensor, head_size: int, rotary_dim: int) -> bool:
    """Return whether this is what the kernels take as a table for such keys."""
    even = rotary_dim % 2 == 0 and head_size % 2 == 0 and rotary_dim <= head_size
    plain = table.ndim == 2 and table.is_contiguous() and table.is_floating_point()
    return even and plain and table.shape[1] == rotary_dim


@torch.inference_mode()
def _error(embedding: RotaryEmbeddingBase, rotation: Rotation, dtype: torch.dtype) -> float:
    """Return how far keys are from what they were, rotated by the embedding and back, relative to the largest."""
    table: Tensor = rotation.cos_sin
    last = len(table) - 1
    positions = torch.tensor([0, 1, min(7, last), last // 2, last], device=table.device)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(len(positions), embedding.head_size, generator=generator).to(table.device, dtype)
    _, rotated = embedding.forward_native(positions, keys.clone(), keys.clone())
    undone = rotation.undo(rotated, positions.to(torch.int32))
    return float((undone - keys.float()).abs().max() / keys.float().abs().max())
