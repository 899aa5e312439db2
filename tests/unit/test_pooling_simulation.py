"""What the simulation of pooling rests on: exact where it must be, and the same as the kernels' reference."""

from __future__ import annotations

import pooling_variants as variants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pooling_model import Reader, stacked
from transformers import LlamaConfig, LlamaForCausalLM

from nitro.eval.case import Case
from nitro.kernels.pool import merge_dense_ref
from nitro.kernels.select import select_topk_ref
from nitro.policies.rotary import Rotation

TAPS, SINKS = 6, 2


def context(length: int = 40, *, seed: int = 0, kinds: int | None = None) -> variants.Context:
    """Random K, V and queries of 2 layers, 2 KV heads and 3 query heads each; ``kinds`` of keys (with RoPE undone)."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(100)[:, None] * 50.0 ** (-torch.arange(0, 16, 2) / 16)
    rotation = Rotation(torch.cat([angles.cos(), angles.sin()], -1), False)
    plain = torch.randn(2, 2, length, 16, generator=generator)
    if kinds is not None:
        plain = plain[:, :, :kinds][:, :, torch.arange(length) % kinds]
    where = torch.arange(length).expand(2, 2, length)
    queries = torch.randn(2, 2, 3, TAPS, 16, generator=generator) * 2
    values = torch.randn(2, 2, length, 16, generator=generator)
    return variants.Context(variants.rotate(plain, rotation, where), plain, values, queries, rotation, SINKS)


def survivors(x: variants.Context, keep: int, seed: int = 0) -> torch.Tensor:
    """Any tokens, sinks among them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(x.keys.shape[:3], generator=generator)
    scores[..., :SINKS] = 2.0
    return scores.topk(keep, dim=-1).indices.sort(dim=-1).values


def test_rope_is_undone_and_done_again() -> None:
    x = context()
    undone = x.rotation.undo(x.keys, torch.arange(40, dtype=torch.int32).expand(2, 2, 40))
    torch.testing.assert_close(undone, x.plain, rtol=1e-4, atol=1e-5)


@given(st.integers(4, 38), st.sampled_from([-1.0, 0.2, 0.6]), st.sampled_from([1.0, 8.0]), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_merging_is_what_the_kernels_do(keep: int, least: float, own: float, seed: int) -> None:
    x = context(seed=seed)
    kept = survivors(x, keep, seed)
    got = variants.merge(x, kept, undone=False, least=least, own=own)
    ones = torch.ones(x.keys.shape[:3], dtype=torch.int32)
    want, _ = merge_dense_ref(x.keys, x.values, ones, kept, protect=SINKS, least=least, own=own)
    torch.testing.assert_close(got.values, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.keys, variants.rows(x.keys, kept))


def test_equal_keys_and_known_masses_lose_nothing() -> None:
    """Tokens of a few kinds, one survivor of each: with masses in the logits, the output is that of all tokens."""
    kinds = 5
    whole = context(SINKS + 30, kinds=kinds)
    # Without RoPE: equal keys stay equal.
    x = variants.Context(whole.plain, whole.plain, whole.values, whole.queries, whole.rotation, 0)
    kept = torch.arange(kinds).expand(2, 2, kinds)
    pooled = variants.merge(x, kept, mass="bias")
    want, _ = variants.attention(x.queries, x.keys, x.values, torch.zeros(x.keys.shape[:3]))
    got, _ = variants.attention(x.queries, pooled.keys, pooled.values, pooled.bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@given(st.integers(3, 40), st.sampled_from([1e-3, 0.1, 10.0]), st.booleans(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_fit_never_increases_the_error_on_its_queries(keep: int, ridge: float, alike: bool, seed: int) -> None:
    x = context(seed=seed, kinds=1 if alike else None)
    kept = survivors(x, keep, seed)
    before, after = variants.stripped(x, kept), variants.fit(x, kept, ridge=ridge, taps=TAPS)
    queries = x.queries_ahead()
    want, _ = variants.attention(queries, x.keys, x.values, torch.zeros(x.keys.shape[:3]))

    def error(of: variants.Survivors) -> torch.Tensor:
        return (variants.attention(queries, of.keys, of.values, of.bias)[0] - want).square().sum((2, 3)).sqrt()

    assert after.values.isfinite().all()
    assert (error(after) <= error(before) * (1 + 1e-4) + 1e-4).all()
    if ridge < 0.01 and keep > 20 and not alike:
        assert (error(after) < 0.5 * error(before) + 1e-4).all()


def newest(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, logical_len: int) -> torch.Tensor:
    """A policy that keeps what is new."""
    return positions.float()


def test_one_round_is_one_eviction_and_many_keep_what_the_policy_says() -> None:
    x = context()
    options = {"least": 0.0, "own": 2.0}
    once, stays = variants.in_rounds(x, newest, 12, window=3, slack=28, merging=options)
    every = torch.arange(40).expand(x.keys.shape[:3])
    kept = select_topk_ref(every.float(), 12, SINKS, 3)
    assert torch.equal(stays, kept)
    ones = torch.ones(x.keys.shape[:3], dtype=torch.int32)
    want, _ = merge_dense_ref(x.keys, x.values, ones, kept, protect=SINKS, least=0.0, own=2.0)
    torch.testing.assert_close(once.values, want)
    plain, stays = variants.in_rounds(x, newest, 12, window=3, slack=5)
    assert torch.equal(stays, kept)
    assert torch.equal(plain.values, variants.rows(x.values, kept))
    assert variants.spread(plain.values, variants.rows(x.values, kept)) == 1.0
    often, _ = variants.in_rounds(x, newest, 12, window=3, slack=5, merging={"least": -1.0, "own": 1.0})
    assert variants.spread(often.values, plain.values) < 0.9


def test_nothing_evicted_changes_no_bit() -> None:
    x = context()
    kept = torch.arange(40).expand(2, 2, 40)
    for pooled in (variants.merge(x, kept), variants.merge(x, kept, undone=False, own=8.0)):
        assert torch.equal(pooled.values, x.values)
    torch.testing.assert_close(variants.shift(x, kept).values, x.values)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def test_reading_over_the_whole_context_is_the_model_itself(model: LlamaForCausalLM) -> None:
    tokens = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    case = Case("case", tuple(tokens[:30]), tuple(tokens[30:44]), tuple(tokens[44:]))
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]])).logits[0, -6:].log_softmax(-1)
    want = -float(logits.gather(1, torch.tensor(case.answer)[:, None]).mean())
    reader = Reader(model, TAPS, SINKS)
    x, last = reader.prefill(case.context)
    everything = torch.arange(30).expand(x.keys.shape[:3])
    kept = survivors(x, 12)
    caches = stacked([variants.stripped(x, everything), variants.merge(x, everything)])
    passed: list = []
    first, second = reader.read(case, last, caches, None)
    assert first.nll == pytest.approx(want, abs=1e-5)
    assert second == first
    whole = stacked([variants.stripped(x, everything)])
    reader.read(case, last, whole, passed)
    evicted = stacked([variants.stripped(x, kept), variants.shift(x, kept)])
    assert float(reader.output_errors(passed, whole, whole).max()) == 0.0
    errors = reader.output_errors(passed, whole, evicted)
    assert errors.shape == (2, 2)
    assert (errors > 1e-3).all()
    none, _ = reader.read(case, last, evicted)
    assert none.nll != pytest.approx(want, abs=1e-5)
