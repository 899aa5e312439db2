"""Scores of all requests that are evicted in one step, straight from the paged caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nitro.kernels import score
from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.policies.base import ScoreInput

if TYPE_CHECKING:
    from nitro.policies.base import Policy
    from nitro.policies.rotary import Rotation

SCRATCH_BYTES = 256 * 2**20
"""How much gathered K and V ``score_densely`` may hold; layers are taken in groups that stay below it."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedInput:
    """The cached tokens of the requests that are evicted in one step, on one worker.

    R is the number of requests, L of layers, H of KV heads. Slots may be in any order, `positions` tells which.

    Attributes:
        layers: the caches; keys after RoPE, as cached, so FP8 still to be multiplied with ``layers.scales``.
        batch: the requests; ragged arrays are ``[L, H, batch.total]``.
        positions: int32 ``[L, num_blocks, H, block_size]``, logical position of each slot of these requests.
        layer_ids: int64 ``[L]``, index of each layer in the whole model, not among this worker's layers.
        head_ids: int64 ``[H]``, index of each KV head in the whole model, not among this worker's heads.
        request_keys: ``[R]``, unsigned 64-bit hash of each user-visible request id.
        lengths: ``[R]``, slots of each request: ``batch.lengths`` on the host.
        logical_lens: ``[R]``, tokens of each request computed so far, counting evicted ones.
        logical_lengths: int32 ``[R]``, the same on the caches' device.
        newest_last: the last ``batch.window`` slots of each request are its newest tokens, in order.
        sinks: the first slots of each request stay whatever their score.
        seed: ``0 <= seed < 2**63``.
        rotations: how RoPE rotated the keys, one a layer; see ``ScoreInput``.
    """

    layers: PagedLayers
    batch: RaggedBatch
    positions: Tensor
    layer_ids: Tensor
    head_ids: Tensor
    request_keys: Sequence[int]
    lengths: Sequence[int]
    logical_lens: Sequence[int]
    logical_lengths: Tensor
    newest_last: bool
    sinks: int
    seed: int
    rotations: tuple[Rotation | None, ...] = ()

    def order(self) -> Tensor:
        """Return the slots in logical order, int32 ``[L, H, total]``."""
        return score.logical_order(self.layers, self.batch, self.positions)

    def window_order(self) -> Tensor | None:
        """Return the slots in logical order, int32 ``[L, H, total]``; None where the window is in its place anyway."""
        return None if self.newest_last else self.order()

    def new_scores(self) -> Tensor:
        """Return memory for scores, float32 ``[L, H, total]``."""
        shape = (self.layers.num_layers, self.layers.num_kv_heads, self.batch.total)
        return torch.empty(shape, dtype=torch.float32, device=self.layers.device)


def score_densely(policy: Policy, x: RaggedInput, call: Callable[[Policy, ScoreInput], Tensor]) -> Tensor:
    """Score one request after the other with ``policy.score``, from gathered K and V in logical order.

    Args:
        policy: has no kernel of its own.
        x: what to score.
        call: scores one request; `checked_score`.

    Returns:
        float32 ``[L, H, total]``.
    """
    layers, size = x.layers, x.layers.block_size
    out = x.new_scores()
    first = 0
    for request, length in enumerate(x.lengths):
        table = x.batch.block_tables[request]
        slots = torch.arange(length, device=layers.device)
        blocks = table[slots // size].long()
        group = max(1, SCRATCH_BYTES // max(2 * 4 * layers.num_kv_heads * layers.head_dim * length, 1))
        for start in range(0, layers.num_layers, group):
            stop = min(start + group, layers.num_layers)
            where, order = x.positions[start:stop, blocks, :, slots % size].permute(1, 2, 0).sort(dim=-1)
            rows = torch.stack([layers.numbers(layer, table, length) for layer in range(start, stop)])
            rows = rows.gather(2, order.unsqueeze(-1).expand_as(rows))
            keys, values = rows[..., : layers.head_dim], rows[..., layers.head_dim :]
            found = call(
                policy,
                ScoreInput(
                    keys=keys,
                    values=values,
                    positions=where,
                    layers=x.layer_ids[start:stop],
                    heads=x.head_ids,
                    request_key=x.request_keys[request],
                    logical_len=x.logical_lens[request],
                    sinks=x.sinks,
                    window=x.batch.window,
                    seed=x.seed,
                    rotations=x.rotations[start:stop],
                ),
            )
            out[start:stop, :, first : first + length].scatter_(2, order, found)
        first += length
    return out
