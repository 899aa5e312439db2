#!/usr/bin/env python3
"""Stock vLLM and Nitro side by side on one GPU: throughput, latency, preemptions and blocks.

    python3 ci/bench_engines.py [--suite essay|ample|llama8b[_long][_fp8]] [--rounds N] [--json FILE]

All engines of a suite are alive at once, each in processes of its own, and serve the same requests in turn, so that
what the machine does meanwhile hits all of them. Weights are dummies of a real model's shape; vLLM's defaults stay on
(asynchronous scheduling, prefix caching, chunked prefill, full and piecewise CUDA graphs), and graphs are captured up
to the number of requests for all. Prompts are random tokens, new ones in each round; every answer has its full length.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Engine:
    """One engine: Nitro's settings (None: stock), the blocks of 16 tokens in its pool, whether they are FP8."""

    name: str
    blocks: int
    nitro: dict[str, Any] | None = None
    fp8: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def pool(self, block_bytes: int) -> dict[str, Any]:
        """Return vLLM's arguments for the pool, given the bytes of a block in bf16."""
        nbytes = self.blocks * block_bytes // (2 if self.fp8 else 1)
        pool = {"num_gpu_blocks_override": self.blocks, "kv_cache_memory_bytes": nbytes}
        return pool | ({"kv_cache_dtype": "fp8"} if self.fp8 else {})


@dataclass(frozen=True)
class Load:
    """So many requests at once, with prompts and answers of so many tokens."""

    requests: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.requests} x ({self.prompt} + {self.answer})"


@dataclass(frozen=True)
class Suite:
    """What runs on what; ``block_bytes`` are those of a block of all layers in bf16.

    The engines of a suite are alive together, so their weights and pools have to fit the GPU together.
    """

    shape: str
    engines: tuple[Engine, ...]
    loads: tuple[Load, ...]
    block_bytes: int
    rounds: int = 1
    max_batched: int = 8192


_ESSAY = {"policy": "keydiff", "budget": 256, "slack": 64}
_TIGHT = 91_750  # what an L4 has for this model
_LLAMA_BLOCKS = 9_000  # 18.9 GB; of FP8, twice as many blocks take as much


