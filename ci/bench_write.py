#!/usr/bin/env python3
"""Does it pay to score tokens when they are written? Times both sides on a GPU, in one run.

    python3 ci/bench_write.py [--shape essay|llama] [--json FILE]

Cost: an engine step writes K and V of its new tokens, one kernel a layer, all of them in one CUDA graph. That graph is
timed alone, with a scoring kernel after each write, and with scoring as part of the write. Saving: what an eviction
takes to score all its slots from their keys, less what it takes to collect scores that were kept. The third way between
the two: at an eviction, score only the slots that are new since the last one, and collect the others' scores.

Times are medians of replays of CUDA graphs with none of the data in the L2 cache. docs/kernels.md says what follows.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import write_scores
from gpu_timing import copy_bandwidths, gpu_micros

from nitro.kernels import score
from nitro.kernels.paged import PagedLayers, RaggedBatch

REPEATS = 50
CHUNK = 8192  # tokens of a step that prefills


@dataclass(frozen=True)
class Shape:
    """Requests that all decode; every step, ``due`` of them have grown by ``slack`` and lose as many tokens."""

    requests: int
    length: int
    slack: int
    due: int
    layers: int
    query_heads: int
    heads: int
    head_dim: int
    block_size: int = 16


SHAPES = {
    # Qwen2.5-0.5B, budget 330
    "essay": Shape(requests=2048, length=394, slack=64, due=32, layers=24, query_heads=14, heads=2, head_dim=64),
    # Llama-3.1-8B, budget 2,048
    "llama": Shape(requests=256, length=2112, slack=64, due=4, layers=32, query_heads=32, heads=8, head_dim=128),
}
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Setup:
    shape: Shape
    layers: PagedLayers
    tables: torch.Tensor  # int32 [requests, blocks]
    scores: torch.Tensor  # float32 [L, num_blocks, H, block_size]


def make_setup(shape: Shape) -> Setup:
    """NHD caches in which every request has blocks of its own, shuffled, and there is room for a chunk beside them."""
    torch.manual_seed(0)
    size = shape.block_size
    blocks = -(-shape.length // size)
    num_blocks = shape.requests * blocks + CHUNK // size
    caches = [
        torch.empty(num_blocks, size, shape.heads, 2 * shape.head_dim, dtype=DTYPE, device="cuda")
        .normal_()
        .transpose(1, 2)
        for _ in range(shape.layers)
    ]
    tables = torch.randperm(num_blocks, dtype=torch.int32, device="cuda")[: shape.requests * blocks]
    scores = torch.zeros(shape.layers, num_blocks, shape.heads, size, device="cuda")
    return Setup(shape, PagedLayers.of(caches), tables.view(shape.requests, blocks), scores)


def make_batch(setup: Setup, tables: torch.Tensor, length: int) -> RaggedBatch:
    lengths = torch.full((len(tables),), length, dtype=torch.int32, device="cuda")
    return RaggedBatch(
        block_tables=tables,
        lengths=lengths,
        keep=lengths,
        protect=torch.zeros_like(lengths),
        offsets=torch.arange(len(tables) + 1, device="cuda") * length,
        window=0,
        max_length=length,
        total=len(tables) * length,
        dst_tables=tables,
    )


def step_tokens(setup: Setup, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """K and V of each layer as parts of its fused projection, and the slots they go to.

    A decode step writes the last slot of each request; a chunk whole blocks of one request.
    """
    shape, size = setup.shape, setup.shape.block_size
    width = shape.query_heads + 2 * shape.heads
    keys, values = [], []
    for _ in range(shape.layers):
        qkv = torch.randn(tokens, width, shape.head_dim, dtype=DTYPE, device="cuda")
        keys.append(qkv[:, shape.query_heads : shape.query_heads + shape.heads])
        values.append(qkv[:, shape.query_heads + shape.heads :])
    if tokens == shape.requests:
        last = shape.length - 1
        slots = setup.tables[:, last // size].long() * size + last % size
    else:
        chunk = setup.tables.flatten()[: tokens // size].long()
        slots = (chunk[:, None] * size + torch.arange(size, device="cuda")).flatten()
    return keys, values, slots.contiguous()


def check(setup: Setup, keys: list[torch.Tensor], values: list[torch.Tensor], slots: torch.Tensor) -> None:
    """Writes, scores and their collection agree with references on the first and last layer."""
    for layer in {0, setup.shape.layers - 1}:
        for name, x in (("knorm", keys), ("vnorm", values)):
            want = torch.zeros_like(setup.scores[0])
            getattr(write_scores, f"write_{name}_ref")(x[layer], slots, want)
            for fused in (False, True):
                got = torch.zeros_like(want)
                if fused:
                    cache = setup.layers.caches[layer]
                    write_scores.write_cache(keys[layer], values[layer], slots, cache, got, name)
                else:
                    getattr(write_scores, f"write_{name}")(x[layer], slots, got)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)
        size = setup.shape.block_size
        rows = setup.layers.caches[layer][slots // size, :, slots % size]
        assert torch.equal(rows, torch.cat([keys[layer], values[layer]], -1))


def time_writes(setup: Setup, tokens: int) -> dict[str, float]:
    """Microseconds of one step's cache writes, all layers, in one graph."""
    keys, values, slots = step_tokens(setup, tokens)
    check(setup, keys, values, slots)

    def step(fused: bool = False, extra: str = "", write: bool = True) -> None:
        for layer, cache in enumerate(setup.layers.caches):
            kept = setup.scores[layer]
            if write:
                write_scores.write_cache(keys[layer], values[layer], slots, cache, kept if fused else None)
            if extra == "knorm":
                write_scores.write_knorm(keys[layer], slots, kept)
            elif extra == "vnorm":
                write_scores.write_vnorm(values[layer], slots, kept)

    found = {
        "write": gpu_micros(step, REPEATS),
        "write, then knorm": gpu_micros(lambda: step(extra="knorm"), REPEATS),
        "write, then vnorm": gpu_micros(lambda: step(extra="vnorm"), REPEATS),
        "write with knorm": gpu_micros(lambda: step(fused=True), REPEATS),
        "knorm alone": gpu_micros(lambda: step(extra="knorm", write=False), REPEATS),
    }
    found["write again"] = gpu_micros(step, REPEATS)  # how far two measurements of the same lie apart
    return found


