"""The compactor on caches that are plain tensors: content follows the plan, and nothing else is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nitro import policies
from nitro.compactor import request_key
from nitro.dense_compactor import DenseCompactor
from nitro.errors import IntegrityError, SettingsError
from nitro.policies.base import Policy, ScoreInput
from nitro.pooling import Merging
from nitro.testing.folding import Folding
from nitro.types import Counters, Eviction, StepPlan

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4


class DenseCache:
    """K and V side by side: ``[blocks, heads, block, 2 * dim]``."""

    block_size, num_kv_heads, head_dim = BLOCK, HEADS, DIM
    device = torch.device("cpu")

    def __init__(self, blocks: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randn(blocks, HEADS, BLOCK, 2 * DIM, generator=generator)

    def gather(self, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        tokens = self.data[block_ids].transpose(0, 1).reshape(HEADS, -1, 2 * DIM)[:, :length]
        return tokens[..., :DIM], tokens[..., DIM:]

    def scatter(self, block_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        padded = torch.zeros(HEADS, len(block_ids) * BLOCK, 2 * DIM)
        padded[:, : keys.shape[1]] = torch.cat([keys, values], dim=-1)
        self.data[block_ids] = padded.view(HEADS, len(block_ids), BLOCK, 2 * DIM).transpose(0, 1)


def make(policy: str = "keydiff", blocks: int = 16) -> tuple[DenseCompactor, list[DenseCache]]:
    caches = [DenseCache(blocks, seed) for seed in range(LAYERS)]
    return (
        DenseCompactor(caches, range(LAYERS), range(HEADS), policies.get(policy), sinks=1, window=2, seed=0),
        caches,
    )


def plan(logical: int, physical: int, keep: int, dst: list[int], src: list[int], *, epoch: int = 0) -> StepPlan:
    source = np.array(src, np.int32)
    return StepPlan.of([Eviction("r", epoch, logical, physical, keep, 1, np.array(dst, np.int32), source)], BLOCK)


@given(
    st.sampled_from(["streaming", "random", "knorm", "vnorm", "keydiff", "kvdiff", "vdiff", "gravity"]),
    st.integers(4, 30),
    st.integers(1, 27),
    st.booleans(),
    st.integers(0, 99),
)
def test_kept_tokens_are_where_the_plan_says_and_nothing_else_moved(
    policy: str, physical: int, dropped: int, fresh: bool, seed: int
) -> None:
    keep = max(physical - dropped, 3)
    if keep == physical:
        return
    compactor, caches = make(policy)
    compactor.records = []
    order = np.random.default_rng(seed).permutation(np.arange(1, 16)).tolist()
    source = order[: -(-physical // BLOCK)]
    target = (order[::-1] if fresh else source)[: -(-keep // BLOCK)]
    before = [cache.data.clone() for cache in caches]
    tokens = [cache.gather(torch.tensor(source), physical) for cache in caches]
    compactor.apply(plan(physical, physical, keep, target, source))
    kept = torch.from_numpy(compactor.records[0].kept).long()
    assert kept.shape == (LAYERS, HEADS, keep)
    assert (kept.diff(dim=-1) > 0).all(), "order is preserved"
    assert (kept[..., 0] == 0).all(), "the sink stays"
    assert (kept[..., -2:] == torch.tensor([physical - 2, physical - 1])).all(), "the window stays"
    untouched = sorted(set(range(16)) - set(target))
    for layer, cache in enumerate(caches):
        keys, values = cache.gather(torch.tensor(target), keep)
        index = kept[layer][..., None].expand(-1, -1, DIM)
        assert torch.equal(keys, tokens[layer][0].gather(1, index))
        assert torch.equal(values, tokens[layer][1].gather(1, index))
        assert torch.equal(cache.data[untouched], before[layer][untouched])


def test_positions_follow_over_several_evictions() -> None:
    compactor, _ = make("streaming")
    compactor.records = []
    compactor.apply(plan(12, 12, 6, [1, 2], [1, 2, 3]))
    compactor.apply(plan(16, 10, 5, [1, 2], [1, 2, 5], epoch=1))
    assert compactor.records[0].kept[0, 0].tolist() == [0, 7, 8, 9, 10, 11]
    assert compactor.records[1].kept[2, 1].tolist() == [0, 12, 13, 14, 15]
    assert compactor.evicted("r") == 11
    assert compactor.counters == Counters(evictions=2, tokens_evicted=11, blocks_freed=2)
    compactor.forget("r")
    assert len(compactor) == compactor.evicted("r") == 0


@pytest.mark.parametrize("merging", [Merging(least=0.2, own=2.0), Merging(least=-1.0, own=1.0, most=3)])
def test_pooled_values_are_those_of_their_definition(merging: Merging) -> None:
    """Over several evictions, in one of which nothing is new; a new life of the request starts from masses of 1."""
    caches = [DenseCache(16, seed) for seed in range(LAYERS)]
    compactor = DenseCompactor(
        caches, range(LAYERS), range(HEADS), policies.get("keydiff"), sinks=1, window=2, seed=0, merging=merging
    )
    blocks = torch.tensor([1, 2, 3, 5, 6])
    whole = [tuple(x.clone() for x in cache.gather(blocks, 20)) for cache in caches]
    for life in range(2):
        compactor.records = []
        for cache, (keys, values) in zip(caches, whole, strict=True):
            cache.scatter(blocks, keys, values)
        compactor.apply(plan(12, 12, 8, [1, 2], [1, 2, 3]))
        for cache, (keys, values) in zip(caches, whole, strict=True):
            cache.scatter(torch.tensor([3, 5]), keys[:, 12:20], values[:, 12:20])
        compactor.apply(plan(20, 16, 7, [1, 2], [1, 2, 3, 5], epoch=1))
        compactor.apply(plan(20, 7, 5, [1, 2], [1, 2], epoch=2))
        folding = Folding(merging, 1, compactor.records, 21)
        for layer, (cache, (keys, values)) in enumerate(zip(caches, whole, strict=True)):
            kept = torch.from_numpy(compactor.records[-1].kept[layer]).long()[..., None].expand(-1, -1, DIM)
            *_, (_, want) = folding.epochs(layer, keys, values)
            got_keys, got = cache.gather(torch.tensor([1, 2]), 5)
            assert torch.equal(got_keys, keys.gather(1, kept))
            torch.testing.assert_close(got, want.gather(1, kept), rtol=1e-5, atol=1e-6)
            assert not torch.equal(got, values.gather(1, kept)), life
        compactor.forget("r")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(16, 10, 5, [1, 2], [1, 2, 5], epoch=2), r"'r' does not .*evicted\) is \(1, 6\), the plan says \(2, 6\)"),
        (plan(16, 11, 5, [1, 2], [1, 2, 5], epoch=1), r"'r' does not .*evicted\) is \(1, 6\), the plan says \(1, 5\)"),
        (plan(40, 34, 5, [1, 2], [1, 2, 5], epoch=1), "plan has 3 blocks of 4 slots, but needs 9 of 4"),
        (
            replace(plan(16, 10, 5, [1], [1, 2], epoch=1), block_size=8),
            "plan has 2 blocks of 8 slots, but needs 2 of 4",
        ),
    ],
    ids=["epoch", "length", "blocks", "block size"],
)
def test_a_plan_that_does_not_continue_the_state_is_refused(wrong: StepPlan, message: str) -> None:
    compactor, caches = make()
    compactor.apply(plan(12, 12, 6, [1, 2], [1, 2, 3]))
    before = [cache.data.clone() for cache in caches]
    with pytest.raises(IntegrityError, match=message):
        compactor.apply(wrong)
    assert all(torch.equal(a, c.data) for a, c in zip(before, caches, strict=True))
    assert compactor.evicted("r") == 6
    assert compactor.evicted_of(["s", "r"]).tolist() == [0, 6]


def test_a_new_life_of_a_request_starts_from_nothing() -> None:
    compactor, _ = make("streaming")
    compactor.records = []
    for tokens in (12, 14):
        compactor.begin_run("r", tokens)
        compactor.apply(plan(12, 12, 6, [1, 2], [1, 2, 3]))
        compactor.forget("r")
    assert [record.run for record in compactor.records] == [0, 1]
    assert compactor.run_starts == {"r": [12, 14]}
    compactor.records = None
    compactor.begin_run("r", 16)
    assert compactor.run_starts == {"r": [12, 14]}, "not recorded"


def test_layers_are_scored_in_groups_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (2**30, 1):
        monkeypatch.setattr("nitro.dense_compactor.SCRATCH_BYTES", limit)
        compactor, caches = make("gravity")
        compactor.apply(plan(20, 20, 9, [1, 2, 3], [1, 2, 3, 4, 5]))
        results.append(torch.stack([cache.data for cache in caches]))
    assert torch.equal(*results)


def test_a_policy_that_breaks_its_contract_is_named() -> None:
    @dataclass(frozen=True)
    class Broken(Policy):
        name = "broken"

        def score(self, x: ScoreInput) -> Tensor:
            return torch.zeros(1)

    compactor, _ = make()
    with pytest.raises(SettingsError, match="broken"):
        compactor.set_policy(Broken())
    assert compactor.policy == policies.get("keydiff"), "the old one stays"
    compactor.policy = Broken()
    with pytest.raises(SettingsError, match="broken"):
        compactor.apply(plan(12, 12, 6, [1, 2], [1, 2, 3]))


def test_request_key_is_the_same_everywhere() -> None:
    assert request_key("cmpl-7") == 0xFFA1F18DD6406F2A, "changes which tokens the random policy keeps, for everybody"
    assert request_key("a") != request_key("b")
    assert 0 <= request_key("a") < 2**64
