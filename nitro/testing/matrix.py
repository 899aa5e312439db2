"""The oracle matrix: scenarios that stress one thing each, on real vLLM engines with tiny models.

A scenario fixes the engine (pool, chunk size, prefix caching) and the requests. Policies are switched on the running
engine, since the scheduler's counts do not depend on them; so one engine serves a whole row of the matrix.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nitro.pooling import POOLING
from nitro.testing.oracle import Generated, Report, check_recording
from nitro.testing.recording import Recording

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Mode = Literal["in-process", "multi-process", "tp2"]
MODES: tuple[Mode, ...] = ("in-process", "multi-process", "tp2")
POLICIES = ("streaming", "random", "knorm", "vnorm", "keydiff", "kvdiff", "vdiff", "gravity")
ARCHITECTURES = {
    "llama-gqa": ("llama", 2),
    "llama-mha": ("llama", 4),
    "qwen2-gqa": ("qwen2", 2),
    "qwen2-mha": ("qwen2", 4),
}
BLOCK = 32
TIE = 1e-3
"""Logits closer than this may be ordered either way by rounding: the two fp32 implementations differ by up to 2e-4."""
LOGPROB_ERROR = 1e-3
"""The bound on a log-probability; without eviction the engine and the reference differ by less than 1e-4."""
VOCAB = 511  # the last token of the tiny models is the end of sequence


@dataclass(frozen=True, slots=True)
class Scenario:
    """One column of the matrix.

    Attributes:
        name: of the column.
        prompts: lengths of the prompts, in tokens.
        max_tokens: tokens to generate per request.
        shared_prefix: tokens that all prompts share; half of the requests come after the others, so that they hit.
        chunk: ``max_num_batched_tokens``; prompts longer than this are prefilled in chunks, with evictions in between.
        blocks: of the pool; few of them force preemptions.
        prefix_caching: whether it is on.
        settings: of Nitro.
        requests: what each request asks for itself (None: nothing), one a prompt; empty where none asks for anything.
    """

    name: str
    prompts: tuple[int, ...]
    max_tokens: int
    shared_prefix: int = 0
    chunk: int = 1024
    blocks: int = 120
    max_model_len: int = 512
    prefix_caching: bool = False
    settings: dict[str, Any] | None = None
    requests: tuple[dict[str, Any] | str | None, ...] = ()

    def asked(self, index: int) -> dict[str, Any]:
        """Return the settings under which a request is served: its own before the server's."""
        server = self.settings or _SETTINGS
        own = self.requests[index] if self.requests else None
        own = json.loads(own) if isinstance(own, str) else own or {}
        replaced = {"budget", "ratio", "threshold"} if {"budget", "ratio"} & own.keys() else set()
        return {"enabled": True, **{k: v for k, v in server.items() if k not in replaced}, **own}

    def allows(self, index: int, logical_len: int, kept: int) -> bool:
        """Return whether so many tokens of a request may stay after an eviction: by the settings, not by the code."""
        asked = self.asked(index)
        spared = 0 if asked.get("evict_prompt", True) else min(self.prompts[index], logical_len)
        least = asked["sinks"] + asked["window"]
        if asked.get("budget") is not None:
            return kept == spared + asked["budget"]
        if asked.get("ratio") is not None:
            return kept == spared + max(math.ceil(asked["ratio"] * (logical_len - spared)), least)
        low, high = asked.get("min_keep", least), asked.get("max_keep", logical_len)
        return bool(spared + low <= kept <= spared + high)

    def tokens(self, seed: int) -> list[list[int]]:
        """Return the prompts' token ids, the same for the same seed."""
        generator = np.random.default_rng(seed)
        shared = generator.integers(0, VOCAB, self.shared_prefix).tolist()
        return [
            shared[:length] + generator.integers(0, VOCAB, max(length - self.shared_prefix, 0)).tolist()
            for length in self.prompts
        ]


