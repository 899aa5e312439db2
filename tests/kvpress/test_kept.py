"""Nitro's keydiff, knorm and lagkv keep the tokens that kvpress 0.5.5's presses keep, ties apart.

The formulas are the same, and so is the KeyDiff anchor: the mean of *unit* keys, as in the paper's definition, not the
mean of raw keys of its cheaper variant. What differs, and how it is dealt with here:

- kvpress keeps the best by score alone; Nitro's selection also forces sinks and a window. They are set to none here.
  (LagKV's own sinks and last part are in the score, and the same on both sides.)
- kvpress compresses once, after the prefill (the paper's KeyDiff block by block, its ``BlockPress``), Nitro whenever a
  request has outgrown its budget. Compared is one such step.
- kvpress's KeyDiff and LagKV compute in the dtype of the cache, Nitro in float32 (kvpress's KnormPress, too). Compared
  are kvpress's scores of the same keys and values in float32; `test_kvpress_in_the_caches_own_dtype` has the other.
- LagKV divides by the range of the next part. Where a channel does not vary there, kvpress gets NaN for the whole part
  and ranks that; Nitro leaves the channel out.
- Of equal scores, kvpress keeps any (topk and argsort are not stable); Nitro the lower slot.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvpress_parity import (
    LAG,
    ROUNDED_SHARE,
    ROUNDED_SHARE_OF_EQUAL_NORMS,
    SINKS,
    Cache,
    assert_few_rounded,
    compare,
    make_model,
    make_press,
    nitro_kept,
    nitro_scores,
    page,
    press_scores,
    random_cache,
    run_model,
    text_ids,
    top,
)

from nitro.kernels import compact, score, select

if os.environ.get("NITRO_REQUIRE_KVPRESS") != "1":
    pytest.importorskip("kvpress", reason="runs in an environment of its own: bash ci/kvpress.sh")

NAMES = ("keydiff", "knorm", "lagkv")
# There is no LagKV among the policies (nitro.policies), only the kernel.
FORMS = [(form, name) for name in NAMES for form in ("reference", "kernel")] + [("policy", name) for name in NAMES[:2]]
FAMILIES = ("llama", "qwen2")
RATIOS = (0.1, 0.5, 0.85)
BOOKS = (("emma", 501), ("persuasion", 300), ("northanger_abbey", 150))


@functools.cache
def model(family: str) -> torch.nn.Module:
    return make_model(family)


@functools.cache
def caches_of(source: str) -> tuple[Cache, ...]:
    """Three requests' caches in float32: a model's, of three novels, or random ones."""
    if source == "random":
        return tuple(random_cache(length, seed=length) for _, length in BOOKS)
    return tuple(run_model(model(source), text_ids(*book)) for book in BOOKS)


def share_for(name: str, source: str) -> float:
    return ROUNDED_SHARE_OF_EQUAL_NORMS if name == "knorm" and source in FAMILIES else ROUNDED_SHARE


def kept_counts(length: int, ratio: float) -> int:
    from kvpress.utils import compute_n_kept

    return int(compute_n_kept(length, ratio))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [*FAMILIES, "random"])
@pytest.mark.parametrize(("form", "name"), FORMS)
def test_same_tokens_stay(form: str, name: str, source: str, dtype: torch.dtype) -> None:
    label = f"{name}, {form}, {source}, {str(dtype).removeprefix('torch.')}"
    caches = [cache.to(dtype) for cache in caches_of(source)]
    scores = None
    for ratio in RATIOS:
        keep = [kept_counts(cache.length, ratio) for cache in caches]
        paged = page(caches, keep)
        scores = scores or nitro_scores(form, name, caches, paged)
        for cache, count, got in zip(caches, keep, nitro_kept(form, scores, paged), strict=True):
            want = top(press_scores(make_press(name), cache.to(torch.float32)), count)
            compare(label, name, cache, want, got)
    assert_few_rounded(label, share_for(name, source))


@pytest.mark.parametrize("source", [*FAMILIES, "random"])
@pytest.mark.parametrize("form", ["reference", "kernel"])
def test_lagkv_where_no_parts_tie(form: str, source: str) -> None:
    """Every part keeps the same number: then the boundary lies between two ranks, and only rounding is an excuse."""
    label = f"lagkv, {form}, {source}, no ties"
    caches = list(caches_of(source))
    parts = [(cache.length - SINKS) // LAG for cache in caches]
    scores = None
    for share in (1, LAG // 3, LAG - 1):
        keep = [cache.length - (n - 1) * (LAG - share) for cache, n in zip(caches, parts, strict=True)]
        paged = page(caches, keep)
        scores = scores or nitro_scores(form, "lagkv", caches, paged)
        for cache, count, got in zip(caches, keep, nitro_kept(form, scores, paged), strict=True):
            want = top(press_scores(make_press("lagkv"), cache), count)
            compare(label, "lagkv", cache, want, got)
            assert int((want != got).sum()) <= 2  # one swapped pair


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_under_a_press_keeps_what_the_kernels_keep(family: str, name: str) -> None:
    """End to end: what a press leaves in transformers' cache, and what score, select and fill leave in a paged one."""
    label = f"{name}, end to end, {family}"
    ids = text_ids("emma", 501)
    full = run_model(model(family), ids)
    press = make_press(name, 0.4)
    with press(model(family)):
        left = run_model(model(family), ids)
    keep = left.length
    assert keep == kept_counts(full.length, 0.4)
    want = torch.zeros(full.keys.shape[:3], dtype=torch.bool)
    for layer, head in [(layer, head) for layer in range(want.shape[0]) for head in range(want.shape[1])]:
        same = (left.keys[layer, head, :, None] == full.keys[layer, head, None]).all(-1)
        assert bool((same.sum(-1) == 1).all()), "a key that stays is not one of the cache's, or not distinct"
        want[layer, head] = same.any(0)

    paged = page([full], [keep])
    (scores,) = nitro_scores("kernel", name, [full], paged)
    mask, _ = select.select_ragged(scores, paged.batch)
    compact.fill_ragged(paged.layers, paged.batch, mask, paged.positions)
    table, slots, size = paged.batch.block_tables[0].long(), torch.arange(keep), paged.layers.block_size
    where = paged.positions[:, table[slots // size], :, slots % size].permute(1, 2, 0).long()
    rows = torch.stack([paged.layers.rows(layer, table, keep) for layer in range(len(paged.layers.caches))])
    index = where.unsqueeze(-1).expand(-1, -1, -1, full.keys.shape[-1])
    assert torch.equal(rows, torch.cat([full.keys.gather(2, index), full.values.gather(2, index)], dim=-1))
    got = torch.zeros_like(want).scatter_(2, where, True)
    compare(label, name, full, want, got)
    assert_few_rounded(label, share_for(name, family))


@pytest.mark.parametrize(("name", "bound"), [("keydiff", 2**-6), ("knorm", None)])
@pytest.mark.parametrize("family", FAMILIES)
def test_kvpress_in_the_caches_own_dtype(family: str, name: str, bound: float | None) -> None:
    """On a bfloat16 cache kvpress's KeyDiff rounds its scores to 8 bits; KnormPress computes in float32, too."""
    label = f"{name}, kernel, {family}, kvpress in bfloat16"
    caches = [cache.to(torch.bfloat16) for cache in caches_of(family)]
    keep = [kept_counts(cache.length, 0.5) for cache in caches]
    paged = page(caches, keep)
    scores = nitro_scores("kernel", name, caches, paged)
    for cache, count, got in zip(caches, keep, nitro_kept("kernel", scores, paged), strict=True):
        compare(label, name, cache, top(press_scores(make_press(name), cache), count), got, bound)


@pytest.mark.parametrize("form", ["reference", "kernel"])
@pytest.mark.parametrize("length", [1, SINKS, SINKS + 1, SINKS + 2 * LAG - 1, SINKS + 2 * LAG, SINKS + 3 * LAG - 1])
def test_lagkv_scores_around_its_edges(form: str, length: int) -> None:
    """Short sequences, for which there is nothing to rank; the first lengths for which there is. Scores, not tokens."""
    cache = random_cache(length, seed=length)
    (got,) = nitro_scores(form, "lagkv", [cache], page([cache], [length]))
    want = press_scores(make_press("lagkv"), cache)
    assert torch.equal(got, want)


def test_lagkv_unranked_is_cross_scoring() -> None:
    (cache, *_) = caches_of("qwen2")
    paged = page([cache], [cache.length])
    got = score.lagkv(paged.layers, paged.batch, sinks=SINKS, lag=LAG, ranked=False)
    want = press_scores(make_press("lagkv", cross_scoring=True), cache)
    torch.testing.assert_close(got, want, rtol=4e-6, atol=0.0)


def test_lagkv_where_a_channel_does_not_vary() -> None:
    """kvpress divides by zero, and then ranks NaNs; Nitro leaves the channel out, so that the others decide."""
    cache = random_cache(SINKS + 3 * LAG, dim=8)
    cache.keys[..., SINKS + LAG : SINKS + 2 * LAG, 3] = 1.0
    part = slice(SINKS, SINKS + LAG)
    raw = press_scores(make_press("lagkv", cross_scoring=True), cache)
    assert bool(raw[..., part].isnan().all())
    assert bool(raw[..., SINKS + LAG :].isfinite().all())
    (got,) = nitro_scores("reference", "lagkv", [cache], page([cache], [cache.length]))
    assert bool(got.isfinite().all())
    ranks = (got[..., part] * LAG).sort(dim=-1).values
    assert torch.equal(ranks, torch.arange(float(LAG)).expand_as(ranks))


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    length=st.integers(1, 260),
    dim=st.sampled_from([8, 64, 80, 128]),
    ratio=st.floats(0.0, 0.99),
    seed=st.integers(0, 2**31),
)
@example(name="keydiff", length=1, dim=8, ratio=0.99, seed=0)
def test_random_caches(name: str, length: int, dim: int, ratio: float, seed: int) -> None:
    cache = random_cache(length, layers=1, heads=3, dim=dim, seed=seed)
    keep = kept_counts(length, ratio)
    paged = page([cache], [keep], block_size=8, seed=seed)
    (got,) = nitro_kept("reference", nitro_scores("reference", name, [cache], paged), paged)
    want = top(press_scores(make_press(name), cache), keep)
    compare(f"{name}, reference, any random cache", name, cache, want, got)


def keydiff_raw(cache: Cache) -> torch.Tensor:
    """The paper's cheaper variant: the anchor is the mean of raw keys."""
    anchor = cache.keys.mean(dim=2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(cache.keys, anchor, dim=-1)


def keydiff_without_newest(cache: Cache) -> torch.Tensor:
    """The anchor leaves the newest 8 tokens out, as if they were a window."""
    anchor = torch.nn.functional.normalize(cache.keys[:, :, :-8], dim=-1).mean(dim=2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(cache.keys, anchor, dim=-1)


def knorm_squares(cache: Cache) -> torch.Tensor:
    """The L1 norm for L2's."""
    return -cache.keys.abs().sum(-1)


def lagkv_like(cache: Cache, *, shift: int = 0, step: int = 1, use: str = "kv", softmax: bool = True) -> torch.Tensor:
    """LagKV in the plainest PyTorch, with something changed."""
    length, begin = cache.length, SINKS + shift
    parts = (length - begin) // LAG
    out = torch.ones(cache.keys.shape[:3])
    scores = []
    for part in range(parts - 1):
        low = begin + part * LAG
        reference = slice(begin + (part + step) % parts * LAG, begin + ((part + step) % parts + 1) * LAG)
        both = []
        for x in [getattr(cache, {"k": "keys", "v": "values"}[letter]) for letter in use]:
            smallest, largest = x[:, :, reference].amin(2, keepdim=True), x[:, :, reference].amax(2, keepdim=True)
            spread = ((x[:, :, low : low + LAG] - smallest) / (largest - smallest)).std(-1)
            both.append(spread.softmax(-1) if softmax else spread)
        scores.append(sum(both))
        out[:, :, low : low + LAG] = scores[-1].argsort(-1).argsort(-1) / LAG
    return out


WRONG = {
    "raw anchor": ("keydiff", keydiff_raw),
    "no newest in the anchor": ("keydiff", keydiff_without_newest),
    "other sign": ("knorm", lambda cache: cache.keys.norm(dim=-1)),
    "values": ("knorm", lambda cache: -cache.values.norm(dim=-1)),
    "L1": ("knorm", knorm_squares),
    "sinks off by one": ("lagkv", functools.partial(lagkv_like, shift=1)),
    "range of the same part": ("lagkv", functools.partial(lagkv_like, step=0)),
    "range of the part before": ("lagkv", functools.partial(lagkv_like, step=-1)),
    "keys only": ("lagkv", functools.partial(lagkv_like, use="k")),
    "no softmax": ("lagkv", functools.partial(lagkv_like, softmax=False)),
}


@pytest.mark.parametrize("source", [*FAMILIES, "random"])
@pytest.mark.parametrize("what", WRONG)
def test_another_formula_would_be_noticed(what: str, source: str) -> None:
    """The comparison of all above tells near misses apart, on each of the caches that it is made with."""
    name, formula = WRONG[what]
    cache = caches_of(source)[0]
    keep = kept_counts(cache.length, 0.5)
    want = top(press_scores(make_press(name), cache), keep)
    got = select.select_topk_ref(formula(cache), keep, 0, 0)
    mask = torch.zeros_like(want).scatter_(2, got, True)
    with pytest.raises(AssertionError, match="other tokens stay"):
        compare("(wrong formulas)", name, cache, want, mask)


@pytest.mark.parametrize("source", [*FAMILIES, "random"])
def test_the_plain_lagkv_is_right_where_nothing_is_changed(source: str) -> None:
    """So that the test above fails for what is changed."""
    cache = caches_of(source)[0]
    keep = kept_counts(cache.length, 0.5)
    want = top(press_scores(make_press("lagkv"), cache), keep)
    mask = torch.zeros_like(want).scatter_(2, select.select_topk_ref(lagkv_like(cache), keep, 0, 0), True)
    compare("lagkv, plain PyTorch", "lagkv", cache, want, mask)
