#!/usr/bin/env python3
"""Time the kernels on a GPU: bytes moved over time, as a percentage of the copy bandwidth measured in the same run.

    python3 ci/bench_kernels.py [--shape large|essay|long] [--only NAME] [--layers N] [--sweep] [--json FILE]

Every result is checked against a PyTorch reference before it is timed. Times are of the GPU alone: a task is captured
in a CUDA graph, whose replays are timed one by one with events, with none of the data in the L2 cache; "host" is what
issuing the task costs the CPU. Bytes are those that any implementation has to move: K, V and positions of moved tokens
are read and written once, scores are read and masks written once; block tables, lists of moves and whatever a kernel
reads twice do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nitro.kernels import _moves, compact, select
from nitro.kernels.paged import PagedLayers, RaggedBatch


@dataclass(frozen=True)
class Shape:
    """What is evicted in one step; ``layers`` are timed together, of ``model_layers`` that the model has."""

    requests: int
    length: int
    keep: int
    model_layers: int
    layers: int
    heads: int
    head_dim: int
    block_size: int = 16
    protect: int = 4
    window: int = 32


SHAPES = {
    # All 32 layers would take 137 GB for the sources alone: 8 are timed, with blocks of their own for each request.
    "large": Shape(requests=256, length=4096, keep=2048, model_layers=32, layers=8, heads=8, head_dim=128),
    # Qwen2.5-0.5B with 2,048 requests, budget 330 and slack 64: every step, 32 requests have grown by the slack.
    "essay": Shape(requests=32, length=394, keep=330, model_layers=24, layers=24, heads=2, head_dim=64),
    # One prompt of 128k tokens.
    "long": Shape(requests=1, length=131072, keep=32768, model_layers=24, layers=24, heads=2, head_dim=64),
}


@dataclass(frozen=True)
class Setup:
    """The caches and the batch of a shape, on the GPU."""

    shape: Shape
    layers: PagedLayers
    positions: torch.Tensor
    batch: RaggedBatch
    scores: torch.Tensor
    mask: torch.Tensor
    scratch: torch.Tensor


@dataclass(frozen=True)
class Task:
    """Something to time; ``check`` raises unless it does what it should, and is called first."""

    name: str
    call: Callable[[], Any]
    nbytes: int
    check: Callable[[], None]


def make_setup(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Setup:
    """NHD caches; every request has blocks of its own, shuffled, and private blocks to pack to."""
    torch.manual_seed(0)
    size, device = shape.block_size, torch.device("cuda", torch.cuda.current_device())
    blocks, kept_blocks = -(-shape.length // size), -(-shape.keep // size)
    num_blocks = shape.requests * (blocks + kept_blocks)
    caches = [
        torch.empty(num_blocks, size, shape.heads, 2 * shape.head_dim, dtype=dtype, device=device)
        .normal_()
        .transpose(1, 2)
        for _ in range(shape.layers)
    ]
    free = torch.randperm(num_blocks, dtype=torch.int32, device=device)
    lengths = torch.full((shape.requests,), shape.length, dtype=torch.int32, device=device)
    total = shape.requests * shape.length
    batch = RaggedBatch(
        block_tables=free[: shape.requests * blocks].view(shape.requests, blocks),
        lengths=lengths,
        keep=torch.full_like(lengths, shape.keep),
        protect=torch.full_like(lengths, shape.protect),
        offsets=torch.arange(shape.requests + 1, device=device) * shape.length,
        window=shape.window,
        max_length=shape.length,
        total=total,
        dst_tables=free[shape.requests * blocks :].view(shape.requests, kept_blocks),
    )
    scores = torch.randn(shape.layers, shape.heads, total, device=device)
    mask, _ = select.select_ragged(scores, batch)
    positions = torch.arange(shape.layers * num_blocks * shape.heads * size, dtype=torch.int32, device=device)
    positions = positions.view(shape.layers, num_blocks, shape.heads, size)
    return Setup(
        shape, PagedLayers.of(caches), positions, batch, scores, mask, torch.empty_like(scores).view(torch.int32)
    )


def select_tasks(setup: Setup) -> Iterator[Task]:
    scores, batch, shape = setup.scores, setup.batch, setup.shape
    nbytes = scores.numel() * (4 + 1)
    theta = torch.zeros((), device=scores.device)

    def check_select() -> None:
        mask, counts = select.select_ragged(scores, batch)
        assert bool((counts == shape.keep).all())
        for layer in range(shape.layers):
            rows = scores[layer].view(shape.heads, shape.requests, shape.length)
            want = select.select_topk_ref(rows, shape.keep, shape.protect, shape.window)
            got = mask[layer].view_as(rows).nonzero()[:, 2].view_as(want)
            assert torch.equal(got, want)

    def check_threshold() -> None:
        mask, counts = select.threshold_ragged(scores, batch, theta)
        rows = scores.view(*scores.shape[:2], shape.requests, shape.length)
        want = rows >= 0
        want[..., : shape.protect] = True
        want[..., shape.length - shape.window :] = True
        assert torch.equal(mask.view_as(want) != 0, want)
        assert torch.equal(counts, want.sum(-1, dtype=torch.int32).permute(2, 0, 1))

    yield Task("select top-k", lambda: select.select_ragged(scores, batch), nbytes, check_select)
    yield Task("select threshold", lambda: select.threshold_ragged(scores, batch, theta), nbytes, check_threshold)


def stitch_tasks(setup: Setup) -> Iterator[Task]:
    layers, batch, shape = setup.layers, setup.batch, setup.shape
    row_bytes = 2 * shape.head_dim * layers.dtype.itemsize + 4
    kept = setup.mask.view(shape.layers, shape.heads, shape.requests, shape.length)
    moves = {"pack": int(kept.sum()), "fill": int(kept[..., shape.keep :].sum())}
    calls = {"pack": compact.pack_ragged, "fill": compact.fill_ragged}

    def check(name: str) -> None:
        """Of three requests, every surviving slot, in all layers and heads."""
        for request in sorted({0, shape.requests // 2, shape.requests - 1}):
            before = [layers.rows(layer, batch.block_tables[request], shape.length) for layer in range(shape.layers)]
            expect = []
            for layer, rows in enumerate(before):
                index = kept[layer, :, request].nonzero()[:, 1].view(shape.heads, shape.keep)
                if name == "fill":
                    slots = torch.arange(shape.keep, device=index.device).expand(shape.heads, -1).clone()
                    for head in range(shape.heads):
                        row = kept[layer, head, request] != 0
                        slots[head, ~row[: shape.keep]] = row[shape.keep :].nonzero().flatten() + shape.keep
                    index = slots
                expect.append(compact.pack_ref(rows, index))
            calls[name](layers, batch, setup.mask, setup.positions, scratch=setup.scratch)
            table = batch.dst_tables[request] if name == "pack" else batch.block_tables[request]
            for layer, want in enumerate(expect):
                assert torch.equal(layers.rows(layer, table, shape.keep).view(torch.int16), want.view(torch.int16))

    for name, call in calls.items():
        yield Task(
            f"stitch {name}",
            lambda call=call: call(layers, batch, setup.mask, setup.positions, scratch=setup.scratch),
            2 * moves[name] * row_bytes,
            lambda name=name: check(name),
        )


def event_tasks(setup: Setup) -> Iterator[Task]:
    """Selection and stitching as one step does them, and the same by PyTorch, one request and layer at a time."""
    layers, batch, shape = setup.layers, setup.batch, setup.shape
    if shape.requests * shape.layers > 1000:
        return
    moved = int(setup.mask.view(-1, shape.requests, shape.length)[..., shape.keep :].sum())
    nbytes = setup.scores.numel() * 5 + 2 * moved * (2 * shape.head_dim * layers.dtype.itemsize + 4)

    def event() -> None:
        mask, _ = select.select_ragged(setup.scores, batch)
        compact.fill_ragged(layers, batch, mask, setup.positions, scratch=setup.scratch)

    def naive() -> None:
        size = shape.block_size
        targets = torch.arange(shape.keep, device=layers.device)
        for request in range(shape.requests):
            first = request * shape.length
            scores = setup.scores[..., first : first + shape.length].clone()
            scores[..., : shape.protect] = scores[..., shape.length - shape.window :] = float("inf")
            index = scores.topk(shape.keep).indices.sort().values
            table, target = batch.block_tables[request], batch.dst_tables[request]
            for layer, cache in enumerate(layers.caches):
                rows = layers.rows(layer, table, shape.length)
                rows = rows.gather(1, index[layer, ..., None].expand(-1, -1, rows.shape[2]))
                cache[target[targets // size].long(), :, targets % size] = rows.transpose(0, 1)

    def check_naive() -> None:
        def packed() -> torch.Tensor:
            table = batch.dst_tables[shape.requests - 1]
            return torch.stack([layers.rows(layer, table, shape.keep) for layer in range(shape.layers)])

        naive()
        got = packed()
        compact.pack_ragged(layers, batch, setup.mask, setup.positions, scratch=setup.scratch)
        assert torch.equal(got, packed())

    yield Task("event select+fill", event, nbytes, lambda: None)  # both have been checked by themselves
    yield Task("event naive (PyTorch)", naive, nbytes, check_naive)


# Name → what it times; each yields tasks on a setup.
BENCHES: dict[str, Callable[[Setup], Iterator[Task]]] = {
    "select": select_tasks,
    "stitch": stitch_tasks,
    "event": event_tasks,
}


def copy_bandwidth() -> float:
    """Bytes read and written a second by torch's copy of 4 GiB, median of 20."""
    source = torch.empty(2**32, dtype=torch.int8, device="cuda").zero_()
    target = torch.empty_like(source)
    micros = gpu_micros(lambda: target.copy_(source), 20)
    return 2 * source.numel() / micros * 1e6


