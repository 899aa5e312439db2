"""Requests that grow and are evicted on a paged cache whose content tells which token it belongs to.

A model in plain Python remembers what each (layer, KV head) of each request holds. After every step the cache, the
logical positions, and what another policy or request must not have changed are compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from nitro import policies
from nitro.compactor import Compactor, request_key
from nitro.dense_compactor import DenseCompactor
from nitro.kernel_compactor import KernelCompactor
from nitro.kernels.paged import PagedLayers
from nitro.policies.rotary import Rotation, Rotations
from nitro.static_events import Numbers, StaticEvents
from nitro.types import Eviction, StepPlan

LAYERS, HEADS, DIM, BLOCK = 2, 2, 32, 8
SINKS, WINDOW = 2, 6
LONGEST = 100  # slots of a request
POLICIES = ("streaming", "random", "knorm", "vnorm", "keydiff", "kvdiff", "vdiff", "gravity")
EXACT = ("streaming", "random")  # integers and bits; the others' sums may round otherwise


def content(request: str, position: int) -> torch.Tensor:
    """K and V ``[L, H, 2 * D]`` of a token; requests that share a prefix have the name up to the colon in common."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(request.split(":")[0])) * 100_003 + position
    return torch.randn(LAYERS, HEADS, 2 * DIM, generator=torch.Generator().manual_seed(seed))


def rotations(device: str) -> Rotations:
    """Return rotations of different kinds: of all of a key and of a part of it."""
    found: list[Rotation | None] = []
    for layer in range(LAYERS):
        rotary = DIM if layer % 2 else DIM // 2
        angles = torch.arange(4 * LONGEST)[:, None] * 1e4 ** -(torch.arange(0, rotary, 2) / rotary)
        found.append(Rotation(torch.cat([angles.cos(), angles.sin()], dim=-1).to(device), interleaved=layer % 2 == 0))
    return Rotations(tuple(found))


