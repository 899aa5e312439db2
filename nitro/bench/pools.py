"""How many blocks a pool has: a number, a size, a card's worth, or as many as the load needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nitro.bench.shapes import Model
from nitro.capacity.cards import card_named
from nitro.capacity.pool import UTILISATION, blocks_of
from nitro.errors import SettingsError

CARDS = {name: int(card_named(name).memory_gb * 10**9) for name in ("l4",)}
"""Memory by NVIDIA's datasheet, in bytes, of the cards for which the reserve below was measured."""
ACTIVATION_RESERVE = 3_053_000_000
"""What vLLM keeps beside weights and cache: activations of its profile run, CUDA graphs, the context.

Chosen such that Qwen2.5-0.5B in bf16 gets the 91,750 blocks of 16 that vLLM gave it on an L4. That one measurement is
all there is: for other models it is a guess, and grows in truth with their vocabulary and hidden size.
"""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", re.IGNORECASE)
_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}


@dataclass(frozen=True)
class Pool:
    """A pool as the user asked for it.

    Attributes:
        text: what was asked for.
        blocks: its blocks for an engine without Nitro, with KV numbers of the model's own size.
        literal: whether blocks were asked for. Otherwise memory was, and Nitro pays for what it keeps beside the cache.
    """

    text: str
    blocks: int
    literal: bool


def needed_blocks(requests: int, tokens: int, block_size: int) -> int:
    """Return the blocks that so many requests of so many tokens need at once, and the null block."""
    return requests * (-(-tokens // block_size) + 1) + 1


def card_bytes(card: str, weights: int) -> int:
    """Return what vLLM would give to the cache on a card: ``memory × utilization − weights − reserve``.

    Raises:
        SettingsError: the weights leave nothing.
    """
    left = int(CARDS[card] * UTILISATION) - weights - ACTIVATION_RESERVE
    if left <= 0:
        raise SettingsError(
            f"pool={card}: weights of {weights / 1e9:.1f} GB leave nothing of its {CARDS[card] / 1e9:.0f} GB for a "
            "cache: take a smaller model, or another pool"
        )
    return left


def parse(text: str, model: Model, *, block_size: int, itemsize: int, requests: int, tokens: int) -> Pool:
    """Return the pool that a user asked for.

    Args:
        text: ``full``, a card's name, a size such as ``40GiB``, or a number of blocks.
        model: what is served.
        block_size: tokens of a block.
        itemsize: bytes of a number of weights and cache.
        requests: how many there are at once.
        tokens: the most tokens of one of them.

    Raises:
        SettingsError: it is none of these, or holds less than one request.
    """
    block_bytes = block_size * model.kv_bytes(itemsize)
    asked, least = text.strip().lower(), needed_blocks(1, tokens, block_size)
    if asked == "full":
        return Pool(asked, needed_blocks(requests, tokens, block_size), literal=True)
    if asked in CARDS:
        pool = Pool(asked, card_bytes(asked, itemsize * model.parameters()) // block_bytes, literal=False)
    elif asked.isdecimal():
        pool = Pool(asked, int(asked), literal=True)
    elif size := _SIZE.fullmatch(asked):
        pool = Pool(asked, int(float(size[1]) * _UNITS[size[2].lower()]) // block_bytes, literal=False)
    else:
        raise SettingsError(
            f"pool={text!r} is no pool: give a number of blocks (91750), a size (40GiB), a card ({', '.join(CARDS)}), "
            "or full"
        )
    if pool.blocks < least:
        raise SettingsError(
            f"pool={text} is {pool.blocks} blocks of {block_size} tokens, below the {least} that one request of "
            f"{tokens} tokens needs: give a larger pool, or shorter requests"
        )
    return pool


def nitro_blocks(blocks: int, model: Model, *, block_size: int, itemsize: float) -> int:
    """Return the blocks left to Nitro in memory that holds ``blocks`` without it, on a GPU.

    It is what the planner counts, too (`nitro.capacity.pool.blocks_of`).
    """
    cached = block_size * model.kv_bytes(itemsize)
    return blocks_of(blocks * cached, cached, beside=block_size * model.position_bytes())
