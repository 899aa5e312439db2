#!/usr/bin/env python3
"""Host time of vLLM's scheduler per engine step, stock and with Nitro, without a model and without a GPU.

    python3 ci/bench_scheduler.py [--requests 2048] [--steps 300] [--only Nitro] [--answers-late 2] [--json FILE]

All requests decode together (the shape of Qwen2.5-0.5B, 1,000 prompt tokens, prefix caching on, blocks of 16, a pool
that never runs out, so that both schedule the same number of requests). The model's answer is a constant token. Steps
are timed one by one: `schedule()`, and within it Nitro's own part; the median and the mean count, since evictions and
new blocks come in waves. Under a threshold, which is only run where asked for (`--only "Nitro, threshold"`), a worker
says that 330 tokens reach it, some steps after each question. The count of slots for /metrics, which is made once a
second, a part in each step, is timed without the pause; what /metrics takes in the scheduler beside it, in each step.
To compare two commits, install each in an environment of its own and run `--only Nitro` in turn: what else a machine
does is more than the difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import nitro
from nitro.integration.vllm.answers import messages_of
from nitro.integration.vllm.early import NitroKVCacheManager
from nitro.integration.vllm.scheduler import NitroAsyncScheduler
from nitro.integration.vllm.slots import SlotWatch
from nitro.integration.vllm.work import ASKS, PLAN
from nitro.ipc import MESSAGE, Messages, Producer
from nitro.testing.models import make_tiny_model
from nitro.types import StepAsks

BLOCK = 16
KINDS = ("stock", "Nitro, asking for each slot", "Nitro")
BY_DATA = "Nitro, threshold"
BUDGET, SLACK = 330, 64


def make_scheduler(kind: str, model: Path, requests: int) -> Any:
    if kind == "stock":
        settings = {}
    elif kind == BY_DATA:
        settings = nitro.vllm_config(threshold=0.5, slack=SLACK)
    else:
        settings = nitro.vllm_config(budget=BUDGET, slack=SLACK)
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=16384,
        max_num_seqs=requests,
        block_size=BLOCK,
        enable_prefix_caching=True,
        additional_config=settings,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = blocks = requests * 160
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    cls = AsyncScheduler if kind == "stock" else NitroAsyncScheduler
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def deliver(scheduler: Any, output: Any, known: dict[str, int]) -> None:
    """Answer each request whose prompt is complete with a token."""
    names = list(output.num_scheduled_tokens)
    sampled = []
    for name in names:
        known[name] = known.get(name, 0) + output.num_scheduled_tokens[name]
        sampled.append([1] if known[name] >= 1000 else [])
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )


class Worker:
    """Answers questions so many steps late, or never: each request shall keep as many tokens as a budget would."""

    def __init__(self, late: int | None) -> None:
        self._late = late
        self._answers: deque[Messages] = deque()
        self._producer: Producer | None = None

    def step(self, asked: StepAsks | None) -> int:
        """Take a step's questions, send what is due, and return how many questions there were."""
        count = 0 if asked is None else len(asked)
        if self._late is None:
            return count
        if asked is not None and self._producer is None:
            self._producer = Producer(asked.ring)
        found = np.minimum(asked.slots.physical_len, BUDGET) if asked is not None else None
        self._answers.append(np.empty(0, MESSAGE) if asked is None else messages_of(asked, found))
        if self._producer is not None and len(self._answers) > self._late:
            self._producer.publish(self._answers.popleft())
        return count


def timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Add up, step by step, what a method of an object takes."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[-1] += time.perf_counter() - started

    setattr(owner, name, call)


