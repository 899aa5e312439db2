"""A small transformer on a paged cache, in float64 and one row at a time, that notes which token each query reads.

It stands for an engine's chunked prefill: all new K and V of a layer are written by a slot mapping (-1: not written),
then query i of a chunk of c tokens reads the slots [0, seq_len - c + i] of its request: causal, aligned bottom right.
Each row is computed by itself, so equal inputs give equal bits whatever else is in the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HEADS, DIM, VOCABULARY, LONGEST = 2, 8, 50, 256
WIDTH = HEADS * DIM


class Model:
    """Random weights, K and V in one row as in the cache; positions are added to the embedding."""

    def __init__(self, num_layers: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])

        self.num_layers = num_layers
        self.tokens, self.positions = weights(VOCABULARY, WIDTH), weights(LONGEST, WIDTH)
        self.tokens, self.positions = self.tokens * 8, self.positions * 8
        self.q, self.kv = ([weights(WIDTH, n * WIDTH) * s for _ in range(num_layers)] for n, s in ((1, 3.0), (2, 1.0)))
        self.o, self.up, self.down = ([weights(WIDTH, WIDTH) for _ in range(num_layers)] for _ in range(3))
        self.head = weights(WIDTH, VOCABULARY)

    def embed(self, token: int, position: int) -> Tensor:
        return self.tokens[token] + self.positions[position]

    def query(self, layer: int, x: Tensor) -> Tensor:
        return (_normed(x) @ self.q[layer]).view(HEADS, DIM)

    def key_value(self, layer: int, x: Tensor) -> Tensor:
        """``[HEADS, 2 * DIM]``: K, then V, of each head."""
        return (_normed(x) @ self.kv[layer]).view(2, HEADS, DIM).transpose(0, 1).reshape(HEADS, 2 * DIM)

    def leave(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended.reshape(WIDTH) @ self.o[layer]
        return x + torch.tanh(_normed(x) @ self.up[layer]) @ self.down[layer]

    def logits(self, x: Tensor) -> Tensor:
        return _normed(x) @ self.head


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean().sqrt()


def attend(query: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention of one query ``[HEADS, DIM]`` over rows ``[HEADS, 2 * DIM]``, and log-sum-exp ``[HEADS]``.

    Nothing to read gives zeros and -inf, as kernels do.
    """
    if not rows:
        return torch.zeros_like(query), query.new_full((HEADS,), -math.inf)
    keys, values = torch.stack(list(rows)).split(DIM, dim=-1)  # [n, HEADS, DIM]
    logits = torch.einsum("hd,nhd->hn", query, keys) / math.sqrt(DIM)
    total = logits.logsumexp(-1)
    return torch.einsum("hn,nhd->hd", (logits - total[:, None]).exp(), values), total


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over several sets of rows, from the attention over each and its log-sum-exp."""
    weights = torch.stack([total for _, total in parts]).softmax(0)
    return sum((w[:, None] * out for (out, _), w in zip(parts, weights, strict=True)), torch.zeros(()))


@dataclass
class Engine:
    """One request's paged cache.

    Attributes:
        model: computes the rows.
        table: the request's blocks.
        block_size: slots of a block.
        cache: of each layer, address -> row ``[HEADS, 2 * DIM]``; NaN where nothing was ever written.
        tags: of each layer, address -> logical position of the token whose row is there.
        slots: logical position of the token of each slot, the same in all layers.
        peak: the most slots that were ever in use.
    """

    model: Model
    table: list[int]
    block_size: int = 4
    cache: list[dict[int, Tensor]] = field(default_factory=list)
    tags: list[dict[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self.cache = [{} for _ in range(self.model.num_layers)]
        self.tags = [{} for _ in range(self.model.num_layers)]

    def address(self, slot: int) -> int:
        return self.table[slot // self.block_size] * self.block_size + slot % self.block_size

    def mapping(self, slots: Sequence[int]) -> Tensor:
        """Slot mapping, int64, for tokens that go to these slots."""
        return torch.tensor([self.address(slot) for slot in slots], dtype=torch.int64)

    def read(self, layer: int, length: int) -> tuple[list[Tensor], list[int]]:
        """The rows in slots [0, length), and whose they are; -1 where nothing was ever written."""
        where = [self.address(slot) for slot in range(length)]
        stale = torch.full((HEADS, 2 * DIM), math.nan, dtype=torch.float64)
        return (
            [self.cache[layer].get(address, stale) for address in where],
            [self.tags[layer].get(address, -1) for address in where],
        )

    def write(self, layer: int, mapping: Tensor, rows: Sequence[Tensor], positions: Sequence[int]) -> None:
        for address, row, position in zip(mapping.tolist(), rows, positions, strict=True):
            if address >= 0:
                self.cache[layer][address] = row
                self.tags[layer][address] = position

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        mappings: Sequence[Tensor],
        seq_len: int,
        nudges: Sequence[Sequence[Tensor]] | None = None,
    ) -> tuple[list[Tensor], list[list[list[int]]]]:
        """One step of a chunk on stock paged attention.

        Args:
            tokens: of the chunk.
            positions: logical, of each token.
            mappings: each layer's slot mapping.
            seq_len: what attention is told; the chunk's queries are its last.
            nudges: added to each layer's and token's K and V.

        Returns:
            The hidden states that leave the last layer, and ``[layer][query]`` whose rows were read.
        """
        hidden = [self.model.embed(token, position) for token, position in zip(tokens, positions, strict=True)]
        seen: list[list[list[int]]] = []
        self.peak = max(self.peak, seq_len)
        for layer, mapping in enumerate(mappings):
            rows = [self.model.key_value(layer, x) for x in hidden]
            if nudges is not None:
                rows = [row + nudge for row, nudge in zip(rows, nudges[layer], strict=True)]
            self.write(layer, mapping, rows, positions)
            seen.append([])
            for index, x in enumerate(hidden):
                cached, whose = self.read(layer, max(seq_len - len(hidden) + index + 1, 0))
                attended, _ = attend(self.model.query(layer, x), cached)
                hidden[index] = self.model.leave(layer, x, attended)
                seen[-1].append(whose)
        return hidden, seen

    def run_unwritten(
        self, tokens: Sequence[int], positions: Sequence[int], mappings: Sequence[Tensor], used: int
    ) -> list[Tensor]:
        """One step with an attention of our own: the chunk's K and V are read where they were computed.

        What was cached before, slots [0, used), and the chunk are attended to apart and merged. Only then are rows
        written, so they may replace what this very step reads.
        """
        hidden = [self.model.embed(token, position) for token, position in zip(tokens, positions, strict=True)]
        for layer, mapping in enumerate(mappings):
            rows = [self.model.key_value(layer, x) for x in hidden]
            cached, _ = self.read(layer, used)
            for index, x in enumerate(hidden):
                query = self.model.query(layer, x)
                attended = merge([attend(query, cached), attend(query, rows[: index + 1])])
                hidden[index] = self.model.leave(layer, x, attended)
            self.write(layer, mapping, rows, positions)
        return hidden

    def compact(self, kept: Sequence[int]) -> None:
        """Move these slots, ascending, to the front, in all layers."""
        for layer in range(self.model.num_layers):
            moved = [self.read(layer, slot + 1) for slot in kept]
            mapping = self.mapping(range(len(kept)))
            self.write(layer, mapping, [rows[-1] for rows, _ in moved], [whose[-1] for _, whose in moved])
        self.slots = [self.slots[slot] for slot in kept]

    def content(self) -> dict[int, Tensor]:
        """Logical position -> ``[layers, HEADS, 2 * DIM]`` of all slots in use."""
        rows = [self.read(layer, len(self.slots))[0] for layer in range(self.model.num_layers)]
        return {position: torch.stack([r[slot] for r in rows]) for slot, position in enumerate(self.slots)}
