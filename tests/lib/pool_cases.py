"""Caches whose survivors take what is evicted, and what that must do to them, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paged_cases as paged
import torch
from hypothesis import strategies as st

from nitro.kernels import compact

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COSINE = 1e-5  # how far a kernel's cosines may be off
SUM = 4e-6  # and its sums, of the largest magnitude that is added up
Merge = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """Of a merge."""

    least: float = 0.3
    own: float = 1.0
    most: int = 2048
    packed: bool = False


any_shape = st.builds(
    paged.Shape,
    num_layers=st.integers(1, 2),
    num_heads=st.integers(1, 2),
    block_size=st.sampled_from([*paged.BLOCK_SIZES, 7]),
    head_dim=st.sampled_from(paged.HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(paged.LAYOUTS),
)
any_options = st.builds(
    Options,
    least=st.sampled_from([-1.0, 0.0, 0.3, 0.9, 1.0]),
    own=st.sampled_from([1.0, 8.0]),
    most=st.sampled_from([1, 5, 2048]),
    packed=st.booleans(),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Known keys and values, masses, and a batch that loses some of them."""

    paged: paged.Case
    masses: torch.Tensor
    protect: list[int]

    def copy(self) -> Case:
        device = self.masses.device
        return Case(self.paged.copy(device), self.masses.clone(), self.protect)

    def slots(self) -> list[tuple[int, int, int, int, int]]:
        """Return (request, layer, head, first column, length) of all rows."""
        batch, shape = self.paged.batch, self.paged.shape
        sizes = zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)
        return [
            (request, layer, head, first, length)
            for request, (first, length) in enumerate(sizes)
            for layer, head in np.ndindex(shape.num_layers, shape.num_heads)
        ]