def run(kind: str, model: Path, requests: int, steps: int, late: int | None) -> dict[str, Any]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler = make_scheduler(kind, model, requests)
    if kind == "Nitro, asking for each slot":
        scheduler.kv_cache_manager.__class__ = NitroKVCacheManager.__mro__[1]
    for number in range(requests):
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        params.update_from_generation_config({}, 511)
        prompt = [(number * 7919 + i * 31) % 500 for i in range(1000)]
        scheduler.add_request(Request(f"r{number}", prompt, params, None, block_hasher=hasher))
    known: dict[str, int] = {}
    worker = Worker(late)

    def step() -> tuple[Any, int]:
        output = scheduler.schedule()
        return output, worker.step(getattr(output, ASKS, None))

    settled = 0  # steps since all decode; under a threshold each shall have been evicted once
    while settled < (3 * SLACK if kind == BY_DATA else 1):
        deliver(scheduler, step()[0], known)
        settled += all(known.get(f"r{number}", 0) >= 1000 for number in range(requests))
    own: list[float] = []
    asking: list[float] = []
    counting: list[float] = []
    telling: list[float] = []
    looking: list[float] = []
    if kind == BY_DATA:
        timed(scheduler.nitro, "_ask", asking)
        timed(scheduler.nitro.asks, "take", asking)
    if kind != "stock":
        for name in ("plan", "notice", "attach"):
            timed(scheduler.nitro, name, own)
        seconds = itertools.count(0, 2)
        side = scheduler.nitro
        timed(side, "report", telling)
        for name in ("planned", "heard"):
            timed(side.reporter, name, telling)
        timed(side.reporter.slots, "look", looking)  # a part of `report`
        watch = SlotWatch(side.manager, side.collector, side.rules, lambda: next(seconds))
    total, evictions, questions = [], 0, 0
    for _ in range(steps):
        own.append(0.0)
        asking.append(0.0)
        telling.append(0.0)
        looking.append(0.0)
        started = time.perf_counter()
        output = scheduler.schedule()
        total.append(time.perf_counter() - started)
        evictions += len(getattr(output, PLAN, ()))
        questions += worker.step(getattr(output, ASKS, None))
        deliver(scheduler, output, known)
        if kind != "stock":
            started = time.perf_counter()
            watch.look(scheduler.running)
            counting.append(time.perf_counter() - started)
    told = [all_of_it - look for all_of_it, look in zip(telling, looking, strict=True)]
    return {
        "scheduler": kind,
        "requests": requests,
        "evictions": evictions,
        "questions": questions,
        "schedule_ms_median": 1e3 * statistics.median(total),
        "schedule_ms_mean": 1e3 * statistics.fmean(total),
        "nitro_ms_mean": 1e3 * statistics.fmean(own),
        "nitro_us_per_eviction": 1e6 * sum(own) / max(evictions, 1),
        "us_per_question": 1e6 * sum(asking) / max(questions, 1),
        "telling_us_median": 1e6 * statistics.median(told),
        "telling_us_mean": 1e6 * statistics.fmean(told),
        "count_ms_median": 1e3 * statistics.median(counting or [0.0]),
        "blocks_in_use": scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        - scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, action="append", help="default: 256 and 2048")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=(*KINDS, BY_DATA), action="append", help="default: the first three")
    parser.add_argument("--answers-late", type=int, default=2, help="steps until an answer comes; -1: never")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", "llama", num_kv_heads=2, head_dim=64, vocab=512, max_len=4096)
        for requests in arguments.requests or (256, 2048):
            for kind in arguments.only or KINDS:
                late = None if arguments.answers_late < 0 else arguments.answers_late
                results.append(run(kind, model, requests, arguments.steps, late))
    print(
        "\n| requests | scheduler | schedule(), median ms | mean | of it Nitro's, mean | evictions | µs for each "
        "| questions | of it to ask, µs for each | a step's count of slots, median ms | metrics, median µs | mean "
        "| blocks in use |"
    )
    print("|" + "---|" * 13)
    for row in results:
        print(
            f"| {row['requests']:,} | {row['scheduler']} | {row['schedule_ms_median']:.2f} "
            f"| {row['schedule_ms_mean']:.2f} | {row['nitro_ms_mean']:.3f} | {row['evictions']:,} "
            f"| {row['nitro_us_per_eviction']:.1f} | {row['questions']:,} | {row['us_per_question']:.1f} "
            f"| {row['count_ms_median']:.2f} | {row['telling_us_median']:.1f} | {row['telling_us_mean']:.1f} "
            f"| {row['blocks_in_use']:,} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
