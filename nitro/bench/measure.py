"""What one engine did under one load, as vLLM's front-end sees it: a sample for each step that gave tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nitro.bench.plan import Load
from nitro.errors import IntegrityError

COLUMNS = ("time_s", "running", "usage", "preempted", "tokens")
_EVERY_S = 0.25
_MOST_SAMPLES = 1500


class Measured:
    """An engine whose statistics are collected step by step."""

    def __init__(self, llm: Any, report: Callable[[dict[str, Any]], None]) -> None:
        """Listen to an engine.

        Args:
            llm: vLLM's ``LLM`` with ``disable_log_stats=False``.
            report: called with the progress, a few times a second.
        """
        self.llm = llm
        self._report = report
        llm.llm_engine.logger_manager.record = self._record
        self._clear()

    def _clear(self) -> None:
        self._samples: list[tuple[float, int, float, int, int]] = []
        self._first: list[float] = []
        self._between: list[float] = []
        self._tokens = 0
        self._started = self._said = time.perf_counter()

    def _record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
        if scheduler_stats is None:
            return
        now, tokens, preempted = time.perf_counter(), 0, 0
        if iteration_stats is not None:
            self._first += iteration_stats.time_to_first_tokens_iter
            self._between += iteration_stats.inter_token_latencies_iter
            tokens, preempted = iteration_stats.num_generation_tokens, iteration_stats.num_preempted_reqs
        running, usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
        self._samples.append((now - self._started, running, usage, preempted, tokens))
        self._tokens += tokens
        if now - self._said > _EVERY_S:
            self._said = now
            self._report({"progress": {"tokens": self._tokens, "running": running, "usage": usage}})

    def run(self, load: Load, seed: int, *, blocks: int, vocab: int) -> dict[str, Any]:
        """Let the engine serve a load of random prompts; return the figures and the samples.

        Args:
            load: what to serve; every answer has its full length.
            seed: of the prompts.
            blocks: of the pool, the null block included.
            vocab: size of the vocabulary.

        Raises:
            IntegrityError: an answer is shorter than it was asked to be.
        """
        from vllm import SamplingParams

        tokens = np.random.default_rng(seed).integers(0, min(vocab, 100_000), (load.requests, load.prompt)).tolist()
        own = None if load.budget is None else {"nitro": {"budget": load.budget}}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=load.answer, ignore_eos=True, detokenize=False, extra_args=own
        )
        before = self._evictions()
        self._clear()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)
        seconds = time.perf_counter() - self._started
        answered = sum(len(output.outputs[0].token_ids) for output in outputs)
        if answered != load.requests * load.answer:
            raise IntegrityError(f"{load} was answered with {answered} tokens")
        _, running, usage, preempted, _ = zip(*self._samples, strict=True)
        return {
            "seconds": seconds,
            "tokens_per_s": answered / seconds,
            "peak_blocks": round(max(usage) * (blocks - 1)),
            "peak_running": max(running),
            "mean_running": statistics.fmean(running),
            "preemptions": sum(preempted),
            "steps": len(running),
            "evictions": self._evictions() - before,
            **percentiles("ttft_s", self._first),
            **percentiles("itl_ms", [1e3 * gap for gap in self._between]),
            "series": series(self._samples, blocks),
        }

    def _evictions(self) -> int:
        if "nitro" not in self.llm.llm_engine.vllm_config.additional_config:
            return 0
        return sum(int(part["evictions"]) for part in self.llm.collective_rpc("nitro_stats"))


def percentiles(name: str, values: list[float]) -> dict[str, float]:
    """Return the median and the 95th percentile under their names; nothing where there are no values."""
    return {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 95)} if values else {}


def series(samples: list[tuple[float, int, float, int, int]], blocks: int) -> dict[str, list[float]]:
    """Return the samples as columns, thinned out to what a picture shows: counts are summed up, the others sampled.

    Args:
        samples: (time, running, usage, preempted, tokens) for each step.
        blocks: of the pool, the null block included.

    Returns:
        ``time_s``, ``running`` and ``blocks`` of every so many steps, and ``preemptions`` and ``tokens`` until then.
    """
    table = np.asarray(samples, dtype=np.float64).reshape(-1, len(COLUMNS))
    sums = np.cumsum(table[:, 3:], axis=0)
    every = max(1, -(-len(table) // _MOST_SAMPLES))
    kept = np.unique(np.append(np.arange(0, len(table), every), len(table) - 1))
    return {
        "time_s": table[kept, 0].round(4).tolist(),
        "running": table[kept, 1].astype(int).tolist(),
        "blocks": (table[kept, 2] * (blocks - 1)).round().astype(int).tolist(),
        "preemptions": sums[kept, 0].astype(int).tolist(),
        "tokens": sums[kept, 1].astype(int).tolist(),
    }
