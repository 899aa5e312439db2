"""Plans: against what was measured (docs/benchmarks.md), and properties that hold for all."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nitro.capacity.cards import CARDS
from nitro.capacity.holding import Burst, Load, burst, hold
from nitro.capacity.plan import Plan, fitting, make_plan
from nitro.capacity.pool import Layout, cdiv
from nitro.capacity.question import Question
from nitro.capacity.shapes import shape_of
from nitro.cli import main
from nitro.errors import SettingsError
from nitro.planner import BudgetRule

QWEN = Layout.of(shape_of("qwen2.5-0.5b"), block_size=16, kv_bytes=2, tensor_parallel=1)
LLAMA = Layout.of(shape_of("llama-3.1-8b"), block_size=16, kv_bytes=2, tensor_parallel=1)


def rule(budget: int | None, slack: int = 64, *, evict_prompt: bool = True) -> BudgetRule:
    return BudgetRule(4, 32, slack, evict_prompt, budget=budget, ratio=None)


def ask(model: str = "qwen2.5-0.5b", card: str = "l4", **values: Any) -> Plan:
    return make_plan(Question(model, card, **({"budget": 256} | values)))


def users(plan: Plan) -> int:
    assert plan.nitro is not None
    return plan.nitro.users


@pytest.mark.parametrize(("budget", "measured"), [(None, 239_258), (330, 47_591), (256, 38_129)])
def test_the_essays_load_is_played_within_a_thousandth(budget: int | None, measured: int) -> None:
    """2,048 requests of 1,000 + 1,000 tokens at once; measured on an H200 in 1,287 to 1,288 steps."""
    played = burst(rule(budget), Load(1000, 1000), QWEN, requests=2048, chunk=8192, max_seqs=2048)
    assert played.peak_blocks == pytest.approx(measured, rel=1e-3)
    assert 1287 <= played.steps <= 1288
    assert played.peak_running == 2048


def test_the_pool_of_an_l4() -> None:
    """What an L4 had for that model, by a reserve that is a guess."""
    assert ask(max_seqs=2048).stock.blocks == pytest.approx(91_750, rel=0.03)


@pytest.mark.parametrize(("budget", "most"), [(None, 35), (1024, 132)])
def test_running_requests_of_8b_in_9000_blocks(budget: int | None, most: int) -> None:
    """4,096 + 512 tokens each; measured were the most that ran at once, some of them far from their peak."""
    held = hold(rule(budget), Load(4096, 512), LLAMA, 8192)
    guaranteed = fitting(9000, held, Load(4096, 512), 8192)
    assert 0.88 * most <= guaranteed <= most


def test_a_request_by_hand() -> None:
    held = hold(rule(256), Load(1000, 1000), QWEN, 8192)
    assert (held.prefill_peak, held.decode_peak) == (cdiv(1000, 16), cdiv(256 + 64, 16))
    stock = hold(rule(None), Load(1000, 1000), QWEN, 8192)
    assert (stock.prefill_peak, stock.decode_peak, stock.mean_slots) == (63, cdiv(1999, 16), 1500)
    # In chunks of 128, the prompt is evicted on the way: budget, slack - 1, and a chunk.
    chunked = hold(rule(256), Load(1000, 1000), QWEN, 128)
    assert 320 < 16 * chunked.prefill_peak <= 16 * cdiv(256 + 63 + 128, 16)
    spared = hold(rule(256, evict_prompt=False), Load(1000, 1000), QWEN, 8192)
    assert spared.decode_peak == cdiv(1000 + 256 + 64, 16)
    single = hold(rule(256), Load(100, 1), QWEN, 8192)
    assert (single.prefill_peak, single.decode_peak, single.mean_slots) == (7, 7, 100)


def test_prompts_that_come_at_once_share_a_step() -> None:
    load = Load(1000, 1000)
    held = hold(rule(256), load, QWEN, 8192)
    # Nine prompts at most can be in one step: eight whole ones and parts of others.
    assert fitting(1 + 9 * 63 + 20, held, load, 8192) == 10
    assert fitting(1 + 9 * 63 + 19, held, load, 8192) == 9
    assert fitting(1 + 63, held, load, 8192) == 1
    assert fitting(63, held, load, 8192) == 0


lengths = st.integers(1, 3000)


@given(prompt=lengths, answer=lengths, pool=st.integers(2, 5000), slack=st.integers(1, 200), data=st.data())
def test_users_never_fall_when_the_budget_falls(prompt: int, answer: int, pool: int, slack: int, data: Any) -> None:
    small = data.draw(st.integers(36, 2000))
    large = data.draw(st.integers(small, 4000))
    chunk = data.draw(st.sampled_from([64, 512, 8192]))
    load = Load(prompt, answer)
    fit = [fitting(pool, hold(rule(b, slack), load, QWEN, chunk), load, chunk) for b in (small, large, None)]
    assert fit[0] >= fit[1] >= fit[2] == (pool - 1) // cdiv(max(prompt, prompt + answer - 1), 16)


@given(prompt=lengths, answer=lengths, budget=st.integers(36, 2000), slack=st.integers(1, 200))
def test_a_request_never_holds_more_than_the_rule_says(prompt: int, answer: int, budget: int, slack: int) -> None:
    held = hold(rule(budget, slack), Load(prompt, answer), QWEN, 512)
    peak = rule(budget, slack).peak(prompt, 512)
    assert held.prefill_peak <= cdiv(peak, 16)
    assert held.decode_peak <= cdiv(max(budget + slack, peak if answer == 1 else 0), 16)
    assert held.mean_blocks <= held.decode_peak
    assert held.mean_slots <= 16 * held.mean_blocks


@given(slots=st.integers(1, 10**6), block=st.sampled_from([16, 32, 128]))
def test_blocks_are_rounded_as_vllm_rounds_them(slots: int, block: int) -> None:
    layout = replace(QWEN, block_size=block)
    assert (layout.blocks(slots) - 1) * block < slots <= layout.blocks(slots) * block


@given(requests=st.integers(1, 40), prompt=st.integers(1, 300), answer=st.integers(1, 80), seqs=st.integers(1, 64))
def test_a_burst_holds_no_more_than_its_requests(requests: int, prompt: int, answer: int, seqs: int) -> None:
    load = Load(prompt, answer)
    played = burst(rule(64, 16), load, QWEN, requests=requests, chunk=64, max_seqs=seqs)
    held = hold(rule(64, 16), load, QWEN, 64)
    assert 1 <= played.peak_running <= min(requests, seqs)
    assert played.peak_blocks <= played.peak_running * max(held.prefill_peak, held.decode_peak)
    assert played.steps >= cdiv(prompt, 64) + answer - 1
    assert burst(rule(64, 16), load, QWEN, requests=1, chunk=64, max_seqs=1) == Burst(
        max(held.prefill_peak, held.decode_peak), 1, cdiv(prompt, 64) + answer - 1
    )


def test_rooflines_by_hand() -> None:
    plan = ask("llama-3.1-8b", "h200", prompt=1, answer=2, max_seqs=1)
    weights = 2 * (8_030_261_248 - 128_256 * 4096)  # one token at a time reads all but the input embedding
    expected = 4.8e12 / (weights + 2 * 131_072)
    assert plan.stock.decode_tokens_per_s == pytest.approx(expected, rel=1e-6)
    assert plan.stock.tokens_per_s < plan.stock.decode_tokens_per_s
    # With very many short requests it is arithmetic that bounds.
    many = ask("llama-3.1-8b", "h200", prompt=1, answer=2, max_seqs=8192)
    assert many.stock.decode_tokens_per_s == pytest.approx(989e12 / (2 * 7_504_924_672), rel=0.01)


def test_more_memory_smaller_numbers_and_more_gpus_fit_more() -> None:
    base = ask("llama-3.1-8b", "h100")
    for better in (
        ask("llama-3.1-8b", "h200"),
        ask("llama-3.1-8b", "h100", kv_dtype="fp8"),
        ask("llama-3.1-8b", "h100", weight_bits=4),
        ask("llama-3.1-8b", "h100", tensor_parallel=2),
        ask("llama-3.1-8b", "h100", utilisation=0.95),
        ask("llama-3.1-8b", "h100", reserve_gib=0),
    ):
        assert users(better) > users(base)
        assert better.stock.users > base.stock.users
    assert users(ask("llama-3.1-8b", "h100", memory_gib=40)) < users(base)


def test_nitro_pays_for_what_it_keeps_beside_the_cache() -> None:
    plan = ask("llama-3.1-8b", "h200")
    assert plan.nitro is not None
    # 4 bytes for each slot, layer and KV head: 0.8 % of a bf16 cache with 128 channels (docs/architecture.md).
    assert plan.nitro.blocks / plan.stock.blocks == pytest.approx(1 / 1.0078 - 0.25 / 111, abs=5e-4)


def test_refused_models_are_planned_without_nitro() -> None:
    plan = ask("deepseek-v3", "h200", tensor_parallel=8, weight_bits=8)
    assert plan.nitro is None
    assert plan.stock.users > 0
    assert plan.to_dict()["nitro"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget": None}, "neither budget nor ratio"),
        ({"ratio": 0.5}, "budget=256 and ratio=0.5 are both set"),
        ({"budget": 20}, r"budget=20 is below sinks \+ window = 36: raise budget"),
        ({"budget": None, "ratio": 1.0}, "ratio=1.0 is not between 0 and 1"),
        ({"prompt": 0}, "prompt=0 is not between 1"),
        ({"utilisation": 1.5}, "utilisation=1.5 is not between"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4' is not known"),
        ({"max_seqs": 9000}, "max_batched=8192 is below max_seqs=9000"),
        ({"model": "llama-3.1-70b"}, r"does not fit: 131\.4 GiB of weights.*--tensor-parallel"),
        ({"card": "h300"}, "card='h300' is not in the table"),
    ],
)
def test_wrong_questions(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ask(**values)


def test_the_command() -> None:
    arguments = ["plan", "qwen2.5-0.5b", "--card", "l4", "--budget", "256", "--max-seqs", "2048", "--requests", "64"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "12,288 bytes of KV for each token" in done.output
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert found["kv_bytes_per_token"] == 12_288
    assert found["card"]["source"] == CARDS["l4"].source
    assert found["nitro"]["holding"]["decode_peak"] == 20
    assert found["nitro"]["burst"]["peak_running"] == 64
    wrong = CliRunner().invoke(main, ["plan", "qwen2.5-0.5b", "--budget", "10"])
    assert wrong.exit_code == 1
    assert "budget=10 is below sinks + window = 36" in wrong.output


def test_what_cannot_be_served_is_said() -> None:
    for arguments, said in (
        (["gemma-2-9b", "--card", "h100"], "Nitro refuses this model: 21 of 42 layers have a sliding window"),
        (["llama-3.1-8b", "--prompt", "100000", "--budget", "512"], "vLLM will not start"),
        (["qwen2.5-0.5b", "--kv-dtype", "fp8"], "NITRO_ALLOW_UNTESTED_VLLM=1"),
        (["qwen2.5-0.5b"], "at most max_num_seqs=256 requests"),
    ):
        done = CliRunner().invoke(main, ["plan", *arguments], terminal_width=400)
        assert done.exit_code == 0, done.output
        assert said in " ".join(done.output.split()), done.output


def test_planning_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, nitro.capacity.cli as c; c.make_plan(c.Question('qwen3-8b', 'l4', budget=99));"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