class Caches:
    """One layer's cache as DenseCompactor wants it."""

    block_size, num_kv_heads, head_dim = BLOCK, HEADS, DIM

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.device = data, data.device

    def gather(self, block_ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.data[block_ids.to(self.device)].transpose(0, 1).reshape(HEADS, -1, 2 * DIM)[:, :length]
        return tokens[..., :DIM], tokens[..., DIM:]

    def scatter(self, block_ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        padded = torch.zeros(HEADS, len(block_ids) * BLOCK, 2 * DIM, device=self.device)
        padded[:, : keys.shape[1]] = torch.cat([keys, values], dim=-1)
        self.data[block_ids.to(self.device)] = padded.view(HEADS, len(block_ids), BLOCK, 2 * DIM).transpose(0, 1)


@dataclass
class Sequence:
    """A request: its block table, and its tokens."""

    name: str
    blocks: list[int] = field(default_factory=list)
    logical: int = 0
    physical: int = 0
    epoch: int = 0
    # [layer][head] → logical positions held
    held: list[list[set[int]]] = field(default_factory=lambda: [[set() for _ in range(HEADS)] for _ in range(LAYERS)])


class World:
    """A worker's caches with a compactor, and requests on them."""

    def __init__(
        self,
        kind: str,
        policy: str,
        *,
        device: str = "cpu",
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        usual: int = 0,
        **policy_options: float,
    ) -> None:
        """Kernels get caches of this dtype, the dense compactor the same numbers in float32."""
        shape = (LAYERS, num_blocks, BLOCK, HEADS, 2 * DIM)
        self.dtype = dtype
        data = torch.zeros(shape, device=device).to(dtype if kind == "kernel" else torch.float32).transpose(2, 3)
        self.caches = list(data)
        options: dict[str, Any] = {"sinks": SINKS, "window": WINDOW, "seed": 7, "rotations": rotations(device)}
        self.compactor: Compactor
        if kind == "kernel":
            layers = PagedLayers.of(self.caches)
            self.compactor = KernelCompactor(
                layers,
                range(LAYERS),
                range(HEADS),
                policies.get(policy, **policy_options),
                longest=LONGEST,
                usual=usual,
                counts=True,
                **options,
            )
        else:
            dense = [Caches(cache) for cache in self.caches]
            self.compactor = DenseCompactor(
                dense, range(LAYERS), range(HEADS), policies.get(policy, **policy_options), **options
            )
        self.compactor.records = []
        self.free = list(range(1, num_blocks))
        self.shared: set[int] = set()
        self.sequences: dict[str, Sequence] = {}

    def grow(self, name: str, tokens: int) -> Sequence:
        sequence = self.sequences.setdefault(name, Sequence(name))
        for _ in range(tokens):
            if sequence.physical == len(sequence.blocks) * BLOCK:
                sequence.blocks.append(self.free.pop())
            slot, block = sequence.physical % BLOCK, sequence.blocks[sequence.physical // BLOCK]
            rows = content(name, sequence.logical).to(self.dtype).to(self.caches[0])
            for layer, cache in enumerate(self.caches):
                cache[block, :, slot] = rows[layer]
                for head in range(HEADS):
                    sequence.held[layer][head].add(sequence.logical)
            sequence.logical += 1
            sequence.physical += 1
        return sequence

    def fork(self, name: str, new: str) -> None:
        """Begin a request with the full blocks of another one that has lost nothing."""
        parent = self.sequences[name]
        assert parent.epoch == 0
        blocks = parent.blocks[: parent.physical // BLOCK]
        self.shared.update(blocks)
        tokens = len(blocks) * BLOCK
        child = Sequence(new, list(blocks), tokens, tokens)
        child.held = [[set(range(tokens)) for _ in range(HEADS)] for _ in range(LAYERS)]
        self.sequences[new] = child

    def evict(self, keep: dict[str, int], protect: int = SINKS) -> list[list[list[list[int]]]]:
        """Evict from these requests in one step; return what each keeps, ``[request][layer][head]`` ascending."""
        evictions, freed = [], []
        for name, count in keep.items():
            sequence = self.sequences[name]
            head = sequence.blocks[: -(-count // BLOCK)]
            target = [self.free.pop(0) if block in self.shared else block for block in head]
            eviction = Eviction(
                name,
                sequence.epoch,
                sequence.logical,
                sequence.physical,
                count,
                min(protect, count),
                np.array(target, np.int32),
                np.array(sequence.blocks[: -(-sequence.physical // BLOCK)], np.int32),
            )
            evictions.append(eviction)
            freed += [b for b in sequence.blocks if b not in target and b not in self.shared]
        assert self.compactor.records is not None
        self.compactor.records.clear()
        if evictions:
            self.compactor.apply(StepPlan.of(evictions, BLOCK))
        results = []
        for eviction, record in zip(evictions, self.compactor.records, strict=True):
            sequence = self.sequences[eviction.request_id]
            assert record.request_id == eviction.request_id
            assert record.kept.shape == (LAYERS, HEADS, eviction.keep)
            kept = record.kept.tolist()
            for layer in range(LAYERS):
                for head in range(HEADS):
                    before, now = sequence.held[layer][head], kept[layer][head]
                    assert now == sorted(set(now)), "ascending, each once"
                    assert set(now) <= before, "nothing that was not there"
                    assert set(range(min(protect, eviction.keep))) <= set(now), "sinks stay"
                    assert set(sorted(before)[-WINDOW:]) <= set(now), "the newest stay"
                    sequence.held[layer][head] = set(now)
            sequence.blocks = eviction.dst_blocks.tolist()
            sequence.physical, sequence.epoch = eviction.keep, sequence.epoch + 1
            results.append(kept)
        self.free += freed
        self.check()
        return results

    def count(self, names: list[str], threshold: float, protect: int = SINKS) -> list[int]:
        """Return how many tokens of each request reach a threshold; neither caches nor requests may change by it."""
        found = [self.sequences[name] for name in names]
        numbers = [(s.epoch, s.logical, s.physical, s.physical, min(protect, s.physical)) for s in found]
        blocks = [block for s in found for block in s.blocks[: -(-s.physical // BLOCK)]]
        slots = StepPlan(
            tuple(names),
            np.ascontiguousarray(np.array(numbers, np.int32).T),
            np.array(blocks, np.int32),
            np.empty((2, 0), np.int32),
            BLOCK,
        )
        before = [cache.clone() for cache in self.caches]
        counts = self.compactor.count(slots, threshold)
        assert counts.dtype == torch.int32
        assert all(torch.equal(a, b) for a, b in zip(before, self.caches, strict=True))
        return counts.tolist()

    def scores(self, name: str) -> torch.Tensor:
        """Return the scores ``[L, H, length]`` of a request's tokens by the policy's formula in PyTorch."""
        sequence = self.sequences[name]
        assert sequence.epoch == 0
        assert isinstance(self.compactor, DenseCompactor)
        rows = [cache.gather(torch.tensor(sequence.blocks), sequence.physical) for cache in self.compactor.caches]
        x = self.compactor._input(
            torch.stack([k for k, _ in rows]),
            torch.stack([v for _, v in rows]),
            torch.arange(sequence.physical, dtype=torch.int32).expand(LAYERS, HEADS, -1),
            slice(None),
            request_key(name),
            sequence.logical,
        )
        return self.compactor.policy.score(x)

    def check(self) -> None:
        """Every token that a request holds is in exactly one of its slots, with its own K and V."""
        for name, sequence in self.sequences.items():
            for layer, cache in enumerate(self.caches):
                rows = cache[sequence.blocks].transpose(0, 1).reshape(HEADS, -1, 2 * DIM)[:, : sequence.physical].cpu()
                for head in range(HEADS):
                    held = sorted(sequence.held[layer][head])
                    want = torch.stack([content(name, position)[layer, head] for position in held]).to(self.dtype)
                    # In any order: compare the sorted rows.
                    assert sorted(rows[head].float().tolist()) == sorted(want.float().tolist())


def check_history(
    policy: str,
    *,
    seed: int,
    device: str = "cpu",
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    usual: int = 0,
    twin: bool = False,
    **policy_options: float,
) -> None:
    """Requests with and without a shared prefix grow and are evicted, some of them in one step, often and seldom.

    The dense compactor keeps the same tokens where scores are exact. With ``twin`` it has to in any case, which other
    policies do but for scores that are equal up to rounding, so for most seeds.
    """
    rng = np.random.default_rng(seed)
    world = World("kernel", policy, device=device, dtype=dtype, usual=usual, **policy_options)
    other = World("dense", policy, device="cpu", dtype=dtype, **policy_options) if twin or policy in EXACT else None
    worlds = [world, *([other] if other else [])]
    for each in worlds:
        each.grow("a:1", 19)
        each.fork("a:1", "a:2")
        each.grow("b", 30)
    for _ in range(steps):
        keep: dict[str, int] = {}
        for name in ("a:1", "a:2", "b"):
            grown = int(rng.integers(1, 12))
            for each in worlds:
                each.grow(name, grown)
            physical = world.sequences[name].physical
            if physical > SINKS + WINDOW and rng.random() < 0.7:
                keep[name] = int(rng.integers(SINKS + WINDOW, physical))
        results = [each.evict(keep) for each in worlds]
        assert all(result == results[0] for result in results)


@contextmanager
def counted_usual() -> Iterator[list[int]]:
    """Collect how many requests each eviction of the usual size is of."""
    found: list[int] = []
    run = StaticEvents.run

    def counted(self: StaticEvents, x: Numbers) -> None:
        found.append(len(x.lengths))
        run(self, x)

    with mock.patch.object(StaticEvents, "run", counted):
        yield found


def check_usual(policy: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Requests of the usual size, others, and those whose window has moved, in one step: each keeps what it should."""
    with mock.patch("nitro.kernel_compactor.SIZES", (1, 2)):
        world = World("kernel", policy, device=device, dtype=dtype, num_blocks=96, usual=40)
    twin = World("kernel", policy, device=device, dtype=dtype, num_blocks=96)
    names = [*(f"usual-{number}" for number in range(5)), "long", "close"]
    for each in (world, twin):
        for number, name in enumerate(names):
            each.grow(name, 30 + number)
        each.evict({"close": 20})
        each.grow("close", 2)
        each.grow("long", 20)
    for keep in (dict.fromkeys(names, 18), {"usual-3": 16}, {}, {"usual-0": SINKS + WINDOW, "long": 17}):
        with counted_usual() as found:
            kept = world.evict(keep)
        assert kept == twin.evict(keep)
        if policies.get(policy).capturable:
            assert found == {7: [2, 2, 1], 1: [1], 0: [], 2: [2]}[len(keep)]
        else:
            assert not found
        for each in (world, twin):
            for name in names:
                each.grow(name, WINDOW + 1)


def check_choice(policy: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """What stays scores at least as high, by the policy's formula in PyTorch, as what goes."""
    world = World("kernel", policy, device=device, dtype=dtype)
    world.grow("x", 60)
    kept = world.evict({"x": 30})[0]
    dense = World("dense", policy, dtype=dtype)
    dense.grow("x", 60)
    scores = dense.scores("x")
    for layer in range(LAYERS):
        for head in range(HEADS):
            free = set(range(SINKS, 60 - WINDOW))
            stays = sorted(free & set(kept[layer][head]))
            goes = sorted(free - set(stays))
            assert scores[layer, head, stays].min() >= scores[layer, head, goes].max() - 1e-5


def check_counts(policy: str, *, device: str = "cpu") -> None:
    """As many tokens are counted as have a score that reaches the threshold, before and after evictions."""
    lengths = {"x": 60, "y": 33, "z": 9}
    world, dense = World("kernel", policy, device=device), World("dense", policy)
    for each in (world, dense):
        for name, length in lengths.items():
            each.grow(name, length)
    thresholds = [float(x) for x in dense.scores("x").quantile(torch.tensor([0.2, 0.5, 0.9]))]
    counts = set()
    for threshold in (-torch.inf, *thresholds, torch.inf):
        want = []
        for name, length in lengths.items():
            slot = torch.arange(length)
            forced = (slot < SINKS) | (slot >= length - WINDOW)
            reached = int(((dense.scores(name) >= threshold) | forced).sum())
            want.append(-(-reached // (LAYERS * HEADS)))
        assert dense.count(list(lengths), threshold) == want
        assert world.count(list(lengths), threshold) == want
        counts.add(want[0])
    assert len(counts) >= 4, "the thresholds tell tokens apart"
    assert world.count(["y"], torch.inf) == [SINKS + WINDOW]
    world.compactor.forget("z")
    assert set(world.compactor._keys) == {"x", "y"}, "nothing is left of a request that was only counted"
    if policy not in EXACT:
        return
    for each in (world, dense):
        each.evict({"x": 30, "y": 20})
    for grown in (2, WINDOW + 3):  # the window is somewhere among the other slots first, then in its place
        for each in (world, dense):
            each.grow("x", grown)
        for threshold in thresholds:
            assert world.count(["y", "x"], threshold) == dense.count(["y", "x"], threshold)
