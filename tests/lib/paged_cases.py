"""Paged caches full of random bits, ragged batches on them, and what stitching must do to them, slot by slot."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from nitro.kernels.paged import PagedLayers, RaggedBatch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("hnd", "nhd", "odd", "strided")
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the caches of all layers."""

    num_layers: int = 2
    num_heads: int = 2
    block_size: int = 8
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nhd"


any_shape = st.builds(
    Shape,
    num_layers=st.integers(1, 2),
    num_heads=st.integers(1, 2),
    block_size=st.sampled_from([*BLOCK_SIZES, 7]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch: its length, and how many slots stay in each (layer, KV head)."""

    length: int
    keep: np.ndarray  # int32 [L, H]


@dataclass(frozen=True, slots=True)
class Case:
    """Caches, a batch on them, and a keep mask with ``batch.keep`` ones in each row."""

    shape: Shape
    memory: torch.Tensor  # int8, all bytes of all caches, and those between them that belong to none
    positions: torch.Tensor
    batch: RaggedBatch
    mask: torch.Tensor

    def layers(self) -> PagedLayers:
        return PagedLayers.of([cache_view(self.shape, whole) for whole in self.memory])

    def copy(self, device: str | torch.device) -> Case:
        memory = self.memory.to(device, copy=True)
        return replace(self, memory=memory, positions=self.positions.to(device, copy=True))


def cache_view(shape: Shape, whole: torch.Tensor) -> torch.Tensor:
    """The cache ``[num_blocks, H, block_size, 2 * D]`` in one layer's bytes."""
    width, x = 2 * shape.head_dim, whole.view(shape.dtype)
    if shape.layout == "hnd":
        return x.view(-1, shape.num_heads, shape.block_size, width)
    if shape.layout == "nhd":
        return x.view(-1, shape.block_size, shape.num_heads, width).transpose(1, 2)
    if shape.layout == "odd":  # rows are contiguous, but begin anywhere, and every other block is someone else's
        return x.view(-1, 2, shape.num_heads, shape.block_size, width + 1)[:, 1, :, :, 1:]
    return x.view(-1, shape.num_heads, shape.block_size, 2 * width)[..., ::2]


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads among them."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-128, 128, shape, dtype=np.int8))


def make_case(
    shape: Shape, requests: list[Request], *, seed: int = 0, share: bool = False, device: str = "cpu"
) -> Case:
    """Random caches, and requests in shuffled blocks.

    Args:
        shape: of the caches.
        requests: of the batch.
        seed: of everything random.
        share: let all requests begin with the same block. If one writes to it, as ``fill`` does, that is a race: give
            requests that keep all of it.
        device: where to put the tensors.
    """
    rng = np.random.default_rng(seed)
    size = shape.block_size
    needs = [-(-request.length // size) for request in requests]
    kept = [-(-int(request.keep.max(initial=0)) // size) for request in requests]
    num_blocks = sum(needs) + sum(kept) + 3
    free = iter(rng.permutation(num_blocks).tolist())
    tables = [[next(free) for _ in range(need)] for need in needs]
    targets = [[next(free) for _ in range(need)] for need in kept]
    if share:
        for table in tables:
            table[:1] = tables[0][:1]
    total = sum(request.length for request in requests)
    mask = np.zeros((shape.num_layers, shape.num_heads, total), np.uint8)
    first = 0
    for request in requests:
        for layer, head in np.ndindex(mask.shape[:2]):
            chosen = rng.permutation(request.length)[: request.keep[layer, head]]
            if share:  # the whole shared block first, then any
                chosen = np.argsort(np.where(np.arange(request.length) < size, -1, rng.random(request.length)))
                chosen = chosen[: request.keep[layer, head]]
            mask[layer, head, first + chosen] = rng.integers(1, 256, len(chosen))
        first += request.length
    elements = {"odd": 2 * size * (2 * shape.head_dim + 1), "strided": size * 4 * shape.head_dim}
    count = num_blocks * shape.num_heads * elements.get(shape.layout, size * 2 * shape.head_dim)
    keep = np.stack([r.keep for r in requests]) if requests else np.zeros((0, *mask.shape[:2]), np.int32)
    return Case(
        shape=shape,
        memory=random_bytes((shape.num_layers, count * shape.dtype.itemsize), seed).to(device),
        positions=random_bytes((shape.num_layers, num_blocks, shape.num_heads, size * 4), seed + 1)
        .view(torch.int32)
        .to(device),
        batch=RaggedBatch.of(
            tables, [request.length for request in requests], keep.astype(np.int32), dst_tables=targets, device=device
        ),
        mask=torch.from_numpy(mask).to(device),
    )


@st.composite
def batches(draw: st.DrawFn, shape: Shape, *, longest: int, most: int = 3) -> list[Request]:
    """Ragged requests: lengths around the edges of blocks; nothing, little, most or all of them stays."""
    size = shape.block_size
    edges = [n for n in (1, size - 1, size, size + 1, 2 * size) if 1 <= n <= longest]
    requests = []
    for _ in range(draw(st.integers(0, most))):
        length = draw(st.one_of(st.sampled_from(edges), st.integers(1, longest)))
        counts = st.one_of(st.sampled_from([0, 1, length - 1, length]), st.integers(0, length))
        rows = shape.num_layers * shape.num_heads
        equal = draw(st.booleans())
        keep = [draw(counts)] * rows if equal else draw(st.lists(counts, min_size=rows, max_size=rows))
        requests.append(Request(length, np.asarray(keep, np.int32).reshape(shape.num_layers, shape.num_heads)))
    return requests


Stitch = Callable[[PagedLayers, RaggedBatch, torch.Tensor, torch.Tensor], None]


def check_stitch(case: Case, stitch: Stitch, *, fill: bool) -> None:
    """Run ``stitch`` on a copy of the case; every byte of caches and positions must be what it should be."""
    want, got = case.copy("cpu"), case.copy(case.memory.device)
    _stitch_slot_by_slot(want, fill=fill)
    stitch(got.layers(), got.batch, got.mask, got.positions)
    assert torch.equal(got.positions.cpu(), want.positions)
    assert torch.equal(got.memory.cpu(), want.memory)


def _stitch_slot_by_slot(case: Case, *, fill: bool) -> None:
    """Plain Python; shares nothing with kernels and references but the case."""
    size, batch = case.shape.block_size, case.batch
    caches = [cache.view(INTEGERS[cache.itemsize]) for cache in case.layers().caches]
    before = [cache.clone() for cache in caches], case.positions.clone()
    mask = case.mask.cpu().tolist()
    tables, targets = batch.block_tables.tolist(), batch.dst_tables.tolist()
    keeps, offsets = batch.keep.tolist(), batch.offsets.tolist()
    for request, length in enumerate(batch.lengths.tolist()):
        for layer, head in np.ndindex(case.shape.num_layers, case.shape.num_heads):
            row = mask[layer][head][offsets[request] : offsets[request] + length]
            if fill:
                keep = keeps[request][layer][head]
                holes = [slot for slot in range(keep) if not row[slot]]
                movers = [slot for slot in range(keep, length) if row[slot]]
                moves, table = list(zip(movers, holes, strict=True)), tables[request]
            else:
                survivors = [slot for slot in range(length) if row[slot]]
                moves, table = [(slot, rank) for rank, slot in enumerate(survivors)], targets[request]
            for source, target in moves:
                read = tables[request][source // size], head, source % size
                write = table[target // size], head, target % size
                caches[layer][write] = before[0][layer][read]
                case.positions[layer][write] = before[1][layer][read]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make whatever waits for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Let torch.empty return memory full of 0xA5, so that what a kernel leaves out shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        x = empty(*args, **kwargs)
        x.untyped_storage().fill_(0xA5)
        return x

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty
