"""What kernels are told about paged caches and about the requests of one engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nitro.kernels.fp8 import checked_scales, dequantised
from nitro.kernels.tables import Tables, int32

_Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]

VECTOR_BYTES = 16
"""The widest load of one thread; a cache whose rows start on such a boundary is moved in words of that width."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayers:
    """The paged caches of all layers of one worker, alike in everything but their address.

    A cache is logically ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``: K and V of a slot lie side by side,
    as in vLLM's GPU cache. NHD and HND differ in the strides only.

    Attributes:
        base: int64 ``[num_layers]`` on the caches' device: the address of each cache's first element.
        caches: the caches themselves; keeps their memory alive, and is what references read.
        strides: in elements: from block to block, head to head, slot to slot, and along a slot's K and V.
        aligned: every row of K and V starts at a multiple of ``VECTOR_BYTES`` and is contiguous.
        scales: of FP8 caches, float32 ``[num_layers, 2, num_kv_heads]`` on their device: what K (0) and V (1) are to
            be multiplied with. None of others.
    """

    base: Tensor
    caches: tuple[Tensor, ...] = field(repr=False)
    strides: tuple[int, int, int, int]
    aligned: bool
    scales: Tensor | None = None

    @classmethod
    def of(cls, caches: Sequence[Tensor] | Tensor, scales: Tensor | None = None) -> PagedLayers:
        """Describe these caches, one a layer. Copies their addresses to their device: call it once, not every step.

        Args:
            caches: of each layer. Bytes that stand for FP8 numbers have to be viewed as such.
            scales: of FP8 caches; default: all are 1.

        Raises:
            TypeError: if their elements have not 1, 2 or 4 bytes, they are one tensor, or scales are given for other
                dtypes than FP8, or are no float32.
            ValueError: if there is none, they are no caches, or they are not alike, or scales have another shape or
                device.
        """
        if isinstance(caches, Tensor):
            raise TypeError("caches is one tensor: pass a list with the cache of each layer")
        if not caches:
            raise ValueError("caches is empty: pass one cache for each layer")
        first = caches[0]
        if first.ndim != 4 or first.shape[3] % 2 or not first.numel():
            raise ValueError(
                "a cache must be [num_blocks, num_kv_heads, block_size, 2 * head_dim] and not empty, with K and V of a "
                f"slot side by side, got {list(first.shape)}: pass such a view of it"
            )
        if first.itemsize not in (1, 2, 4):
            raise TypeError(f"a cache must have elements of 1, 2 or 4 bytes, got {first.dtype}")
        want = _layout(first)
        for layer, cache in enumerate(caches):
            if (got := _layout(cache)) != want:
                raise ValueError(
                    f"layer {layer} has (shape, strides, dtype, device) {got} where layer 0 has {want}: "
                    "describe layers that differ by several PagedLayers"
                )
        addresses = [cache.data_ptr() for cache in caches]
        block, head, slot, dim = first.stride()
        steps = (*addresses, *(step * first.itemsize for step in (block, head, slot)))
        return cls(
            base=torch.tensor(addresses, dtype=torch.int64).to(first.device),
            caches=tuple(caches),
            strides=(block, head, slot, dim),
            aligned=dim == 1 and not any(step % VECTOR_BYTES for step in steps),
            scales=checked_scales(scales, first, len(caches)),
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.caches)

    @property
    def num_blocks(self) -> int:
        """Blocks in each layer's cache."""
        return self.caches[0].shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.caches[0].shape[1]

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.caches[0].shape[2]

    @property
    def head_dim(self) -> int:
        """D; a slot of one head has D elements of K, then D of V."""
        return self.caches[0].shape[3] // 2

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        return self.caches[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self.caches[0].device

    def part(self, start: int, stop: int) -> PagedLayers:
        """Return the layers ``[start, stop)``; an even ``start`` keeps ``base`` at a multiple of ``VECTOR_BYTES``."""
        scales = None if self.scales is None else self.scales[start:stop]
        return PagedLayers(self.base[start:stop], self.caches[start:stop], self.strides, self.aligned, scales)

    def rows(self, layer: int, block_table: Tensor, length: int) -> Tensor:
        """Gather one request's K and V of one layer: a new tensor ``[num_kv_heads, length, 2 * head_dim]``.

        Args:
            layer: index among ``caches``.
            block_table: int ``[>= ceil(length / block_size)]``, the request's blocks.
            length: slots.
        """
        slots = torch.arange(length, device=block_table.device)
        blocks = block_table[slots // self.block_size].to(torch.int64)
        return self.caches[layer][blocks, :, slots % self.block_size].transpose(0, 1)

    def numbers(self, layer: int, block_table: Tensor, length: int) -> Tensor:
        """Gather what ``rows`` does; FP8 as float32, multiplied with its scales."""
        rows = self.rows(layer, block_table, length)
        return rows if self.scales is None else dequantised(rows, self.scales[layer])


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """The requests that lose tokens in one engine step. All tensors are on the caches' device.

    The slots of all requests stand one after the other in *ragged* arrays ``[num_layers, num_kv_heads, total]``
    (scores, keep masks): slot i of request r is column ``offsets[r] + i``. What only the device knows is never read
    back, so the bounds stated below are the caller's duty; ``of`` checks them while the numbers are on the host.

    Attributes:
        block_tables: int32 ``[R, max_blocks]``, contiguous; a row's first ceil(length / block_size) entries are read.
        lengths: int32 ``[R]``, physical length before the eviction.
        keep: int32 ``[R]``, or ``[R, L, H]`` where layers and KV heads differ: slots that stay;
            ``min(protect + window, length) <= keep <= length``.
        protect: int32 ``[R]``, first slots that stay.
        offsets: int64 ``[R + 1]``, exclusive prefix sum of ``lengths``.
        window: last slots of each request that stay.
        max_length: at least the largest of ``lengths``; only sizes grids and tables.
        total: the sum of ``lengths``, i.e. columns of a ragged array.
        dst_tables: int32 ``[R, max_dst_blocks]``, contiguous: where survivors go; ``block_tables`` when in place.
        min_block_size: what ``block_size`` must at least be, or a row of ``block_tables`` is too short.
        min_dst_block_size: likewise of ``dst_tables``, for ``keep`` slots.
        max_block: the highest block of both tables, as far as the host knows.
    """

    block_tables: Tensor
    lengths: Tensor
    keep: Tensor
    protect: Tensor
    offsets: Tensor
    window: int
    max_length: int
    total: int
    dst_tables: Tensor
    min_block_size: int = 1
    min_dst_block_size: int = 1
    max_block: int = 0

    def __post_init__(self) -> None:
        """Check dtypes, shapes and devices, never contents.

        Raises:
            TypeError: a tensor has the wrong dtype.
            ValueError: a tensor has the wrong shape or device or is not contiguous, or an integer is negative.
        """
        requests = self.lengths.shape[0] if self.lengths.ndim else -1
        for name, shape, dtype in (
            ("lengths", (requests,), torch.int32),
            ("block_tables", (requests, -1), torch.int32),
            ("dst_tables", (requests, -1), torch.int32),
            ("keep", (requests, -1, -1) if self.keep.ndim == 3 else (requests,), torch.int32),
            ("protect", (requests,), torch.int32),
            ("offsets", (requests + 1,), torch.int64),
        ):
            x: Tensor = getattr(self, name)
            if x.dtype != dtype:
                raise TypeError(f"{name} must be {dtype}, got {x.dtype}: convert it")
            if x.ndim != len(shape) or any(w not in (-1, g) for g, w in zip(x.shape, shape, strict=True)):
                raise ValueError(
                    f"{name} must be {list(shape)} (-1: any) for {requests} requests, got {list(x.shape)}: reshape it"
                )
            if x.device != self.lengths.device:
                raise ValueError(f"{name} is on {x.device}, lengths on {self.lengths.device}: move one of them")
            if not x.is_contiguous():
                raise ValueError(f"{name} of shape {list(x.shape)} has strides {x.stride()}: make it contiguous")
        for number in ("window", "max_length", "total"):
            if getattr(self, number) < 0:
                raise ValueError(f"{number}={getattr(self, number)} must not be negative")

    @property
    def num_requests(self) -> int:
        """R."""
        return self.lengths.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.lengths.device

    @property
    def keep_strides(self) -> tuple[int, int, int]:
        """Strides of ``keep`` from request to request, layer to layer, and KV head to KV head."""
        strides = self.keep.stride()
        return (strides[0], strides[1], strides[2]) if len(strides) == 3 else (strides[0], 0, 0)

    @classmethod
    def of(
        cls,
        block_tables: Tables | Sequence[Sequence[int]],
        lengths: Sequence[int] | npt.NDArray[np.int32],
        keep: Sequence[int] | npt.NDArray[np.int32],
        *,
        protect: Sequence[int] | npt.NDArray[np.int32] | int = 0,
        window: int = 0,
        dst_tables: Tables | Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """Build a batch from numbers on the host, checking all of them, and copy it to the device.

        Args:
            block_tables: each request's blocks.
            lengths: each request's slots.
            keep: ``[R]`` or ``[R, L, H]``, slots that stay.
            protect: first slots that stay, of each request or of all.
            window: last slots that stay.
            dst_tables: each request's destination blocks; default: in place.
            device: where the caches are.

        Raises:
            TypeError: a count or a block id is no integer.
            ValueError: arguments are of different numbers of requests, a count is out of bounds, or a block id is
                negative. Launchers raise it where a table is too short for the caches' blocks, or names a block that
                they have not.
        """
        return cls.with_others(
            (), block_tables, lengths, keep, protect=protect, window=window, dst_tables=dst_tables, device=device
        )[0]

    @classmethod
    def with_others(
        cls,
        others: Sequence[_Array],
        block_tables: Tables | Sequence[Sequence[int]],
        lengths: Sequence[int] | npt.NDArray[np.int32],
        keep: Sequence[int] | npt.NDArray[np.int32],
        *,
        protect: Sequence[int] | npt.NDArray[np.int32] | int = 0,
        window: int = 0,
        dst_tables: Tables | Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[RaggedBatch, list[Tensor]]:
        """Return what ``of`` does, and other int32 or int64 arrays that went to the device in the same copy."""
        count = len(lengths)
        protected = int32("protect", np.full(count, protect) if np.ndim(protect) == 0 else protect)
        sizes, kept = int32("lengths", lengths), int32("keep", keep)
        tables = block_tables if isinstance(block_tables, Tables) else Tables.of(block_tables)
        targets = dst_tables if dst_tables is None or isinstance(dst_tables, Tables) else Tables.of(dst_tables)
        if not len(tables.counts) == len(kept) == len(protected) == count:
            raise ValueError(
                f"lengths is of {count} requests, but block_tables of {len(tables.counts)}, keep of {len(kept)} "
                f"and protect of {len(protected)}"
            )
        check_counts(sizes, kept, protected, window)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        most_kept = kept.max(axis=tuple(range(1, kept.ndim)), initial=0)
        arrays: list[_Array] = [offsets, sizes, kept, protected, tables.padded("block_tables")]
        if targets is not None:
            arrays.append(targets.padded("dst_tables"))
        of_batch = len(arrays)
        on_device = to_device([*arrays, *others], torch.device(device))
        batch = cls(
            block_tables=on_device[4],
            lengths=on_device[1],
            keep=on_device[2],
            protect=on_device[3],
            offsets=on_device[0],
            window=window,
            max_length=int(sizes.max(initial=0)),
            total=int(offsets[-1]),
            dst_tables=on_device[of_batch - 1],
            min_block_size=tables.min_block_size(sizes),
            min_dst_block_size=(tables if targets is None else targets).min_block_size(most_kept),
            max_block=int(max(part.blocks.max(initial=0) for part in (tables, targets) if part is not None)),
        )
        return batch, on_device[of_batch:]

    def with_counts(self, counts: Tensor) -> RaggedBatch:
        """Return the batch with other counts of slots that stay, which the device knows: those of a threshold.

        The host cannot check them. Whatever a row keeps has to have room in ``dst_tables`` if it is to be packed: of
        survivors for which there is none, the later ones are lost.

        Args:
            counts: int32 ``[R, L, H]``, as ``threshold_ragged`` returns them.
        """
        return replace(self, keep=counts)


def check_counts(
    lengths: npt.NDArray[np.int32], keep: npt.NDArray[np.int32], protect: npt.NDArray[np.int32], window: int
) -> None:
    """Raise ValueError unless each request keeps what has to stay, and no more than it has; numbers on the host."""
    if window < 0:
        raise ValueError(f"window={window} must not be negative")
    for name, x in (("lengths", lengths), ("protect", protect)):
        if x.min(initial=0) < 0:
            raise ValueError(f"{name} of request {x.argmin()} is {x.min()}, must not be negative")
    per_row = (-1, *[1] * (keep.ndim - 1))
    low = np.minimum(protect.astype(np.int64) + window, lengths).reshape(per_row)
    bad = np.argwhere((keep < low) | (keep > lengths.reshape(per_row)))
    if len(bad):
        request = int(bad[0, 0])
        raise ValueError(
            f"request {request} keeps {keep[tuple(bad[0])]} slots, which must lie within {low[request].item()} "
            f"(protect={protect[request]} + window={window}, at most its length) and its length, {lengths[request]}: "
            "change keep, or protect and window"
        )


def to_device(arrays: Sequence[_Array], device: torch.device) -> list[Tensor]:
    """Copy int32 and int64 arrays to the device in one go, without waiting for it.

    Each begins at a multiple of ``VECTOR_BYTES``, since Triton compiles a kernel once more for pointers that do not.
    """
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([-(-x.nbytes // VECTOR_BYTES) * VECTOR_BYTES for x in arrays], out=starts[1:])
    staged = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = staged.numpy()
    for x, start in zip(arrays, starts, strict=False):
        flat[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[start : start + x.nbytes].view(torch.int64 if x.dtype == np.int64 else torch.int32).view(x.shape)
        for x, start in zip(arrays, starts.tolist(), strict=False)
    ]


def _layout(cache: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    return tuple(cache.shape), cache.stride(), cache.dtype, cache.device
