"""Tests of the oracle itself: it must equal a plain decoder that really evicts, and notice a wrong recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from nitro.collector import PoolView
from nitro.errors import IntegrityError
from nitro.testing import (
    Arch,
    Generated,
    PoolState,
    Recording,
    Report,
    Visibility,
    assert_pool_whole,
    check_recording,
    check_records,
    check_request,
    load_model,
    make_tiny_model,
    masked_logits,
)
from nitro.testing.naive import EvictionRule, NaiveDecoder, NaiveResult, scattered, streaming
from nitro.testing.visibility import kv_owners
from nitro.types import KeepRecord, from_wire, to_wire

Loader = Callable[[Arch, int], PreTrainedModel]

# fp32 rounding of two orders of summation, 1e-5 of the largest logits (they reach 45); seen: 2.2e-4.
LOGIT_ATOL = 4.5e-4


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    @cache
    def load(arch: Arch, num_kv_heads: int) -> PreTrainedModel:
        path = tmp_path_factory.mktemp(f"{arch}-{num_kv_heads}")
        return load_model(make_tiny_model(path, arch, num_kv_heads=num_kv_heads))

    return load


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 511, length)]


def full_attention(model: PreTrainedModel, length: int) -> Visibility:
    return Visibility((), length, model.config.num_attention_heads, model.config.num_key_value_heads)


def check(model: PreTrainedModel, prompt: Sequence[int], result: NaiveResult, **changes: Any) -> Report:
    logprobs = result.logits.log_softmax(-1).max(-1).values.tolist()
    given: dict[str, Any] = {
        "records_by_rank": result.records_by_rank,
        "run_starts": result.run_starts,
        "logprobs": logprobs,
    }
    return check_request(model, prompt, result.output_ids, **(given | changes))


SCATTERED, STREAMING = scattered(7, sinks=2, window=6), streaming(sinks=4)


class TestAgainstNaiveDecoder:
    @pytest.mark.parametrize(
        ("arch", "kv_heads", "tp", "rule", "chunk"),
        [
            pytest.param("llama", 2, 1, SCATTERED, 64, id="llama-gqa"),
            pytest.param("llama", 2, 1, SCATTERED, 10, id="llama-gqa-chunked"),
            pytest.param("llama", 4, 1, SCATTERED, 10, id="llama-mha-chunked"),
            pytest.param("llama", 1, 1, SCATTERED, 10, id="llama-mqa-chunked"),
            pytest.param("llama", 2, 2, SCATTERED, 10, id="llama-gqa-tp2-chunked"),
            pytest.param("llama", 1, 2, SCATTERED, 10, id="llama-mqa-tp2-replicated-chunked"),
            pytest.param("llama", 2, 1, STREAMING, 10, id="llama-gqa-streaming-chunked"),
            pytest.param("qwen2", 4, 1, SCATTERED, 64, id="qwen2-mha"),
            pytest.param("qwen2", 2, 1, SCATTERED, 10, id="qwen2-gqa-chunked"),
            pytest.param("qwen2", 4, 1, SCATTERED, 10, id="qwen2-mha-chunked"),
            pytest.param("qwen2", 4, 2, SCATTERED, 10, id="qwen2-mha-tp2-chunked"),
            pytest.param("qwen2", 2, 4, SCATTERED, 10, id="qwen2-gqa-tp4-replicated-chunked"),
            pytest.param("qwen2", 2, 4, STREAMING, 64, id="qwen2-gqa-tp4-replicated-streaming"),
        ],
    )
    def test_same_tokens_and_logits(
        self, tiny: Loader, arch: Arch, kv_heads: int, tp: int, rule: EvictionRule, chunk: int
    ) -> None:
        model, prompt = tiny(arch, kv_heads), prompt_of(60)
        result = NaiveDecoder(model, rule, keep=16, slack=8, chunk=chunk, tp=tp).generate(prompt, 48)
        inside_prompt = sum(record.logical_len < len(prompt) for record in result.records_by_rank[0])
        assert inside_prompt >= (3 if chunk < len(prompt) else 0)

        report = check(model, prompt, result)

        assert report.mismatches == ()
        assert report.tokens_compared == 48
        assert report.tokens_after_eviction == (48 if inside_prompt else 47)
        assert report.evictions == len(result.records_by_rank[0]) >= 5
        assert report.differs_from_full > 24
        assert report.max_logprob_error < LOGIT_ATOL
        visibility = Visibility(result.records_by_rank, 107, 4, kv_heads)
        logits = masked_logits(model, [*prompt, *result.output_ids[:-1]], visibility, first=59)
        torch.testing.assert_close(logits, result.logits, rtol=0, atol=LOGIT_ATOL)

    @pytest.mark.parametrize("cached_as", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_fp8_cache(self, tiny: Loader, cached_as: torch.dtype) -> None:
        # Sums in another order now and then round to another FP8 number: some logits differ by what that makes.
        model, prompt = tiny("llama", 2), prompt_of(60)
        decoder = NaiveDecoder(model, SCATTERED, keep=16, slack=8, chunk=10, cached_as=cached_as)
        result = decoder.generate(prompt, 48)
        rounded, plain = check(model, prompt, result, cached_as=cached_as), check(model, prompt, result)
        assert len(rounded.mismatches) <= 1
        assert rounded.mean_logprob_error < 0.1 * plain.mean_logprob_error
        assert rounded.differs_from_full > 24

    def test_heads_and_replicas_keep_different_tokens(self, tiny: Loader) -> None:
        # Otherwise the tests above would pass with one mask for all heads.
        decoder = NaiveDecoder(tiny("llama", 2), scattered(7, 2, 6), keep=16, slack=8, chunk=64, tp=4)
        result = decoder.generate(prompt_of(48), 2)
        kept = [records[0].kept[layer, 0].tobytes() for records in result.records_by_rank for layer in range(3)]
        assert len(set(kept)) == 12

    @pytest.mark.parametrize("tp", [1, 2])
    def test_preempted_runs_have_their_own_masks(self, tiny: Loader, tp: int) -> None:
        model, prompt = tiny("llama", 2), prompt_of(40)
        decoder = NaiveDecoder(model, scattered(3, 2, 6), keep=16, slack=8, chunk=10, tp=tp)
        result = decoder.generate(prompt, 50, preempt_at=[15, 30])
        assert result.run_starts == [40, 55, 70]
        assert check(model, prompt, result).mismatches == ()

        late = check(model, prompt, result, run_starts=[40, 60, 70])
        assert {m.index for m in late.mismatches} <= set(range(15, 20))
        assert late.mismatches

    def test_run_without_progress(self, tiny: Loader) -> None:
        model, prompt = tiny("qwen2", 2), prompt_of(40)
        result = NaiveDecoder(model, scattered(3, 2, 6), keep=16, slack=8, chunk=64).generate(prompt, 20)
        second = [[dataclasses.replace(r, run=1) for r in records] for records in result.records_by_rank]
        report = check(model, prompt, result, records_by_rank=second, run_starts=[40, 40])
        assert (report.mismatches, report.tokens_compared) == ((), 20)


class TestPower:
    """A wrong recording must be noticed; otherwise the agreement above says nothing."""

    @pytest.fixture
    def generated(self, tiny: Loader) -> tuple[PreTrainedModel, list[int], NaiveResult]:
        model, prompt = tiny("llama", 2), prompt_of(48, seed=1)
        return model, prompt, NaiveDecoder(model, scattered(5, 2, 6), keep=24, slack=8, chunk=16).generate(prompt, 80)

    def test_one_wrong_position_in_one_head(self, generated: tuple[PreTrainedModel, list[int], NaiveResult]) -> None:
        # Each change is as small as a wrong recording can be, and consistent: one position that the eviction kept
        # and the next one dropped changes places with one that was dropped. It reaches the 8 queries in between.
        model, prompt, result = generated
        (records,) = result.records_by_rank
        later = [i for i, r in enumerate(records[:-1]) if r.logical_len >= len(prompt)]
        errors, flips = [], 0
        for index, layer, head in [(i, layer, head) for i in later for layer in range(3) for head in range(2)]:
            record, kept = records[index], records[index].kept.copy()
            cached = {*records[index - 1].kept[layer, head], *range(records[index - 1].logical_len, record.logical_len)}
            out = max(set(kept[layer, head].tolist()) - set(records[index + 1].kept[layer, head].tolist()))
            kept[layer, head][kept[layer, head] == out] = max(cached - set(kept[layer, head].tolist()))
            kept[layer, head].sort()
            changed = [*records[:index], dataclasses.replace(record, kept=kept), *records[index + 1 :]]
            report = check(model, prompt, result, records_by_rank=[changed])
            errors.append(report.max_logprob_error)
            flips += bool(report.mismatches)
        assert len(errors) >= 40
        assert min(errors) > 5 * LOGIT_ATOL
        assert flips > len(errors) // 2

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param(lambda r: dataclasses.replace(r, kept=r.kept[::-1]), id="layers-swapped"),
            pytest.param(lambda r: dataclasses.replace(r, kept=r.kept[:, ::-1]), id="heads-swapped"),
            pytest.param(lambda r: dataclasses.replace(r, kept=r.kept[..., 1:] - 1), id="one-position-early"),
            pytest.param(lambda r: dataclasses.replace(r, kept=r.kept[..., 1:]), id="first-token-lost"),
            pytest.param(lambda r: dataclasses.replace(r, logical_len=r.logical_len + 4), id="four-tokens-late"),
        ],
    )
    def test_systematic_errors(self, tiny: Loader, wrong: Callable[[KeepRecord], KeepRecord]) -> None:
        model, prompt = tiny("qwen2", 2), prompt_of(48, seed=2)
        # One eviction only: a wrong record can't contradict another one, so that the tokens alone must show it.
        result = NaiveDecoder(model, scattered(6, 2, 6), keep=20, slack=28, chunk=64).generate(prompt, 28)
        ((only,),) = result.records_by_rank
        assert check(model, prompt, result).mismatches == ()
        assert len(check(model, prompt, result, records_by_rank=[[wrong(only)]]).mismatches) >= 3

    def test_eviction_recorded_but_not_done(self, generated: tuple[PreTrainedModel, list[int], NaiveResult]) -> None:
        model, prompt, result = generated
        stock = NaiveDecoder(model, streaming(0), keep=1000, slack=1, chunk=64).generate(prompt, 80)
        assert check(model, prompt, stock).mismatches == ()
        report = check(model, prompt, stock, records_by_rank=result.records_by_rank)
        assert report.differs_from_full == 0
        assert len(report.mismatches) > 40

    def test_eviction_done_but_not_recorded(self, generated: tuple[PreTrainedModel, list[int], NaiveResult]) -> None:
        model, prompt, result = generated
        report = check(model, prompt, result, records_by_rank=[[]])
        assert len(report.mismatches) == report.differs_from_full > 40
        assert report.tokens_after_eviction == 0

    def test_one_wrong_token_is_named_with_its_gap(
        self, generated: tuple[PreTrainedModel, list[int], NaiveResult]
    ) -> None:
        model, prompt, result = generated
        index = len(result.output_ids) - 1
        runner_up = int(result.logits[index].topk(2).indices[1])
        wrong = dataclasses.replace(result, output_ids=[*result.output_ids[:-1], runner_up])
        (mismatch,) = check(model, prompt, wrong, request_id="r", logprobs=None).mismatches
        values = result.logits[index].topk(2).values
        assert (mismatch.request_id, mismatch.run, mismatch.index) == ("r", 0, index)
        assert (mismatch.expected, mismatch.generated) == (result.output_ids[-1], runner_up)
        assert mismatch.gap == pytest.approx(float(values[0] - values[1]), abs=LOGIT_ATOL)

    @pytest.mark.parametrize("arch", ["llama", "qwen2"])
    @pytest.mark.parametrize("kv_heads", [2, 4])
    def test_tiny_models_depend_on_their_context(self, tiny: Loader, arch: Arch, kv_heads: int) -> None:
        model, prompt = tiny(arch, kv_heads), prompt_of(64)
        output = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0)
        tokens = output[0].tolist()
        assert len(set(tokens[64:])) > 60
        kept = [np.r_[0:4, n - 32 : n].astype(np.int32) for n in range(64, 263)]
        records = [KeepRecord("r", 0, n + 64, np.tile(k, (3, kv_heads, 1))) for n, k in enumerate(kept)]
        report = check_request(model, prompt, tokens[64:], [records], [64])
        assert report.differs_from_full == 0
        assert len(report.mismatches) > 150
        assert report.min_gap > 1e-4


class TestStockEquivalence:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(("arch", "kv_heads"), [("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen2", 4)])
    def test_without_records(self, tiny: Loader, arch: Arch, kv_heads: int, implementation: str) -> None:
        model, tokens = tiny(arch, kv_heads), prompt_of(100)
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation(implementation)
            with torch.inference_mode():
                stock = model(input_ids=torch.tensor([tokens])).logits[0, 10:]
            mine = masked_logits(model, tokens, full_attention(model, 100), first=10)
            assert model.config._attn_implementation == implementation
        finally:
            model.set_attn_implementation(before)
        torch.testing.assert_close(mine, stock, rtol=0, atol=LOGIT_ATOL)

    def test_refuses_other_dtypes(self, tiny: Loader, tmp_path: Path) -> None:
        model = load_model(make_tiny_model(tmp_path, "llama", num_kv_heads=2)).bfloat16()
        with pytest.raises(ValueError, match="bfloat16: the oracle needs float32"):
            masked_logits(model, [1, 2], full_attention(model, 2))

    def test_refuses_other_lengths(self, tiny: Loader) -> None:
        model = tiny("llama", 2)
        with pytest.raises(ValueError, match="3 token ids for a mask of 2"):
            masked_logits(model, [1, 2, 3], full_attention(model, 2))

    def test_run_starts_must_fit(self, tiny: Loader) -> None:
        with pytest.raises(ValueError, match=r"run_starts=\[4\] must ascend from the prompt's length, 3"):
            check_request(tiny("llama", 2), [1, 2, 3], [4], [[]], [4])
        record = KeepRecord("r", 1, 3, np.zeros((3, 2, 1), np.int32))
        with pytest.raises(ValueError, match=r"runs \[1\] of 1"):
            check_request(tiny("llama", 2), [1, 2, 3], [4], [[record]], [3])

    def test_no_output(self, tiny: Loader) -> None:
        assert check_request(tiny("llama", 2), [1, 2, 3], [], [[]], [3]) == Report()


@st.composite
def one_request(draw: st.DrawFn) -> tuple[int, int, list[list[KeepRecord]]]:
    """(length, num_kv_heads, records by rank) with evictions that follow each other as an engine's do."""
    length, tp = draw(st.integers(2, 24)), draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    lengths = draw(st.lists(st.integers(2, length + 2), max_size=4, unique=True).map(sorted))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks: list[list[KeepRecord]] = []
    keep = draw(st.integers(1, 2))
    for _ in range(tp):
        cached = [[list(range(0)) for _ in range(max(1, kv_heads // tp))] for _ in range(2)]
        records, previous = [], 0
        for logical_len in lengths:
            for layer in cached:
                for head in layer:
                    head.extend(range(previous, logical_len))
                    head[:] = sorted(rng.choice(head, keep, replace=False).tolist())
            records.append(KeepRecord("r", 0, logical_len, np.array(cached, dtype=np.int32)))
            previous = logical_len
        ranks.append(records)
    return length, kv_heads, ranks


class TestVisibility:
    @given(one_request())
    def test_is_its_definition(self, case: tuple[int, int, list[list[KeepRecord]]]) -> None:
        length, kv_heads, ranks = case
        check_records(ranks, 2, max(1, kv_heads // len(ranks)))
        visibility = Visibility(ranks, length, 4, kv_heads)
        owners = kv_owners(4, kv_heads, len(ranks))
        for layer in range(2):
            mask = np.broadcast_to(visibility.mask(layer), (4, length, length))
            for head, query in np.ndindex(4, length):
                rank, local = owners[head]
                visible, since = set[int](), 0
                for record in ranks[rank]:
                    if record.logical_len <= query:
                        visible, since = set(record.kept[layer, local].tolist()), record.logical_len
                visible |= set(range(since, query + 1))
                assert set(np.flatnonzero(mask[head, query]).tolist()) == visible

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tp", "owners"),
        [
            (4, 4, 1, [(0, 0), (0, 1), (0, 2), (0, 3)]),
            (4, 2, 1, [(0, 0), (0, 0), (0, 1), (0, 1)]),
            (4, 2, 2, [(0, 0), (0, 0), (1, 0), (1, 0)]),
            (4, 4, 2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
            (4, 1, 2, [(0, 0), (0, 0), (1, 0), (1, 0)]),
            (4, 2, 4, [(0, 0), (1, 0), (2, 0), (3, 0)]),
            (6, 2, 2, [(0, 0), (0, 0), (0, 0), (1, 0), (1, 0), (1, 0)]),
        ],
    )
    def test_owners(self, heads: int, kv_heads: int, tp: int, owners: list[tuple[int, int]]) -> None:
        assert kv_owners(heads, kv_heads, tp) == owners

    @pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 2, 3), (9, 3, 2), (4, 3, 1)])
    def test_owners_refuse_what_cannot_be_sharded(self, heads: int, kv_heads: int, tp: int) -> None:
        with pytest.raises(ValueError, match=f"num_kv_heads={kv_heads} cannot be split over tp={tp}"):
            kv_owners(heads, kv_heads, tp)


def record(logical_len: int, kept: Sequence[int], run: int = 0, heads: int = 1, request_id: str = "r") -> KeepRecord:
    return KeepRecord(request_id, run, logical_len, np.tile(np.array(kept, np.int32), (2, heads, 1)))


class TestRecords:
    def test_accepts_evictions_that_follow_each_other(self) -> None:
        records = [record(10, [0, 5, 9]), record(12, [0, 9, 11]), record(12, [0, 11]), record(4, [1, 2], run=1)]
        check_records([records], 2, 1)

    @pytest.mark.parametrize(
        ("records", "message"),
        [
            ([record(10, [0, 5, 10])], r"in \[0, 10\)"),
            ([record(10, [-1, 5])], r"in \[0, 10\)"),
            ([record(10, [])], "non-empty"),
            ([record(10, [0, 5, 5])], "ascend strictly"),
            ([record(10, [5, 0])], "ascend strictly"),
            ([record(10, [0, 5]), record(12, [0, 4, 11])], r"keeps positions \[4\], which the eviction at 10"),
            ([record(10, [0, 5]), record(9, [0, 5])], "recorded after logical_len 10"),
            ([record(10, [0, 5], run=1), record(12, [0, 5])], "recorded after run 1"),
            ([record(10, [0, 5], heads=2)], r"shape \[2, 2, 2\], expected \[2, 1, keep\]"),
        ],
    )
    def test_refuses_contradictions(self, records: list[KeepRecord], message: str) -> None:
        with pytest.raises(IntegrityError, match=message):
            check_records([records], 2, 1)

    @pytest.mark.parametrize("other", [[], [record(10, [0, 1, 2])], [record(11, [0, 1])], [record(10, [0, 1], run=1)]])
    def test_ranks_must_agree_on_counts(self, other: list[KeepRecord]) -> None:
        check_records([[record(10, [0, 1])], [record(10, [3, 7])]], 2, 1)
        with pytest.raises(IntegrityError, match="rank 1 recorded"):
            check_records([[record(10, [0, 1])], other], 2, 1)


class TestRecording:
    def test_wire_survives_message_packing(self) -> None:
        original = KeepRecord("r", 2, 300, np.arange(240, dtype=np.int32).reshape(2, 3, 40)[:, ::-1])
        received = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(original))))
        assert dataclasses.replace(received, kept=original.kept) == original
        assert received.kept.dtype == np.int32
        np.testing.assert_array_equal(received.kept, original.kept)

    def test_combines_ranks_in_any_order(self) -> None:
        parts: list[dict[str, Any]] = [
            {"rank": 1, "tp": 2, "records": [to_wire(record(10, [3]))], "run_starts": {"r": [8, 9]}},
            {
                "rank": 0,
                "tp": 2,
                "records": [record(10, [1]), record(7, [2], request_id="s")],
                "run_starts": {"r": [8, 9]},
            },
        ]
        recording = Recording.combine(parts)
        records, starts = recording.of("r")
        assert starts == (8, 9)
        assert [[r.kept[0, 0, 0] for r in rank] for rank in records] == [[1], [3]]

    @pytest.mark.parametrize("ranks", [[], [(0, 2)], [(0, 2), (0, 2)], [(0, 1), (1, 2)], [(1, 1)]])
    def test_refuses_incomplete_ranks(self, ranks: list[tuple[int, int]]) -> None:
        parts = [{"rank": rank, "tp": tp, "records": [], "run_starts": {}} for rank, tp in ranks]
        with pytest.raises(ValueError, match=r"rank of 0\.\.tp-1 once"):
            Recording.combine(parts)

    def test_refuses_ranks_with_other_runs(self) -> None:
        parts: list[dict[str, Any]] = [
            {"rank": rank, "tp": 2, "records": [], "run_starts": {"r": [8, 9 + rank]}} for rank in (0, 1)
        ]
        with pytest.raises(IntegrityError, match=r"ranks 0 and 1 disagree .* \['r'\]"):
            Recording.combine(parts)

    def test_finds_internal_ids(self) -> None:
        recording = Recording(((),), {"1-0a1b2c3d": (5,), "11-0a1b2c3d": (6,), "x-1": (7,)})
        assert recording.of("1")[1] == (5,)
        assert recording.of("11-0a1b2c3d")[1] == (6,)
        assert recording.of("x-1")[1] == (7,)
        with pytest.raises(ValueError, match="request_id='x' matches 0 of 3 recorded"):
            recording.of("x")

    def test_checks_every_request(self, tiny: Loader) -> None:
        model = tiny("llama", 2)
        outputs, records, starts = [], [], {}
        for index in range(2):
            prompt = prompt_of(30 + index, seed=index)
            decoder = NaiveDecoder(model, scattered(index, 2, 6), keep=16, slack=8, chunk=64)
            result = decoder.generate(prompt, 20)
            key = f"{index}-0000000{index}"
            records += [dataclasses.replace(r, request_id=key) for r in result.records_by_rank[0]]
            starts[key] = result.run_starts
            outputs.append(Generated(str(index), prompt, result.output_ids))
        recording = Recording.combine([{"rank": 0, "tp": 1, "records": records, "run_starts": starts}])
        report = check_recording(model, recording, outputs)
        assert (report.tokens_compared, report.mismatches, report.evictions) == (40, (), len(records))
        assert str(report).startswith("0 of 40 tokens differ from the oracle")
        swapped = [dataclasses.replace(output, request_id=str(1 - i)) for i, output in enumerate(outputs)]
        with pytest.raises(ValueError, match="run_starts"):
            check_recording(model, recording, swapped)

    def test_generated_from_vllm(self) -> None:
        logprobs = [{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-1.0), 9: None}]
        sample = SimpleNamespace(token_ids=(7, 8), logprobs=logprobs)
        output = SimpleNamespace(request_id="3", prompt_token_ids=[1, 2], outputs=[sample])
        assert Generated.from_vllm(output) == Generated("3", [1, 2], [7, 8], [-0.5, -1.0])