_SETTINGS = {"policy": "keydiff", "budget": 72, "sinks": 4, "window": 16, "slack": 24, "seed": 3}
SCENARIOS = {
    s.name: s
    for s in (
        Scenario("plain", (20, 75, 130, 201), 90),
        Scenario("prefix", (150, 170, 165, 140, 152, 171), 60, shared_prefix=130, prefix_caching=True),
        Scenario("chunked", (230, 180, 300, 65), 50, chunk=64),
        Scenario("tight", (20, 33, 60, 28, 40, 62, 31, 50), 120, blocks=9, max_model_len=224),
        Scenario(
            "all", (70, 150, 75, 130, 95, 140, 80, 120), 90, shared_prefix=66, chunk=64, blocks=9, max_model_len=256,
            prefix_caching=True,
        ),
        Scenario(
            "mixed", (150, 160, 145, 155, 90, 170, 140, 165), 70, shared_prefix=66, chunk=64, blocks=14,
            max_model_len=256, prefix_caching=True,
            requests=(
                None, {"budget": 40, "slack": 10}, {"enabled": False}, {"ratio": 0.5},
                {"evict_prompt": False, "budget": 24}, '{"budget": 100, "slack": 16}', {"slack": 1},
                {"ratio": 0.3, "slack": 12},
            ),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell of the matrix showed.

    Attributes:
        report: of the oracle.
        preemptions: runs beyond the first, over all requests.
        cached_tokens: prompt tokens served from the prefix cache.
        prompt_evictions: evictions that happened before a prompt was complete.
        pool_whole: whether every block was free afterwards.
        left_over: requests that some worker still remembers.
        kept: per request, for each of its evictions, the tokens it had (evicted ones included) and how many stayed.
    """

    report: Report
    preemptions: int
    cached_tokens: int
    prompt_evictions: int
    pool_whole: bool
    left_over: int
    kept: tuple[tuple[tuple[int, int], ...], ...]

    def faults(self, scenario: Scenario, *, tie: float = TIE, logprob_error: float = LOGPROB_ERROR) -> list[str]:
        """Return what is wrong, or what was not exercised although the scenario is there for it."""
        found = []
        wrong = [m for m in self.report.mismatches if m.gap >= tie]
        if wrong:
            found.append(f"{len(wrong)} mismatches, first: {wrong[0]}")
        if self.report.max_logprob_error > logprob_error:
            found.append(
                f"log-probabilities differ by up to {self.report.max_logprob_error:.1e} (bound {logprob_error})"
            )
        found += self._wrong_counts(scenario)
        if self.report.differs_from_full < self.report.tokens_after_eviction // 4:
            found.append(
                f"only {self.report.differs_from_full} tokens differ from full attention: the test has no power"
            )
        if scenario.blocks < 20 and not self.preemptions:
            found.append("no request was preempted")
        if scenario.shared_prefix and scenario.prefix_caching and not self.cached_tokens:
            found.append("no prefix-cache hit")
        by_data = (scenario.settings or _SETTINGS).get("threshold") is not None  # which is known some steps later
        if scenario.chunk < max(scenario.prompts) and not self.prompt_evictions and not by_data:
            found.append("no eviction between the chunks of a prompt")
        if not self.pool_whole:
            found.append("blocks are still held after the run")
        if self.left_over:
            found.append(f"workers still remember {self.left_over} requests")
        return found

    def _wrong_counts(self, scenario: Scenario) -> Iterator[str]:
        for index, evictions in enumerate(self.kept):
            asked = scenario.asked(index)
            # Whether the data asks for an eviction of a request is up to the data.
            if bool(evictions) != asked["enabled"] and (evictions or asked.get("threshold") is None):
                yield f"request {index} has {len(evictions)} evictions, although it asked for {asked}"
                continue
            wrong = [(had, kept) for had, kept in evictions if not scenario.allows(index, had, kept)]
            if wrong:
                had, kept = wrong[0]
                yield f"request {index} kept {kept} of {had} tokens, but asked for {asked}"


@contextmanager
def engine(
    model: Path, scenario: Scenario, mode: Mode, *, runner: Literal["V1", "V2"] = "V1", **overrides: Any
) -> Iterator[Any]:
    """Yield a ``vllm.LLM`` with Nitro for a scenario, on one of vLLM's model runners, and shut it down afterwards."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if mode == "in-process" else "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    if mode == "tp2":  # one core per rank; vLLM binds by NUMA node otherwise, and most machines have one
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    import nitro

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": scenario.max_model_len,
        "max_num_seqs": 16,
        "max_num_batched_tokens": scenario.chunk,
        "num_gpu_blocks_override": scenario.blocks,
        "kv_cache_memory_bytes": 64 * 2**20,
        "enable_prefix_caching": scenario.prefix_caching,
        "tensor_parallel_size": 2 if mode == "tp2" else 1,
        "additional_config": nitro.vllm_config(**(scenario.settings or _SETTINGS)),
        "seed": 0,
    }
    llm = LLM(str(model), **{**arguments, **overrides})
    try:
        yield llm
    finally:
        if shutdown := getattr(llm.llm_engine.engine_core, "shutdown", None):
            shutdown()
        del llm
        gc.collect()
        if mode == "in-process":
            cleanup_dist_env_and_memory()


def run_cell(
    llm: Any,
    reference: PreTrainedModel,
    scenario: Scenario,
    policy: str,
    seed: int = 0,
    prompts: list[list[int]] | None = None,
    cached_as: torch.dtype | None = None,
) -> Outcome:
    """Run a scenario's requests under a policy on a running engine, and hold the result against the oracle.

    Args:
        llm: the engine, a ``vllm.LLM``.
        reference: the oracle's model.
        scenario: what runs.
        policy: Nitro's, from now on.
        seed: of the prompts.
        prompts: token ids, instead of the scenario's random ones.
        cached_as: the FP8 dtype of the engine's cache, if it is one.
    """
    from vllm import SamplingParams

    llm.collective_rpc("nitro_set_policy", args=(policy,))
    llm.collective_rpc("nitro_record", args=(True,))
    llm.reset_prefix_cache()
    inputs = [{"prompt_token_ids": ids} for ids in prompts or scenario.tokens(seed)]
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=scenario.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args={"nitro": own} if own is not None else None,
        )
        for own in scenario.requests or [None] * len(inputs)
    ]
    # Prefixes are published as they are computed; the second wave finds them, while the first was already evicted.
    middle = len(inputs) // 2 if scenario.shared_prefix else len(inputs)
    waves = [slice(0, middle), slice(middle, None)]
    outputs = [out for w in waves if inputs[w] for out in llm.generate(inputs[w], sampling[w], use_tqdm=False)]
    recording = Recording.combine(llm.collective_rpc("nitro_take_recording"))
    generated = [Generated.from_vllm(out) for out in outputs]
    server: dict[str, Any] = scenario.settings or _SETTINGS
    merging = POOLING[server.get("pooling", "none")]
    report = check_recording(
        reference, recording, generated, cached_as=cached_as, merging=merging, sinks=server["sinks"]
    )
    lengths = {recording.internal_id(g.request_id): len(g.prompt_ids) for g in generated}
    pool_whole = bool(llm.reset_prefix_cache())  # refused while anybody holds a block
    # Workers hear of finished requests with the next step, so let there be one.
    llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return Outcome(
        report=report,
        preemptions=sum(len(starts) - 1 for starts in recording.run_starts.values()),
        cached_tokens=sum(out.num_cached_tokens or 0 for out in outputs),
        prompt_evictions=sum(r.logical_len < lengths[r.request_id] for r in recording.records_by_rank[0]),
        pool_whole=pool_whole,
        left_over=sum(part["requests"] for part in llm.collective_rpc("nitro_stats")),
        kept=tuple(
            tuple((record.logical_len, record.kept.shape[-1]) for record in recording.of(g.request_id)[0][0])
            for g in generated
        ),
    )


