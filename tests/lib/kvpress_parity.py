"""Keys and values as presses of kvpress and as Nitro's kernels and policies see them, and which tokens stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nitro
from nitro import policies
from nitro.kernels import score, select
from nitro.kernels.paged import PagedLayers, RaggedBatch
from nitro.policies.base import ScoreInput

SINKS, LAG = 4, 32
BOUNDS = {"keydiff": 1e-6, "knorm": 1e-6, "lagkv": 4e-6}
"""How close, in units of the row's largest score, a token must be to the last that stays for the choice to be a tie.

Either side's float32 scores may be off by the rounding of a few sums of D terms: half of this.
"""
ROUNDED_SHARE = 1e-3  # of all kept tokens, that may differ for such ties
# In the first layer of a model, equal tokens have keys of equal length; only RoPE's rounding tells them apart.
ROUNDED_SHARE_OF_EQUAL_NORMS = 1e-2


@dataclass(frozen=True, slots=True)
class Cache:
    """One request's cached tokens; ``keys`` and ``values`` are ``[L, H, N, D]``."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def to(self, dtype: torch.dtype) -> Cache:
        return Cache(self.keys.to(dtype), self.values.to(dtype))

    def first(self, length: int) -> Cache:
        return Cache(self.keys[:, :, :length], self.values[:, :, :length])


def random_cache(length: int, *, layers: int = 2, heads: int = 2, dim: int = 64, seed: int = 0) -> Cache:
    """Keys of all lengths around a direction that they share, as real ones do."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys = normal(layers, heads, length, dim) + 2.0 * normal(layers, heads, 1, dim)
    return Cache(keys * normal(layers, heads, length, 1).exp(), normal(layers, heads, length, dim))


def text_ids(book: str, length: int) -> Tensor:
    """Return the first bytes of a novel's body as token ids: int64 ``[1, length]``."""
    text = (Path(nitro.__file__).parent / "demo" / "data" / f"{book}.txt").read_bytes()
    start = len(text) // 3
    return torch.tensor([list(text[start : start + length])])


def make_model(family: str) -> Any:
    """A small model of bytes with random weights; Qwen2's keys get large biases, as trained ones have."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"vocab_size": 256, "intermediate_size": 192, "initializer_range": 0.1, "max_position_embeddings": 2048}
    if family == "llama":
        config = transformers.LlamaConfig(**sizes, head_dim=64)
        return transformers.LlamaForCausalLM(config).eval()
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0)
    return model


@torch.no_grad()
def run_model(model: Any, ids: Tensor) -> Cache:
    """Return what a forward pass leaves in the cache; a press that is active has compressed it."""
    import transformers

    past = transformers.DynamicCache()
    model(ids, past_key_values=past)
    return Cache(torch.cat([x.keys for x in past.layers]), torch.cat([x.values for x in past.layers]))


@dataclass(frozen=True, slots=True)
class Paged:
    """Several requests in one paged cache, which holds NaN wherever it holds none of their tokens."""

    layers: PagedLayers
    batch: RaggedBatch
    positions: Tensor

    def rows(self, x: Tensor) -> list[Tensor]:
        """A ragged array ``[L, H, total]``, request by request."""
        return list(x.split(self.batch.lengths.tolist(), dim=2))


def page(caches: list[Cache], keep: list[int], *, block_size: int = 16, seed: int = 0) -> Paged:
    """Write the caches of some requests into shuffled blocks."""
    num_layers, num_heads, _, dim = caches[0].keys.shape
    needs = [-(-cache.length // block_size) for cache in caches]
    num_blocks = sum(needs) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(need)] for need in needs]
    shape = num_layers, num_blocks, block_size, num_heads, 2 * dim  # NHD
    memory = torch.full(shape, torch.nan, dtype=caches[0].keys.dtype)
    positions = torch.full((num_layers, num_blocks, num_heads, block_size), -1, dtype=torch.int32)
    for cache, table in zip(caches, tables, strict=True):
        slots = torch.arange(cache.length)
        blocks, within = torch.tensor(table)[slots // block_size], slots % block_size
        memory[:, blocks, within] = torch.cat([cache.keys, cache.values], dim=-1).transpose(1, 2)
        for layer in range(num_layers):
            positions[layer, blocks, :, within] = slots[:, None].int().expand(-1, num_heads)
    batch = RaggedBatch.of(tables, [cache.length for cache in caches], keep)
    return Paged(PagedLayers.of([layer.transpose(1, 2) for layer in memory]), batch, positions)


def nitro_scores(form: str, name: str, caches: list[Cache], paged: Paged) -> list[Tensor]:
    """Return each request's scores ``[L, H, N]`` of one of Nitro's implementations.

    Args:
        form: "reference" or "kernel", on the paged cache; or "policy".
        name: of the score.
        caches: of the requests.
        paged: the same, paged.
    """
    if form == "policy":
        return [policies.get(name).score(_policy_input(cache)) for cache in caches]
    options = {"sinks": SINKS, "lag": LAG} if name == "lagkv" else {}
    function: Callable[..., Tensor] = getattr(score, name if form == "kernel" else f"{name}_ref")
    return paged.rows(function(paged.layers, paged.batch, **options))


def nitro_kept(form: str, scores: list[Tensor], paged: Paged) -> list[Tensor]:
    """Return which tokens stay of each request, bool ``[L, H, N]``; neither sinks nor window are forced."""
    ragged = torch.cat(scores, dim=2)
    if form == "kernel":
        mask, _ = select.select_ragged(ragged, paged.batch)
    else:
        mask, _ = select.select_ragged_ref(ragged, paged.batch)
    return [rows != 0 for rows in paged.rows(mask)]


def _policy_input(cache: Cache) -> ScoreInput:
    layers, heads, length, _ = cache.keys.shape
    return ScoreInput(
        keys=cache.keys,
        values=cache.values,
        positions=torch.arange(length, dtype=torch.int32).expand(layers, heads, length),
        layers=torch.arange(layers),
        heads=torch.arange(heads),
        request_key=1,
        logical_len=length,
        sinks=0,
        window=1,
        seed=0,
    )


def make_press(name: str, ratio: float = 0.0, **options: Any) -> Any:
    import kvpress

    if name == "lagkv":
        return kvpress.LagKVPress(ratio, **{"n_sink": SINKS, "lag_size": LAG, **options})
    return {"keydiff": kvpress.KeyDiffPress, "knorm": kvpress.KnormPress}[name](ratio)


def press_scores(press: Any, cache: Cache) -> Tensor:
    """Return a press's scores ``[L, H, N]``; it sees one layer after the other, as in a model."""
    layers = zip(cache.keys.split(1), cache.values.split(1), strict=True)
    return torch.cat([press.score(None, None, keys, values, None, {}) for keys, values in layers])