class FakeCollector:
    def __init__(self, entries: int = 0) -> None:
        self.entries, self.compared_with = entries, PoolView(np.empty(0, np.int32), np.empty(0, np.int32))

    def __len__(self) -> int:
        return self.entries

    def check_integrity(self, pool: PoolView) -> None:
        self.compared_with = pool


def fake_scheduler(num_blocks: int = 5, collector: FakeCollector | None = None) -> Any:
    """The attributes of vLLM's scheduler that matter, with every block but the null block free."""
    blocks = [SimpleNamespace(block_id=i, ref_cnt=0, is_null=i == 0) for i in range(num_blocks)]
    queue = SimpleNamespace(get_all_free_blocks=lambda: list(blocks[1:]))
    pool = SimpleNamespace(
        num_gpu_blocks=num_blocks, blocks=blocks, free_block_queue=queue, get_num_free_blocks=lambda: num_blocks - 1
    )
    manager = SimpleNamespace(req_to_blocks={}, num_cached_block={})
    coordinator = SimpleNamespace(single_type_managers=(manager,))
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool, coordinator=coordinator), requests={})
    if collector is not None:
        scheduler.nitro = SimpleNamespace(collector=collector)
    return scheduler


class TestPool:
    def test_whole(self) -> None:
        collector = FakeCollector()
        state = assert_pool_whole(fake_scheduler(collector=collector))
        assert state == PoolState(total_blocks=5, free_blocks=4, free_counter=4)
        assert [places.tolist() for places in collector.compared_with] == [[1, 2, 3, 4], []]
        assert assert_pool_whole(fake_scheduler()) == state
        assert assert_pool_whole(state) == state
        assert assert_pool_whole(dataclasses.asdict(state)) == state

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("free_blocks", 3),
            ("free_blocks", 5),
            ("free_counter", 3),
            ("referenced_blocks", 1),
            ("table_entries", 1),
            ("requests", 1),
            ("ledger_entries", 1),
        ],
    )
    def test_every_leak_is_named(self, field: str, value: int) -> None:
        numbers = {"total_blocks": 5, "free_blocks": 4, "free_counter": 4, field: value}
        with pytest.raises(AssertionError, match=f"{field}={value} "):
            assert_pool_whole(numbers)

    def test_leaks_of_a_scheduler(self) -> None:
        scheduler = fake_scheduler(collector=FakeCollector(entries=2))
        pool = scheduler.kv_cache_manager.block_pool
        pool.blocks[3].ref_cnt = 1
        pool.free_block_queue.get_all_free_blocks = lambda: [pool.blocks[1]] * 3
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        manager.req_to_blocks["a"], manager.num_cached_block["b"] = [], 1
        scheduler.requests["a"] = object()
        expected = PoolState(5, 1, 4, referenced_blocks=1, table_entries=2, requests=1, ledger_entries=2)
        assert PoolState.of(scheduler) == expected


class TestTinyModel:
    def test_same_seed_same_weights(self, tmp_path: Path) -> None:
        first, again, other = (
            load_model(make_tiny_model(tmp_path / str(i), "qwen2", num_kv_heads=2, seed=seed)).state_dict()
            for i, seed in enumerate([3, 3, 4])
        )
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first)

    def test_refuses_sizes_that_do_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads=4"):
            make_tiny_model(tmp_path, "llama", num_kv_heads=3)
        with pytest.raises(ValueError, match="qwen2 needs num_heads"):
            make_tiny_model(tmp_path, "qwen2", num_kv_heads=2, hidden=96)
        with pytest.raises(ValueError, match="arch='gpt2'"):
            make_tiny_model(tmp_path, "gpt2", num_kv_heads=2)  # type: ignore[arg-type]

    def test_end_of_sequence_never_wins(self, tiny: Loader) -> None:
        model = tiny("llama", 2)
        assert model.config.eos_token_id == model.generation_config.eos_token_id == 511
        logits = masked_logits(model, prompt_of(200), full_attention(model, 200))
        assert logits[:, 511].abs().max() == 0
        assert logits.max(-1).values.min() > 5