def summary(outcome: Outcome) -> dict[str, int | float]:
    """Return the figures of a cell as plain numbers, for reports."""
    report = outcome.report
    return {
        "tokens": report.tokens_compared,
        "after_eviction": report.tokens_after_eviction,
        "mismatches": len(report.mismatches),
        "differs_from_full": report.differs_from_full,
        "evictions": report.evictions,
        "preemptions": outcome.preemptions,
        "cached_tokens": outcome.cached_tokens,
        "prompt_evictions": outcome.prompt_evictions,
        "min_gap": report.min_gap,
        "max_logprob_error": report.max_logprob_error,
    }


def variant(scenario: Scenario, **changes: Any) -> Scenario:
    """Return a scenario with some of Nitro's settings changed."""
    return replace(scenario, settings={**(scenario.settings or _SETTINGS), **changes})


THRESHOLDS = {"gravity": 0.9, "kvdiff": 1.0, "random": 0.5}
"""What some, but not all tokens of the tiny models reach."""


def by_threshold(scenario: Scenario, policy: str) -> Scenario:
    """Return a scenario in which the data decides how many tokens stay."""
    bounds = {"threshold": THRESHOLDS[policy], "min_keep": 40, "max_keep": 150}
    return variant(scenario, budget=None, slack=12, policy=policy, **bounds)