def gpu_micros(call: Callable[[], Any], repeats: int) -> float:
    """Median GPU time of a call in microseconds, without the time to launch it."""
    call()
    torch.cuda.synchronize()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")  # several times the L2 cache
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[2:])


def host_micros(call: Callable[[], Any], repeats: int) -> float:
    """Median time until a call returns, with the GPU idle before it, in microseconds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(setup: Setup, name: str, only: str, copy: float, label: str = "") -> list[dict[str, Any]]:
    results = []
    for bench in BENCHES.values():
        for task in bench(setup):
            if only not in task.name:
                continue
            task.check()
            micros, host = gpu_micros(task.call, 20), host_micros(task.call, 20)
            percent = 100 * task.nbytes / (micros * 1e-6) / copy
            results.append(
                {"shape": name, "task": task.name, "label": label, "micros": micros, "host_micros": host}
                | {"bytes": task.nbytes, "percent_of_copy": percent, "layers": setup.shape.layers}
            )
            scaled = micros * setup.shape.model_layers / setup.shape.layers
            print(
                f"{name:6} {task.name:24}{label:32} {micros:10.1f} µs {task.nbytes / 1e6:10.1f} MB {percent:6.1f} %"
                f"   all {setup.shape.model_layers} layers {scaled:10.1f} µs   host {host:7.1f} µs",
                flush=True,
            )
    return results


def sweep(setup: Setup, name: str, copy: float) -> list[dict[str, Any]]:
    """Time the launchers' choices against their neighbours."""
    results = []
    chosen = _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS
    for nbytes, warps, programs in itertools.product((4096, 8192, 16384, 32768), (1, 2, 4, 8), (2048, 8192)):
        if not 32 <= nbytes // (32 * warps) <= 512:  # bytes of a thread
            continue
        _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS = nbytes, warps, programs
        results += measure(setup, name, "stitch", copy, f" {nbytes} B, {warps} warps, {programs} ≤")
    _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS = chosen
    chosen_slots = select._SLOTS_PER_WARP
    for slots in (128, 256, 512, 1024):
        select._SLOTS_PER_WARP = slots
        results += measure(setup, name, "select top-k", copy, f" {slots} slots a warp")
    select._SLOTS_PER_WARP = chosen_slots
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--layers", type=int, help="layers timed together, where the shape's do not fit")
    parser.add_argument("--sweep", action="store_true", help="also time other tile sizes and warps")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    copy = copy_bandwidth()
    print(f"{properties.name}, torch {torch.__version__}: copy {copy / 1e9:.0f} GB/s (read + write)")
    results = []
    for name in arguments.shape or SHAPES:
        shape = SHAPES[name]
        if arguments.layers:
            shape = dataclasses.replace(shape, layers=arguments.layers)
        print(f"\n{name}: {shape}")
        setup = make_setup(shape)
        results += measure(setup, name, arguments.only, copy)
        if arguments.sweep:
            results += sweep(setup, name, copy)
        del setup
        torch.cuda.empty_cache()
    if arguments.json:
        text = {
            "device": properties.name,
            "torch": torch.__version__,
            "copy_bytes_per_second": copy,
            "results": results,
        }
        arguments.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()
