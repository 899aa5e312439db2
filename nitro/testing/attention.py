"""Attention of one's own in a transformers model, for as long as it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface


def register(name: str, attend: Callable[..., tuple[Tensor, None]]) -> None:
    """Let transformers know an attention that has masks of its own, so that none is built for it."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Stands in for transformers' mask building."""


@contextmanager
def using(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model attend by the attention that was registered under this name."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
