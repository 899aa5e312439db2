#!/usr/bin/env python3
"""Time the kernels on a GPU: bytes moved over time, as a percentage of the copy bandwidth measured in the same run.

    python3 ci/bench_kernels.py [--shape large|essay|long|medium] [--dtype bfloat16|float8_e4m3fn|...] [--only NAME]
        [--layers N] [--sweep] [--json FILE]

Every result is checked against a reference before it is timed. Times are of the GPU alone: a task is captured in a CUDA
graph, whose replays are timed one by one with events, with none of the data in the L2 cache; "host" is what issuing
the task costs the CPU, "nodes" are its kernels. Bytes are those that any implementation has to move
(tests/lib/kernel_bench.py); where a mean over all slots is needed before the first score, and a row does not stay on
the chip until then, "2 passes" counts what has to be read again. The copy is that of plain kernels, the best of a few.

A task that fails is reported and left out; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import event_bench
import score_bench
from gpu_timing import copy_bandwidths, gpu_micros, host_micros, launches
from kernel_bench import SHAPES, Setup, Task, make_setup, select_tasks, stitch_tasks

from nitro.kernels import _moves, _score, score_gravity, score_lagkv, score_mean, score_slots, select
from nitro.kernels.fp8 import FP8

Bench = Callable[[Setup], Iterator[Task]]


def _event_bench(name: str) -> Bench:
    """Return one event as a bench of its own, so that it can fail alone."""

    def bench(setup: Setup) -> Iterator[Task]:
        yield event_bench.event_task(setup, name)

    bench.__name__ = f"event {name}"
    return bench


BENCHES: tuple[Bench, ...] = (
    score_bench.score_tasks,
    score_bench.combine_tasks,
    select_tasks,
    stitch_tasks,
    *map(_event_bench, event_bench.EVENTS),
    event_bench.rival_tasks,
)
DEFAULT_SHAPES = ("large", "essay", "long")
DTYPES = [str(dtype).removeprefix("torch.") for dtype in _score.DTYPES]

# What chooses tile, warps and stages of a score.
CHOICES: dict[str, tuple[ModuleType, str]] = {
    "score knorm": (score_slots, "_choice"),
    "score keydiff": (score_mean, "_choice"),
    "score vnorm_centred": (score_mean, "_choice"),
    "score keydiff_unrotated": (score_mean, "_unrotated_choice"),
    "score gravity": (score_gravity, "_choice"),
    "score lagkv": (score_lagkv, "_choice"),
}
SWEPT_BYTES, SWEPT_WARPS, SWEPT_STAGES = (4096, 8192, 16384, 32768), (2, 4, 8), (3,)
SWEPT_WHOLES = (4096,)


class Run:
    """One run: the copy bandwidth to compare with, and all results."""

    def __init__(self, copy: float, only: str) -> None:
        self.copy = copy
        self.only = only
        self.results: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what the call does; None if it fails, which is reported, or cannot be done on this machine."""
        try:
            return call()
        except event_bench.UnavailableError as error:
            print(f"skipped {what}: {error}", flush=True)
        except Exception as error:  # whatever it is, the other tasks are worth their while
            self.failures.append(what)
            print(f"FAILED {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc()
        return None

    def tasks(self, setup: Setup, name: str, benches: tuple[Bench, ...]) -> Iterator[Task]:
        for bench in benches:
            tasks = bench(setup)
            while task := self.guarded(f"{name} {bench.__name__}", lambda tasks=tasks: next(tasks, None)):
                yield task

    def measure(self, setup: Setup, name: str, task: Task) -> None:
        """Check and time a task, and print what came of it."""

        def timed() -> dict[str, Any]:
            task.check()
            # Once is enough to compile; a few times, for what takes long.
            repeats = 20 if host_micros(task.call, 1, finished=True) < 30_000 else 4
            return self._rates(task, gpu_micros(task.call, repeats)) | {
                "host_micros": host_micros(task.call, repeats),
                "elapsed_micros": host_micros(task.call, repeats, finished=True),
            }

        result = self.guarded(f"{name} {task.name}", timed)
        if result is None:
            return
        try:
            result["nodes"] = launches(task.call)
        except Exception:  # an older torch or driver: the times are what matters
            result["nodes"] = None
        self._add(setup, name, task, "", result)

    def try_choice(self, setup: Setup, name: str, task: Task, label: str) -> None:
        """Time a task that has been checked with other choices."""
        result = self.guarded(f"{name} {task.name}{label}", lambda: self._rates(task, gpu_micros(task.call, 6)))
        if result is not None:
            self._add(setup, name, task, label, result)

    def _rates(self, task: Task, micros: float) -> dict[str, Any]:
        percent = 100 / (micros * 1e-6) / self.copy
        return {
            "micros": micros,
            "bytes": task.nbytes,
            "percent_of_copy": percent * task.nbytes,
            "percent_with_passes": percent * (task.passes_nbytes or task.nbytes),
        }

    def _add(self, setup: Setup, name: str, task: Task, label: str, result: dict[str, Any]) -> None:
        shape = setup.shape
        self.results.append({"shape": name, "task": task.name, "label": label, "layers": shape.layers} | result)
        text = f"{name:6} {task.name:27}{label:33}{result['micros']:10.1f} µs {task.nbytes / 1e6:9.1f} MB"
        text += f" {result['percent_of_copy']:6.1f} %"
        text += f" (2 passes: {result['percent_with_passes']:5.1f} %)" if task.passes_nbytes else " " * 20
        if not label:
            scaled = result["micros"] * shape.model_layers / shape.layers
            text += f" {result['nodes'] or '?':>5} nodes, {shape.model_layers} layers {scaled:9.1f} µs"
            text += f", host {result['host_micros']:7.1f} µs"
        print(text, flush=True)

    def shape(self, setup: Setup, name: str) -> None:
        """Time everything at one shape."""
        benches = (*BENCHES, event_bench.attention_tasks) if name == "essay" else BENCHES
        if setup.layers.dtype in FP8:  # what they are compared with takes no FP8
            benches = tuple(bench for bench in BENCHES if bench is not event_bench.rival_tasks)
        for task in self.tasks(setup, name, benches):
            if self.only in task.name:
                self.measure(setup, name, task)
        self.summary(name)

    def summary(self, name: str) -> None:
        """Print what is to be compared: fill with pack, events with the attention of the step and with other ways."""
        rows = {result["task"]: result for result in self.results if result["shape"] == name and not result["label"]}
        fill, pack = rows.get("stitch fill"), rows.get("stitch pack")
        if fill and pack:
            print(
                f"{name}: fill moves {fill['bytes'] / pack['bytes']:.3f} of the bytes that pack moves, "
                f"in {fill['micros'] / pack['micros']:.3f} of its time"
            )
        attention = [row for task, row in rows.items() if task.startswith(event_bench.ATTENTION)]
        best = min((row["micros"] for row in attention), default=None)
        others = [rows[task] for task in (event_bench.NAIVE, event_bench.KVPRESS) if task in rows]
        for task, row in rows.items():
            if not task.startswith("event ") or row in others:
                continue
            text = f"{name}: {task} {row['micros']:.1f} µs, {row['nodes'] or '?'} launches"
            if best:
                text += f", {100 * row['micros'] / best:.2f} % of the attention's {best:.1f} µs"
            for other in others:
                text += (
                    f"; {other['task']} takes {other['micros'] / row['micros']:.1f}x the GPU time, "
                    f"{other['elapsed_micros'] / row['elapsed_micros']:.1f}x with launching"
                )
            print(text)

    def sweep(self, setup: Setup, name: str) -> None:
        """Time the launchers' choices against their neighbours; the best ones of each task come last."""
        first = len(self.results)
        for task in self.tasks(setup, name, (score_bench.score_tasks,)):
            if task.name in CHOICES and self.only in task.name:
                self._sweep_score(setup, name, task)
        if self.only in "stitch pack, stitch fill":
            self._sweep_moves(setup, name)
        if self.only in "select top-k":
            self._sweep_select(setup, name)
        swept = sorted(self.results[first:], key=lambda result: (result["task"], result["micros"]))
        for task_name, rows in itertools.groupby(swept, key=lambda result: result["task"]):
            for row in itertools.islice(rows, 4):
                print(f"{name}: best of {task_name}:{row['label']:32} {row['percent_of_copy']:6.1f} %")

    def _sweep_score(self, setup: Setup, name: str, task: Task) -> None:
        module, attribute = CHOICES[task.name]
        original = getattr(module, attribute)
        itemsize = _score.number_bytes(setup.layers.dtype)
        whole = _score.WHOLE
        wholes = SWEPT_WHOLES if task.passes_nbytes else (whole,)
        for size, nbytes, warps, stages in itertools.product(wholes, SWEPT_BYTES, SWEPT_WARPS, SWEPT_STAGES):
            if not 32 <= nbytes // (32 * warps) <= 256:  # bytes of a thread
                continue
            _score.WHOLE = size

            def choose(
                *arguments: Any, nbytes: int = nbytes, warps: int = warps, stages: int = stages
            ) -> dict[str, int]:
                chosen: dict[str, int] = original(*arguments)
                width = chosen["WIDTH"] if "WIDTH" in chosen else 2 * chosen["HALF"]
                tile = max(nbytes // (width * itemsize), 16)
                return chosen | {"TILE": tile, "STAGES": stages, "num_warps": warps}

            setattr(module, attribute, choose)
            label = f" {nbytes} B, {warps} warps, {stages} stages"
            self.try_choice(setup, name, task, label + (f", {size}" if task.passes_nbytes else ""))
        setattr(module, attribute, original)
        _score.WHOLE = whole

    def _sweep_moves(self, setup: Setup, name: str) -> None:
        chosen = _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS
        for nbytes, warps, programs in itertools.product((4096, 8192, 16384, 32768), (1, 2, 4, 8), (2048, 8192)):
            if not 32 <= nbytes // (32 * warps) <= 512:  # bytes of a thread
                continue
            _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS = nbytes, warps, programs
            for task in self.tasks(setup, name, (stitch_tasks,)):
                self.try_choice(setup, name, task, f" {nbytes} B, {warps} warps, {programs} ≤")
        _moves.MOVE_BYTES, _moves.MOVE_WARPS, _moves.MOVE_PROGRAMS = chosen

    def _sweep_select(self, setup: Setup, name: str) -> None:
        chosen = select._SLOTS_PER_WARP
        for slots in (128, 256, 512, 1024):
            select._SLOTS_PER_WARP = slots
            for task in self.tasks(setup, name, (select_tasks,)):
                if task.name == "select top-k":
                    self.try_choice(setup, name, task, f" {slots} slots a warp")
        select._SLOTS_PER_WARP = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help=f"default: {', '.join(DEFAULT_SHAPES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the caches; default: bfloat16")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--layers", type=int, help="layers timed together, where the shape's do not fit")
    parser.add_argument("--sweep", action="store_true", help="only time other tile sizes and warps")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    copies = copy_bandwidths()
    copy = max(copies.values())
    print(f"{properties.name}, torch {torch.__version__}: copy {copy / 1e9:.0f} GB/s (read + write), the best of")
    for way, bandwidth in copies.items():
        print(f"  {way}: {bandwidth / 1e9:.0f} GB/s")
    run = Run(copy, arguments.only)
    for name in arguments.shape or DEFAULT_SHAPES:
        shape = SHAPES[name]
        if arguments.layers:
            shape = dataclasses.replace(shape, layers=arguments.layers)
        print(f"\n{name}, {arguments.dtype}: {shape}")
        dtype = getattr(torch, arguments.dtype)
        setup = run.guarded(f"{name} set-up", lambda shape=shape, dtype=dtype: make_setup(shape, dtype))
        if setup is not None:
            (run.sweep if arguments.sweep else run.shape)(setup, name)
        del setup
        torch.cuda.empty_cache()
        if arguments.json:  # after each shape: what has been measured is not lost if the next one fails
            text = {
                "device": properties.name,
                "torch": torch.__version__,
                "dtype": arguments.dtype,
                "copy_bytes_per_second": copy,
                "copies": copies,
                "failures": run.failures,
                "results": run.results,
            }
            arguments.json.write_text(json.dumps(text, indent=1))
    sys.exit(1 if run.failures else 0)


if __name__ == "__main__":
    main()
