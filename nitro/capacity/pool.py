"""The block pool that vLLM makes of a card's memory, and what a request takes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nitro.capacity.cards import GIB
from nitro.errors import SettingsError

if TYPE_CHECKING:
    from nitro.capacity.shapes import Shape

UTILISATION = 0.92
"""vLLM's default of ``gpu_memory_utilization`` (``CacheConfig``, 0.26 to 0.32)."""
CONTEXT_GIB = 0.5
"""A guess: CUDA graphs, workspaces of libraries, and what the allocator cannot use."""
SCRATCH_BYTES = 256 * 2**20
"""As in ``nitro.kernel_compactor``, which imports torch; a test compares them."""
POSITION_BYTES = 4


def cdiv(number: int, by: int) -> int:
    """Return ``number / by``, rounded up, as vLLM counts blocks."""
    return -(-number // by)


@dataclass(frozen=True, slots=True)
class Layout:
    """How vLLM divides a model's layers into groups with block tables of their own, and what a block holds.

    Layers that attend to everything and layers with a window are cut into groups of as many layers
    (``kv_cache_utils._get_kv_cache_groups_uniform_page_size``): as many as the rarer kind has, or the more frequent
    one if that is less than one and a half times as frequent.

    Attributes:
        block_size: tokens of a block.
        block_bytes: of a block in all layers of its group, on one GPU.
        slot_heads: KV heads of a slot in all layers of its group, on one GPU.
        full_groups: groups that hold all tokens of a request.
        sliding_groups: groups that hold a window of them.
        window: tokens of that window.
    """

    block_size: int
    block_bytes: int
    slot_heads: int
    full_groups: int
    sliding_groups: int = 0
    window: int = 0

    @classmethod
    def of(cls, shape: Shape, *, block_size: int, kv_bytes: float, tensor_parallel: int) -> Layout:
        """Return the layout of a model.

        Args:
            shape: the model's.
            block_size: tokens of a block.
            kv_bytes: of a number in the cache.
            tensor_parallel: GPUs over which KV heads are divided; each has at least one (``get_num_kv_heads``).

        Raises:
            SettingsError: the heads cannot be divided by that.
        """
        kv_heads = max(1, shape.kv_heads // tensor_parallel)
        if shape.heads % tensor_parallel or (shape.kv_heads % tensor_parallel and tensor_parallel % shape.kv_heads):
            raise SettingsError(
                f"tensor_parallel={tensor_parallel} does not divide {shape.heads} query heads and {shape.kv_heads} KV "
                "heads evenly: use a divisor of both"
            )
        full, sliding = shape.layers - shape.sliding, shape.sliding
        least, most = min(full or sliding, sliding or full), max(full, sliding)
        layers = most if most < 1.5 * least else least
        numbers = shape.latent or 2 * kv_heads * shape.head_dim
        return cls(
            block_size=block_size,
            block_bytes=int(block_size * layers * numbers * kv_bytes),
            slot_heads=layers * kv_heads,
            full_groups=cdiv(full, layers),
            sliding_groups=cdiv(sliding, layers),
            window=shape.window or 0,
        )

    def blocks(self, slots: int, new: int = 1) -> int:
        """Return the blocks of a request.

        Args:
            slots: that it holds where all its tokens are attended to.
            new: how many of them came in this step: a window is freed afterwards, and may begin within a block
                (``SlidingWindowSpec.max_admission_blocks_per_request``).
        """
        full = cdiv(slots, self.block_size)
        if not self.sliding_groups:
            return self.full_groups * full
        windowed = min(full, cdiv(self.window - 1 + new, self.block_size) + 1)
        return self.full_groups * full + self.sliding_groups * windowed

    def read_slots(self, slots: float) -> float:
        """Return the slots that one decoded token attends to, in the mean over the layers' groups."""
        groups = self.full_groups + self.sliding_groups
        return (self.full_groups * slots + self.sliding_groups * min(slots, self.window)) / groups

    @property
    def slot_bytes(self) -> int:
        """Return what a token takes on one GPU where all layers hold it, in bytes."""
        return self.block_bytes // self.block_size * (self.full_groups + self.sliding_groups)


def guessed_reserve(shape: Shape, *, max_batched: int, max_seqs: int) -> int:
    """Return what a GPU needs beside weights and cache, in bytes. A guess: vLLM measures it in a run with dummies.

    The larger of two peaks, and ``CONTEXT_GIB``: a step of ``max_batched`` tokens in bf16 (four times the hidden
    channels and three times those of an MLP), and the logits of ``max_seqs`` rows in fp32, which the sampler holds
    twice.
    """
    step = 2 * max_batched * (4 * shape.hidden + 3 * shape.intermediate)
    logits = 2 * 4 * min(max_seqs, max_batched) * shape.vocab
    return int(CONTEXT_GIB * GIB) + max(step, logits)


def weight_bytes(shape: Shape, bits: float | None, tensor_parallel: int) -> int:
    """Return what the weights take on one GPU, in bytes.

    Embedding and output's head are taken as bf16 whatever the layers are, as quantised models usually have them;
    without ``bits``, the size of the folder's safetensors counts, if there are any.

    Raises:
        SettingsError: the model is quantised and nobody says to how many bits.
    """
    if bits is None and shape.file_bytes is not None:
        return cdiv(shape.file_bytes, tensor_parallel)
    bits = bits if bits is not None else shape.weight_bits
    if bits is None:
        raise SettingsError(
            f"{shape.name}: quantization_config does not say how many bits a weight has: pass --weight-bits"
        )
    parameters = shape.parameters
    layers = parameters.dense + parameters.experts
    return math.ceil((layers * bits / 8 + 2 * (parameters.total - layers)) / tensor_parallel)


def pool_blocks(total: int, utilisation: float, used: int, layout: Layout, *, nitro: bool) -> int:
    """Return the blocks of the pool.

    vLLM gives the cache ``ceil(total * gpu_memory_utilization) - weights - what a dummy run needed``
    (``Worker.determine_available_memory``) and makes ``available // block_bytes`` blocks of it
    (``get_kv_cache_config_from_groups``). Nitro takes its scratch off first, and an int32 for each slot of each layer
    and KV head (``NitroGPUWorker.determine_available_memory``).

    Args:
        total: memory that CUDA reports, in bytes.
        utilisation: ``gpu_memory_utilization``.
        used: weights and reserve, in bytes.
        layout: of the model's cache.
        nitro: whether Nitro is on.
    """
    available = math.ceil(total * utilisation) - used
    beside = POSITION_BYTES * layout.block_size * layout.slot_heads if nitro else None
    return blocks_of(available, layout.block_bytes, beside=beside)


def blocks_of(available: int, block_bytes: int, *, beside: int | None = None) -> int:
    """Return the blocks that fit into memory.

    Args:
        available: bytes for the cache and what Nitro keeps beside it.
        block_bytes: of a block.
        beside: what Nitro keeps for a block beside it, in bytes; None without Nitro, which takes its scratch, too.
    """
    if beside is not None:
        available -= SCRATCH_BYTES
    return max(available // (block_bytes + (beside or 0)), 0)
