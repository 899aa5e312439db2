"""What pooling makes of a request's values, from recorded keep sets and the model's own keys: for the oracle.

Shares no code with the engine's pooling: token by token, from its definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nitro.pooling import Merging
from nitro.types import KeepRecord


@dataclass(frozen=True, slots=True)
class Folding:
    """Values of one run of one request, epoch by epoch.

    Attributes:
        merging: how the engine merges.
        sinks: first tokens, which take nothing.
        records: the run's, in order, without tensor parallelism.
        length: tokens fed to the model, T.
    """

    merging: Merging
    sinks: int
    records: Sequence[KeepRecord]
    length: int

    def epochs(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which queries see which values.

        Args:
            layer: index of the layer.
            keys: ``[H, T, D]``, after RoPE.
            values: ``[H, T, D]``.
        """
        values, masses, start = values.clone(), torch.ones(keys.shape[:2]), 0
        held = [torch.arange(0)] * len(keys)
        for record in self.records:
            if record.logical_len >= self.length:
                break
            yield slice(start, record.logical_len), values
            values = values.clone()
            new = torch.arange(start, record.logical_len)
            start = record.logical_len
            for head, kept in enumerate(record.kept[layer]):
                there = torch.cat([held[head], new])
                held[head] = torch.from_numpy(kept).long()
                self._fold(there, held[head], keys[head], values[head], masses[head])
        yield slice(start, self.length), values

    def _fold(self, there: Tensor, stays: Tensor, keys: Tensor, values: Tensor, masses: Tensor) -> None:
        """Fold those of ``there`` that do not stay into those that do: values ``[T, D]`` and masses ``[T]``."""
        takers = stays[stays >= self.sinks]
        gone = there[~torch.isin(there, stays)]
        if not len(takers) or not len(gone):
            return
        cosines = torch.cosine_similarity(keys[gone, None], keys[None, takers], dim=-1)
        near, which = cosines.max(dim=1)
        for taker, token in enumerate(takers.tolist()):
            own = gone[(which == taker) & (near >= self.merging.least)]
            if len(own):
                weight = self.merging.own + masses[token] - 1
                added = masses[own].sum()
                total = weight * values[token] + (masses[own, None] * values[own]).sum(0)
                values[token] = total / (weight + added)
                masses[token] = (masses[token] + added).clamp_max(self.merging.most)