def time_engine_write(setup: Setup, tokens: int) -> dict[str, float]:
    """The engine's own write, where it is installed: is the stand-in as fast?"""
    from vllm import _custom_ops

    keys, values, slots = step_tokens(setup, tokens)
    one = torch.ones((), device="cuda")
    dim = setup.shape.head_dim
    parts = [(c.transpose(1, 2)[..., :dim], c.transpose(1, 2)[..., dim:]) for c in setup.layers.caches]

    def step() -> None:
        for layer, (k, v) in enumerate(parts):
            _custom_ops.reshape_and_cache_flash(keys[layer], values[layer], k, v, slots, "auto", one, one)

    return {"vLLM's write": gpu_micros(step, REPEATS)}


def time_eviction(setup: Setup, requests: int, length: int, fresh: int) -> dict[str, float]:
    """Microseconds of scoring all slots of some requests, of collecting kept scores, and of scoring ``fresh`` slots."""
    blocks = -(-length // setup.shape.block_size)
    tables = setup.tables[:requests]
    if blocks > tables.shape[1]:  # a long prompt: the blocks of many requests
        tables = setup.tables.flatten()[: requests * blocks].view(requests, blocks)
    tables = tables[:, :blocks].contiguous()
    batch = make_batch(setup, tables, length)
    new_blocks = -(-fresh // setup.shape.block_size)
    new = make_batch(setup, tables[:, blocks - new_blocks :].contiguous(), fresh)
    out = torch.empty(setup.shape.layers, setup.shape.heads, batch.total, device="cuda")
    new_out = torch.empty(setup.shape.layers, setup.shape.heads, new.total, device="cuda")
    got = write_scores.read_scores(setup.layers, batch, setup.scores)
    assert torch.equal(got, write_scores.read_scores_ref(setup.layers, batch, setup.scores))

    def third_way() -> None:
        score.knorm(setup.layers, new, out=new_out)
        write_scores.read_scores(setup.layers, batch, setup.scores, out=out)

    return {
        "knorm of all": gpu_micros(lambda: score.knorm(setup.layers, batch, out=out), REPEATS),
        "vnorm of all": gpu_micros(lambda: score.vnorm(setup.layers, batch, out=out), REPEATS),
        "read": gpu_micros(lambda: write_scores.read_scores(setup.layers, batch, setup.scores, out=out), REPEATS),
        "knorm of new, read": gpu_micros(third_way, REPEATS),
    }


# A failure of one does not stop the others.
SECTIONS: dict[str, Callable[[Setup], dict[str, float]]] = {
    "decode": lambda setup: time_writes(setup, setup.shape.requests),
    "eviction": lambda setup: time_eviction(setup, setup.shape.due, setup.shape.length, setup.shape.slack),
    "chunk": lambda setup: time_writes(setup, CHUNK),
    "eviction after a chunk": lambda setup: time_eviction(setup, 1, CHUNK, CHUNK),
    "decode, engine": lambda setup: time_engine_write(setup, setup.shape.requests),
}


def floors(shape: Shape, copy: float) -> dict[str, float]:
    """What no kernel can beat, in microseconds, and the share of the cache that kept scores would take.

    Attention reads all K and V once a step. ``copy`` is in bytes read and written a second.
    """
    slot = 2 * shape.head_dim * DTYPE.itemsize
    rows = shape.layers * shape.heads
    mean = shape.length - (shape.slack - 1) / 2
    micros = 1e6 / copy
    return {
        "attention of a step": shape.requests * mean * rows * slot * micros,
        "knorm of all": shape.due * shape.length * rows * (slot / 2 + 4) * micros,
        "read": shape.due * shape.length * rows * 8 * micros,
        "knorm of a step's tokens": shape.requests * rows * (slot / 2 + 4) * micros,
        "scores, % of cache": 100 * 4 / slot,
    }


def verdict(shape: Shape, writes: dict[str, float], eviction: dict[str, float], floor: dict[str, float]) -> list[str]:
    """What the figures of a decode step decide. Lines to print.

    Where memory limits the number of running requests, x % of the cache is worth x % of the throughput. In favour of
    keeping scores, time is compared with attention's floor, not with that of a step, and moving scores costs nothing.
    """
    saved = eviction["knorm of all"] - eviction["read"]
    third = eviction["knorm of all"] - eviction["knorm of new, read"]
    memory = floor["scores, % of cache"]
    lines, nets, pay = [], {"all slots at the eviction": 0.0}, {"all slots at the eviction"}
    for name, cost, gross in (
        ("by a kernel after each write", writes["write, then knorm"] - writes["write"], saved),
        ("as part of the write kernel", writes["write with knorm"] - writes["write"], saved),
        ("new slots at the eviction", 0.0, third),
    ):
        net = gross - cost
        share = 100 * net / floor["attention of a step"]
        nets[name] = net
        if share > memory:
            pay.add(name)
        lines.append(
            f"{name:28} costs {cost:7.1f} µs, saves {gross:7.1f} µs, net {net:+7.1f} µs a step: {share:+6.2f} % of "
            f"attention's floor for {memory:.2f} % of the cache"
        )
    free, limited = (max(names, key=lambda name: nets[name]) for names in (nets, pay))
    return [*lines, f"best: where memory is free, score {free}; where it limits, score {limited}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--requests", type=int, help="fewer requests, where the shape's do not fit")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    copy = max(copy_bandwidths().values())
    print(f"{device}, torch {torch.__version__}: copy {copy / 1e9:.0f} GB/s (read + write)")
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "copy_bytes_per_second": copy}
    failed = False
    for name in arguments.shape or SHAPES:
        shape = SHAPES[name]
        if arguments.requests:
            due = max(1, shape.due * arguments.requests // shape.requests)
            shape = replace(shape, requests=arguments.requests, due=due)
        print(f"\n{name}: {shape}")
        found: dict[str, dict[str, float]] = {"floors": floors(shape, copy)}
        results[name] = {"shape": asdict(shape), "micros": found}
        setup = make_setup(shape)
        for section, run in SECTIONS.items():
            try:
                found[section] = run(setup)
            except Exception as error:
                if section == "decode, engine" and isinstance(error, ImportError):
                    print(f"{section}: not installed ({error})")
                    continue
                failed = True
                print(f"{section}: failed")
                traceback.print_exc(file=sys.stdout)
        for section, values in found.items():
            for task, micros in values.items():
                print(f"{name:6} {section:24} {task:28} {micros:10.2f} {'' if '%' in task else 'µs'}", flush=True)
        if {"decode", "eviction"} <= found.keys():
            lines = verdict(shape, found["decode"], found["eviction"], found["floors"])
            results[name]["verdict"] = lines
            print("\n".join(lines), flush=True)
        del setup
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