def make_case(
    shape: paged.Shape,
    requests: list[paged.Request],
    *,
    kinds: int = 6,
    bad: float = 0.0,
    protect: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Keys of a few kinds, so that many are alike; values with a common part; masses of 1 to 9.

    Args:
        shape: of the caches.
        requests: of the batch.
        kinds: of keys; 0: all keys are zero.
        bad: share of tokens whose key or value is not finite.
        protect: first slots that take nothing.
        seed: of everything random.
        device: where to put the tensors.
    """
    made = paged.make_case(shape, requests, seed=seed)
    rng = np.random.default_rng(seed)
    masses = torch.from_numpy(rng.integers(1, 10, tuple(made.positions.shape))).int()
    for cache in made.layers().caches:
        slots, width = tuple(cache.shape[:3]), shape.head_dim
        keys = np.zeros((*slots, width))
        if kinds:
            heads = rng.normal(size=(kinds, width)) + 0.5
            keys = heads[rng.integers(0, kinds, slots)] + rng.normal(size=(*slots, width)) * rng.choice([0.05, 0.6])
        rows = np.concatenate([keys * rng.choice([0.1, 5.0]), rng.normal(size=(*slots, width)) * 3 + 1], -1)
        wrong = np.argwhere(rng.random(slots) < bad)
        rows[(*wrong.T, rng.integers(0, 2 * width, len(wrong)))] = rng.choice([np.nan, np.inf, -np.inf], len(wrong))
        cache.copy_(torch.from_numpy(rows))
    made.batch.protect.fill_(protect)
    case = Case(made, masses, [protect] * len(requests))
    for _, layer, head, first, length in case.slots():
        row = made.mask[layer, head, first : first + length]
        for slot in range(min(protect, int((row != 0).sum()))):  # sinks stay, in place of another one
            if row[slot] == 0:
                row[row.nonzero().max()] = 0
                row[slot] = 1
    if device == "cpu":
        return case
    moved = paged.make_case(shape, requests, seed=seed, device=device)  # the same, there
    moved.memory.copy_(made.memory)
    moved.mask.copy_(made.mask)
    moved.batch.protect.fill_(protect)
    return Case(moved, masses.to(device), case.protect)


@st.composite
def cases(draw: st.DrawFn, *, longest: int, most: int = 3, device: str = "cpu") -> Case:
    """Ragged batches of any shape."""
    shape = draw(any_shape)
    return make_case(
        shape,
        draw(paged.batches(shape, longest=longest, most=most)),
        kinds=draw(st.sampled_from([0, 1, 3, 12])),
        bad=draw(st.sampled_from([0.0, 0.0, 0.1])),
        protect=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**31)),
        device=device,
    )


def run(case: Case, merge: Merge, options: Options) -> tuple[torch.Tensor, Case]:
    """Merge on a copy, after packing it if so; return the targets and the copy."""
    found = case.copy()
    x = found.paged
    if options.packed:
        compact.pack_ragged_ref(x.layers(), x.batch, x.mask, x.positions, masses=found.masses)
    with paged.poisoned_empty(), np.errstate(invalid="ignore"):  # numpy's, in the interpreter, of what is not finite
        targets = merge(
            x.layers(),
            x.batch,
            x.mask,
            found.masses,
            least=options.least,
            own=options.own,
            most=options.most,
            packed=options.packed,
        )
    return targets, found


def check_merge(case: Case, merge: Merge, options: Options) -> None:
    """Targets are nearest survivors, values and masses what these say, and all other bytes what they were."""
    targets, got = run(case, merge, options)
    want = case.copy()
    x = want.paged
    if options.packed:
        compact.pack_ragged_ref(x.layers(), x.batch, x.mask, x.positions, masses=want.masses)
    targets, size, width = targets.cpu(), x.shape.block_size, x.shape.head_dim
    before = [cache.clone() for cache in case.copy().paged.layers().caches]
    old_masses = case.masses.cpu()
    wanted, found = x.layers().caches, got.paged.layers().caches
    mask, tables = x.mask.cpu() != 0, x.batch.block_tables.tolist()
    places = x.batch.dst_tables.tolist() if options.packed else tables
    want_masses, got_masses = want.masses, got.masses
    for request, layer, head, first, length in case.slots():
        kept, target = mask[layer, head, first : first + length], targets[layer, head, first : first + length]
        where = [(tables[request][slot // size], head, slot % size) for slot in range(length)]
        rows = torch.stack([before[layer][at] for at in where]).double().cpu()
        check_targets(rows[:, :width], rows[:, width:], kept, target, case.protect[request], options.least)
        survivors = kept.nonzero().flatten().tolist()
        for rank, slot in enumerate(survivors):
            taken = (target == slot).nonzero().flatten().tolist()
            to = rank if options.packed else slot
            block = places[request][to // size]
            at = block, head, to % size
            own_value = rows[slot, width:]
            if not taken or not bool(own_value.isfinite().all()):
                continue
            mass = int(old_masses[layer][where[slot]])
            added = [int(old_masses[layer][where[one]]) for one in taken]
            weight = options.own + mass - 1
            sums = sum((m * rows[one, width:] for m, one in zip(added, taken, strict=True)), weight * own_value)
            mean = sums / (weight + sum(added))
            largest = float(rows[[slot, *taken], width:].abs().max())
            rounding = torch.finfo(x.shape.dtype).eps / 2 * mean.abs() + torch.finfo(x.shape.dtype).smallest_normal
            error = (found[layer][at][width:].double().cpu() - mean).abs()
            assert bool((error <= 1.001 * rounding + SUM * largest).all()), (float(error.max()), largest)
            assert int(got_masses[layer][at]) == min(mass + sum(added), options.most)
            # Known to be right: what is left has to be equal bit for bit.
            wanted[layer][at][width:] = found[layer][at][width:]
            want_masses[layer][at] = got_masses[layer][at]
    assert torch.equal(got.paged.memory.cpu(), x.memory.cpu())
    assert torch.equal(got.paged.positions.cpu(), x.positions.cpu())
    assert torch.equal(got_masses.cpu(), want_masses.cpu())


def check_targets(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, target: torch.Tensor, protect: int, least: float
) -> None:
    """Compare one row's targets with cosines in float64; who is nearest may differ by their rounding."""
    norms = keys.norm(dim=-1)
    fine = keys.float().square().sum(-1).isfinite()
    unit = torch.where(fine[:, None], keys, 0.0) / torch.where(fine, norms, 1.0).clamp_min(1e-12)[:, None]
    cosines = unit @ unit.T
    able = kept & fine
    able[:protect] = False
    fine &= values.float().square().sum(-1).isfinite()
    for slot in range(len(kept)):
        best = float(cosines[slot][able].max()) if bool(able.any()) else -np.inf
        to = int(target[slot])
        if to >= 0:
            assert bool(fine[slot] & ~kept[slot] & able[to]), (slot, to)
            assert float(cosines[slot, to]) >= best - COSINE
            assert best >= least - COSINE
        else:
            assert to == -1
            assert bool(kept[slot] | ~fine[slot]) or best < least + COSINE