def _llama(load: Load, quarter: int, slack: int) -> dict[str, Suite]:
    """Return two suites: with budgets of 1/4 and 1/8 of the tokens, and with FP8 caches; stock is in both.

    All five engines, each with 16 GB of weights and about 3 GB beside weights and pool, would not fit 140 GB. Nor
    would four with any ease.
    """
    nitro = {"policy": "keydiff", "slack": slack}
    stock = Engine("stock", _LLAMA_BLOCKS)
    to_quarter, to_eighth = (nitro | {"budget": budget} for budget in (quarter, quarter // 2))
    engines = {
        "": (
            stock,
            Engine("nitro 1/4", _LLAMA_BLOCKS, to_quarter),
            Engine("nitro 1/8", _LLAMA_BLOCKS, to_eighth),
        ),
        "_fp8": (
            stock,
            Engine("stock, fp8", 2 * _LLAMA_BLOCKS, fp8=True),
            Engine("nitro 1/4, fp8", 2 * _LLAMA_BLOCKS, to_quarter, fp8=True),
        ),
    }
    return {name: Suite("llama-3.1-8b", chosen, (load,), 16 * 131_072) for name, chosen in engines.items()}


SUITES = {
    "essay": Suite(
        "qwen2.5-0.5b",
        (
            Engine("stock", _TIGHT),
            Engine("nitro", _TIGHT, _ESSAY),
            Engine("stock, pool without limit", 2048 * 126),
        ),
        (Load(2048, 1000, 1000),),
        16 * 12_288,
    ),
    "ample": Suite(
        "qwen2.5-0.5b",
        (Engine("stock", _TIGHT), Engine("nitro", _TIGHT, {"policy": "keydiff", "budget": 2048})),
        (Load(8, 256, 512), Load(256, 256, 384), Load(2048, 256, 256)),
        16 * 12_288,
        rounds=3,
    ),
    **{f"llama8b{name}": suite for name, suite in _llama(Load(256, 4096, 2048), 1536, 128).items()},
    **{f"llama8b_long{name}": suite for name, suite in _llama(Load(128, 16_000, 1000), 4250, 256).items()},
}


def serve(suite: Suite, engine: Engine, model: str, connection: Connection) -> None:
    """Be one engine: run what comes over the connection, and answer with what was measured."""
    most = max(load.requests for load in suite.loads)
    longest = max(load.prompt + load.answer for load in suite.loads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    sizes = [1, 2, 4, 8, 16, 32, 64, 128, *range(256, most + 1, 128)]
    started = time.perf_counter()
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": 16,
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": suite.max_batched,
        **engine.pool(suite.block_bytes),
        "gpu_memory_utilization": 0.05,
        "compilation_config": {"cudagraph_capture_sizes": [size for size in sizes if size <= most]},
        "disable_log_stats": False,
        "additional_config": {} if engine.nitro is None else {"nitro": engine.nitro},
        "seed": 0,
    }
    llm = LLM(model, **(arguments | engine.arguments))
    measured = Measured(llm, engine.blocks)
    connection.send(time.perf_counter() - started)
    while (job := connection.recv()) is not None:
        connection.send(measured.run(*job))


class Measured:
    """An engine whose statistics are collected step by step, as vLLM's front-end gets them."""

    def __init__(self, llm: Any, blocks: int) -> None:
        self.llm = llm
        self.blocks = blocks
        manager = llm.llm_engine.logger_manager
        manager.record = self._record
        self._clear()

    def _clear(self) -> None:
        self.running: list[int] = []
        self.usage: list[float] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.preemptions = 0

    def _record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
        if scheduler_stats is not None:
            self.running.append(scheduler_stats.num_running_reqs)
            self.usage.append(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.first += iteration_stats.time_to_first_tokens_iter
            self.between += iteration_stats.inter_token_latencies_iter
            self.preemptions += iteration_stats.num_preempted_reqs

    def run(self, load: Load, seed: int) -> dict[str, Any]:
        import numpy as np
        from vllm import SamplingParams

        tokens = np.random.default_rng(seed).integers(0, 100_000, (load.requests, load.prompt)).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True, detokenize=False)
        before = self._evictions()
        self._clear()
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        answered = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert answered == load.requests * load.answer, answered
        return {
            "seconds": seconds,
            "tokens_per_s": answered / seconds,
            "peak_blocks": round(max(self.usage) * (self.blocks - 1)),
            "peak_running": max(self.running),
            "mean_running": statistics.fmean(self.running),
            "preemptions": self.preemptions,
            "steps": len(self.running),
            "evictions": self._evictions() - before,
            **_percentiles("ttft_s", self.first),
            **_percentiles("itl_ms", [1e3 * seconds for seconds in self.between]),
        }

    def _evictions(self) -> int:
        if "nitro" not in self.llm.llm_engine.vllm_config.additional_config:
            return 0
        return sum(part["evictions"] for part in self.llm.collective_rpc("nitro_stats"))


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    import numpy as np

    return {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 95)} if values else {}


def run_suite(suite: Suite, rounds: int) -> list[dict[str, Any]]:
    """Start the suite's engines, and let them serve each load in turn, ``rounds`` times."""
    context = multiprocessing.get_context("spawn")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[suite.shape] | {"max_position_embeddings": 32_768, "torch_dtype": "bfloat16", "eos_token_id": 0}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        running = []
        for engine in suite.engines:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(suite, engine, folder, theirs))
            process.start()
            theirs.close()
            running.append((engine, process, ours))
        try:
            for engine, _, connection in running:
                print(f"{engine.name}: ready after {connection.recv():.0f} s", flush=True)
            for load in suite.loads:
                for number in range(rounds + (suite.rounds > 1)):
                    # With several rounds, the first is for the caches of all kinds, and does not count.
                    warm = suite.rounds > 1 and number == 0
                    order = running if number % 2 == 0 else running[::-1]
                    for engine, _, connection in order:
                        connection.send((load, number))
                        found = {"load": str(load), "engine": engine.name, "round": number} | connection.recv()
                        if not warm:
                            results.append(found)
                        print(line(found) + ("  (warm-up)" if warm else ""), flush=True)
        finally:
            for _, process, connection in running:
                if process.is_alive():
                    connection.send(None)
                process.join(20)
                process.kill()
    return results


def line(found: dict[str, Any]) -> str:
    latency = "".join(
        f", {label} {found[f'{key}_p50']:.{digits}f}/{found[f'{key}_p95']:.{digits}f} {unit}"
        for key, label, unit, digits in (("ttft_s", "TTFT", "s", 2), ("itl_ms", "ITL", "ms", 1))
        if f"{key}_p50" in found
    )
    return (
        f"{found['load']:22} {found['engine']:26} {found['tokens_per_s']:9.0f} tokens/s {found['seconds']:7.1f} s "
        f"{found['steps']:6} steps, {found['peak_blocks']:7} blocks, running {found['mean_running']:6.0f} mean "
        f"{found['peak_running']:5} peak, {found['preemptions']:4} preempted, {found['evictions']:6} evictions{latency}"
    )


def ratios(suite: Suite, results: list[dict[str, Any]]) -> list[str]:
    """Return, for each load, what each engine is to each stock one: of the same rounds, the median."""
    lines = []
    for load in map(str, suite.loads):
        rows = [row for row in results if row["load"] == load]
        by = {e.name: {r["round"]: r["tokens_per_s"] for r in rows if r["engine"] == e.name} for e in suite.engines}
        for base in (e.name for e in suite.engines if e.nitro is None):
            for name in by:
                if name != base:
                    each = [by[name][number] / by[base][number] for number in by[base]]
                    spread = f" ({min(each):.3f} to {max(each):.3f})" if len(each) > 1 else ""
                    lines.append(f"{load}: {name} / {base}: {statistics.median(each):.3f}{spread}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: essay")
    parser.add_argument("--rounds", type=int, help="of each load; default: the suite's own number")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.suite or ["essay"]:
        suite = SUITES[name]
        results = run_suite(suite, arguments.rounds or suite.rounds)
        print("\n".join(ratios(suite, results)), flush=True)
        found[name] = {"suite": asdict(suite), "results": results}
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