def top(scores: Tensor, keep: int) -> Tensor:
    """Return which tokens stay by kvpress's own selection, bool ``[L, H, N]``."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(-1, scores.topk(keep, dim=-1).indices, True)


TALLIES: dict[str, Counter[str]] = {}
"""What has been compared in this run, under what name."""


def compare(label: str, name: str, cache: Cache, want: Tensor, got: Tensor, bound: float | None = None) -> None:
    """Raise unless the tokens that stay are kvpress's, apart from ties.

    A token may differ only where kvpress's score of it, computed in float32 from the same keys and values, is that of
    the last that stays, within the rounding of either side. LagKV's scores are ranks within a part, so there are ties
    between parts (exact ones), and within a part two tokens may change ranks where what was ranked is a tie.

    Args:
        label: what is compared, for the tally.
        name: of the score.
        cache: the tokens.
        want: kvpress's tokens, bool ``[L, H, N]``.
        got: Nitro's.
        bound: in units of the row's largest score; default: ``BOUNDS``.
    """
    cache = cache.to(torch.float32)
    scores = press_scores(make_press(name), cache)
    keep = want.sum(dim=-1, keepdim=True)
    assert torch.equal(got.sum(dim=-1, keepdim=True), keep), "the counts differ"
    ordered = scores.sort(dim=-1, descending=True).values
    last = ordered.gather(-1, (keep - 1).clamp_min(0))
    if name == "lagkv":
        distance = _lagkv_distance(cache, scores, last)
    else:
        distance = (scores - last).abs() / scores.abs().amax(dim=-1, keepdim=True)
    differs = want != got
    worst = float(distance[differs].max()) if bool(differs.any()) else 0.0
    bound = BOUNDS[name] if bound is None else bound
    assert worst <= bound, f"{label}: other tokens stay, {worst:.3g} (of the row's scale) from the last that stays"
    tally = TALLIES.setdefault(label, Counter())
    tally["kept"] += int(keep.sum())
    tally["tied"] += int((differs & got & (scores == last)).sum())
    tally["rounded"] += int((differs & got & (scores != last)).sum())


def _lagkv_distance(cache: Cache, scores: Tensor, last: Tensor) -> Tensor:
    """How far each token is from its own part's token of the last rank that stays, by what ranks are made from."""
    distance = torch.where(scores == last, 0.0, torch.inf)
    parts = (cache.length - SINKS) // LAG
    if parts < 2:
        return distance
    raw = press_scores(make_press("lagkv", cross_scoring=True), cache)
    scored = slice(SINKS, SINKS + (parts - 1) * LAG)
    raw, ranks = (x[..., scored].unflatten(-1, (parts - 1, LAG)) for x in (raw, scores))
    at_last = torch.where(ranks == last.unsqueeze(-1), raw, torch.nan).nansum(dim=-1, keepdim=True)
    off = (raw - at_last).abs() / raw.abs().amax(dim=(-1, -2), keepdim=True)
    off = torch.where((ranks == last.unsqueeze(-1)).any(dim=-1, keepdim=True), off, torch.inf)
    distance[..., scored] = torch.minimum(distance[..., scored], off.flatten(-2))
    return distance


def assert_few_rounded(label: str, share: float = ROUNDED_SHARE) -> None:
    """Of what was compared under this name, few tokens may differ for rounding, so that it does not hide a fault."""
    tally = TALLIES[label]
    assert tally["rounded"] <= share * tally["kept"], f"{label}: {dict(tally)}"
