#!/usr/bin/env python3
"""Time one eviction step by Nitro's kernels against the naive ways to do the same: one table, ratios included.

    python3 ci/bench_naive.py [--shape essay|large] [--layers N] [--repeats N] [--json FILE]
    TRITON_INTERPRET=1 python3 ci/bench_naive.py --device cpu --tiny      # does it run? its times mean nothing

The ways, all on the same keys and values:

  nitro               the kernels: (score,) select, fill; a constant number of launches for all requests and layers
  indexing            PyTorch on the paged cache, request by request and layer by layer: gather by block table,
                      (score,) top-k, gather, scatter back
  kvpress             what a kvpress press does, request by request and layer by layer, on keys and values that are
                      dense to begin with: (score,) top-k per head, gather. Its own code where kvpress can be
                      imported, otherwise the same calls of PyTorch
  kvpress, one batch  the same with all requests in one tensor, which only works while all are of one length

"scores given" leaves scoring out; "scores computed" is KeyDiff. Before anything is timed, each way's kept tokens are
compared: equal sets where scores are given, equal but for ties (within the rounding of the way's own arithmetic:
kvpress scores in the cache's dtype) where they are computed; and the keys and values that stay are looked at.

"GPU" is the time of the GPU alone: the calls are captured in a CUDA graph and replayed, so that launches cost nothing.
"wall" is the time until the GPU has finished a call issued by the host as it would be in an engine, "host" the time
until the call returns. Only Nitro moves logical positions along, and only kvpress is spared the paged cache.

So that each repetition does the same work, moves go to a copy of the cache: what is scored stays as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out
from bench_kernels import gpu_micros, host_micros

from nitro.kernels import compact, score, select
from nitro.kernels.paged import PagedLayers, RaggedBatch


@dataclass(frozen=True)
class Shape:
    """What is evicted in one step, in all layers."""

    requests: int
    length: int
    keep: int
    layers: int
    heads: int
    head_dim: int
    block_size: int = 16

    def layer_bytes(self, itemsize: int) -> int:
        """Of the keys and values of one layer."""
        return self.requests * self.length * self.heads * 2 * self.head_dim * itemsize


SHAPES = {
    # Qwen2.5-0.5B with 2,048 requests, budget 330 and slack 64: every step, 32 requests have grown by the slack.
    "essay": Shape(requests=32, length=394, keep=330, layers=24, heads=2, head_dim=64),
    # Half of 4k prompts on a model of the size of 8B.
    "large": Shape(requests=32, length=4096, keep=2048, layers=32, heads=8, head_dim=128),
}
# How far a cosine may be from that of the last token that stays, where a way's choice is not the reference's: twice the
# error of a few float32 sums; and bfloat16's 8 bits, to which kvpress rounds unit keys, their mean, the products' sum,
# the norms and the cosine.
FLOAT32_TOLERANCE = 8e-6
BFLOAT16_TOLERANCE = 2**-5
TINY = Shape(requests=3, length=43, keep=29, layers=2, heads=2, head_dim=16, block_size=8)


@dataclass(frozen=True)
class Setup:
    """Caches of a shape, with the scores to be given."""

    shape: Shape
    source: PagedLayers  # scored and read; never changed
    target: PagedLayers  # survivors move in here; a copy of the above at first
    batch: RaggedBatch
    positions: Tensor  # int32 [L, num_blocks, H, block_size], moved along
    scores: Tensor  # float32 [L, H, total]; those of a row all differ
    scratch: Tensor  # int32, of the same shape

    def by_request(self, x: Tensor) -> Tensor:
        """``[L, H, total]`` as ``[L, H, R, N]``."""
        return x.unflatten(2, (self.shape.requests, self.shape.length))

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values as transformers caches them: ``[R, H, N, D]``, contiguous."""
        size, length = self.shape.block_size, self.shape.length
        slots = torch.arange(length, device=self.source.device)
        blocks = self.batch.block_tables[:, slots // size].long()  # [R, N]
        found = []
        for cache in self.source.caches:
            rows = cache[blocks, :, slots % size].transpose(1, 2)  # [R, H, N, 2 D]
            keys, values = rows.split(self.shape.head_dim, dim=-1)
            found.append((keys.contiguous(), values.contiguous()))
        return found

    def reset(self) -> None:
        """Undo all moves."""
        for target, source in zip(self.target.caches, self.source.caches, strict=True):
            target.copy_(source)
        _number_slots(self.positions, self.batch, self.shape)


@dataclass(frozen=True)
class Way:
    """One way of doing it; ``kept`` does it once, checks what it moved, and returns the kept tokens."""

    name: str
    call: Callable[[], Any]
    kept: Callable[[], Tensor]  # bool [L, H, R, N]
    tolerance: float = 0.0  # of its scores


def make_setup(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Setup:
    """NHD caches with shuffled blocks; keys share a direction, as real ones do."""
    torch.manual_seed(0)
    blocks = -(-shape.length // shape.block_size)
    size = (shape.requests * blocks, shape.block_size, shape.heads, 2 * shape.head_dim)
    caches = []
    for _ in range(shape.layers):
        cache = torch.empty(size, dtype=dtype, device=device).normal_()
        cache[..., : shape.head_dim] += torch.randn(shape.heads, shape.head_dim, dtype=dtype, device=device)
        caches.append(cache.transpose(1, 2))
    lengths = torch.full((shape.requests,), shape.length, dtype=torch.int32, device=device)
    tables = torch.randperm(size[0], dtype=torch.int32, device=device).view(shape.requests, blocks)
    batch = RaggedBatch(
        block_tables=tables,
        lengths=lengths,
        keep=torch.full_like(lengths, shape.keep),
        protect=torch.zeros_like(lengths),  # as kvpress: by score alone
        offsets=torch.arange(shape.requests + 1, device=device) * shape.length,
        window=0,
        max_length=shape.length,
        total=shape.requests * shape.length,
        dst_tables=tables,
    )
    rows = torch.rand(shape.layers, shape.heads, shape.requests, shape.length, device=device)
    scores = rows.argsort(dim=-1).float().flatten(2)  # whole numbers, each once in a row
    positions = torch.empty(shape.layers, size[0], shape.heads, shape.block_size, dtype=torch.int32, device=device)
    target = PagedLayers.of([cache.clone(memory_format=torch.preserve_format) for cache in caches])
    setup = Setup(
        shape, PagedLayers.of(caches), target, batch, positions, scores, torch.empty_like(scores, dtype=torch.int32)
    )
    setup.reset()
    return setup


def _number_slots(positions: Tensor, batch: RaggedBatch, shape: Shape) -> None:
    slots = torch.arange(batch.block_tables.shape[1] * shape.block_size, dtype=torch.int32, device=batch.device)
    numbered = slots.view(1, -1, 1, shape.block_size).expand(shape.requests, -1, shape.heads, -1)
    positions[:, batch.block_tables.long()] = numbered


def keydiff(keys: Tensor) -> Tensor:
    """KeyDiff in the plainest PyTorch: ``[..., N, D] -> [..., N]``, in the keys' dtype, as kvpress does it."""
    anchor = normalize(keys, p=2, dim=-1).mean(dim=-2, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)


def nitro_way(setup: Setup, computed: bool) -> Iterator[Way]:
    shape, batch = setup.shape, setup.batch
    out = torch.empty_like(setup.scores)

    def call() -> Tensor:
        scores = score.keydiff(setup.source, batch, out=out) if computed else setup.scores
        mask, _ = select.select_ragged(scores, batch)
        compact.fill_ragged(setup.target, batch, mask, setup.positions, scratch=setup.scratch)
        return mask

    def kept() -> Tensor:
        """By the positions that were moved along; keys and values must be those of these positions."""
        setup.reset()
        mask = setup.by_request(call()) != 0
        slots = torch.arange(shape.keep, device=batch.device)
        found = torch.zeros_like(mask)
        for request in range(shape.requests):
            table = batch.block_tables[request]
            blocks = table[slots // shape.block_size].long()
            where = setup.positions[:, blocks, :, slots % shape.block_size].permute(1, 2, 0).long()  # [L, H, keep]
            found[:, :, request].scatter_(2, where, True)
            for layer in range(shape.layers):
                before = setup.source.rows(layer, table, shape.length)
                after = setup.target.rows(layer, table, shape.keep)
                index = where[layer, ..., None].expand(-1, -1, before.shape[-1])
                _same_bits(after, before.gather(1, index))
        if not torch.equal(found, mask):
            raise AssertionError("the positions that fill has moved are not those of the mask")
        return found

    yield Way("nitro", call, kept, FLOAT32_TOLERANCE)


def indexing_way(setup: Setup, computed: bool) -> Iterator[Way]:
    shape, tables = setup.shape, setup.batch.block_tables
    slots = torch.arange(shape.length, device=setup.batch.device)
    given = setup.by_request(setup.scores)

    def call() -> list[Tensor]:
        chosen = []
        for request in range(shape.requests):
            blocks = tables[request][slots // shape.block_size].long()
            within = slots % shape.block_size
            for layer, (source, target) in enumerate(zip(setup.source.caches, setup.target.caches, strict=True)):
                rows = source[blocks, :, within].transpose(0, 1)  # [H, N, 2 D]
                scores = keydiff(rows[..., : shape.head_dim].float()) if computed else given[layer, :, request]
                index = scores.topk(shape.keep, dim=-1).indices
                rows = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
                target[blocks[: shape.keep], :, within[: shape.keep]] = rows.transpose(0, 1)
                chosen.append(index)
        return chosen

    def kept() -> Tensor:
        setup.reset()
        chosen = call()
        found = torch.zeros_like(given, dtype=torch.bool)
        for number, index in enumerate(chosen):
            request, layer = divmod(number, shape.layers)
            before = setup.source.rows(layer, tables[request], shape.length)
            after = setup.target.rows(layer, tables[request], shape.keep)
            _same_bits(after, before.gather(1, index[..., None].expand(-1, -1, before.shape[-1])))
            found[layer, :, request].scatter_(1, index, True)
        return found

    yield Way("indexing", call, kept, FLOAT32_TOLERANCE)


class PlainPress:
    """The same calls of PyTorch as kvpress 0.5.5's ``ScorerPress.compress`` and ``KeyDiffPress.score``."""

    def __init__(self, keep: int, computed: bool) -> None:
        self.keep, self.computed = keep, computed

    def score(
        self, module: Any, hidden_states: None, keys: Tensor, values: Tensor, attentions: None, kwargs: dict[str, Any]
    ) -> Tensor:
        given: Tensor = kwargs["scores"]
        return keydiff(keys) if self.computed else given

    def compress(
        self, module: Any, hidden_states: None, keys: Tensor, values: Tensor, attentions: None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        indices = scores.topk(self.keep, dim=-1).indices
        indices = indices.unsqueeze(-1).expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, indices).contiguous(), values.gather(2, indices).contiguous()


def make_press(shape: Shape, computed: bool) -> tuple[Any, str]:
    """Return a press that keeps ``shape.keep`` tokens, and where it comes from."""
    try:
        # Not from kvpress itself, so that a copy of these modules alone will do; they need transformers only.
        from kvpress.presses.keydiff_press import KeyDiffPress
        from kvpress.presses.scorer_press import ScorerPress
    except ImportError as error:
        return PlainPress(shape.keep, computed), f"PyTorch calls as in kvpress 0.5.5 ({error})"
    ratio = (shape.length - shape.keep - 0.5) / shape.length  # it rounds down what is left

    class GivenPress(ScorerPress):  # type: ignore[misc]
        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            return kwargs["scores"]

    return (KeyDiffPress if computed else GivenPress)(compression_ratio=ratio), "its own code"


def kvpress_ways(setup: Setup, computed: bool) -> Iterator[Way]:
    shape = setup.shape
    press, origin = make_press(shape, computed)
    print(f"kvpress: {origin}", flush=True)
    module = SimpleNamespace(head_dim=shape.head_dim)
    dense = setup.dense()
    given = setup.by_request(setup.scores).transpose(1, 2).contiguous()  # [L, R, H, N]

    def compress(batch: int) -> list[tuple[Tensor, Tensor]]:
        outputs = []
        for first in range(0, shape.requests, batch):
            some = slice(first, first + batch)
            for (keys, values), scores in zip(dense, given, strict=True):
                extra = {"scores": scores[some]}
                outputs.append(press.compress(module, None, keys[some], values[some], None, extra))
        return outputs

    def kept(batch: int) -> Tensor:
        """By the press's own scores and top-k; its keys and values must be those."""
        found = torch.zeros_like(given, dtype=torch.bool)
        for number, (got_keys, got_values) in enumerate(compress(batch)):
            group, layer = divmod(number, shape.layers)
            some = slice(group * batch, (group + 1) * batch)
            keys, values = (x[some] for x in dense[layer])
            scores = press.score(module, None, keys, values, None, {"scores": given[layer, some]})
            index = scores.topk(shape.keep, dim=-1).indices
            found[layer, some].scatter_(2, index, True)
            index = index.unsqueeze(-1).expand(-1, -1, -1, shape.head_dim)
            _same_bits(got_keys, keys.gather(2, index))
            _same_bits(got_values, values.gather(2, index))
        return found.transpose(1, 2)

    for name, batch in (("kvpress", 1), ("kvpress, one batch", shape.requests)):
        yield Way(name, lambda batch=batch: compress(batch), lambda batch=batch: kept(batch), BFLOAT16_TOLERANCE)


def _same_bits(got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape or not torch.equal(got.view(torch.int16), want.view(torch.int16)):
        raise AssertionError("the keys and values that stay are not those of the tokens that stay")


def check_kept(setup: Setup, way: Way, computed: bool) -> int:
    """Return how many tokens a way keeps that the others need not keep; raise if it is more than ties explain."""
    shape = setup.shape
    scores = setup.by_request(score.keydiff_ref(setup.source, setup.batch) if computed else setup.scores)
    scores = scores.double()
    last = scores.topk(shape.keep, dim=-1).values[..., -1:]
    got = way.kept()
    if not bool((got.sum(dim=-1) == shape.keep).all()):
        raise AssertionError(f"{way.name} does not keep {shape.keep} tokens in each row")
    differs = got != (scores >= last)
    bound = way.tolerance if computed else 0.0
    worst = float((scores - last).abs()[differs].max()) if bool(differs.any()) else 0.0
    if worst > bound or (bound == 0.0 and bool(differs.any())):
        raise AssertionError(f"{way.name} keeps other tokens: scores differ by {worst:g} from the last that stays")
    return int(differs.sum()) // 2


def wall_micros(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time from issuing a call until the device has finished it, in microseconds."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        del result  # freed outside of the clock, as a step's output lives on
    return statistics.median(times[1:])


WAYS: tuple[Callable[[Setup, bool], Iterator[Way]], ...] = (nitro_way, indexing_way, kvpress_ways)


def measure(setup: Setup, name: str, repeats: int) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each way and kind of scores, and how many ways failed."""
    rows, failures, device = [], 0, setup.source.device
    for computed in (False, True):
        for ways in WAYS:
            try:
                for way in ways(setup, computed):
                    differ = check_kept(setup, way, computed)
                    wall = wall_micros(way.call, repeats, device)
                    cuda = device.type == "cuda"
                    rows.append(
                        {
                            "shape": name,
                            "scores": "computed" if computed else "given",
                            "way": way.name,
                            "layers": setup.shape.layers,
                            "gpu_micros": gpu_micros(way.call, repeats) if cuda else None,
                            "wall_micros": wall,
                            "host_micros": host_micros(way.call, repeats) if cuda else None,
                            "tokens_kept": setup.shape.keep * setup.batch.num_requests * setup.scores[..., 0].numel(),
                            "tokens_that_differ": differ,
                        }
                    )
                    print(f"{name}, {rows[-1]['scores']}: {way.name} done", flush=True)
            except Exception:
                failures += 1
                print(f"{name}, computed={computed}: {ways.__name__} failed", flush=True)
                traceback.print_exc()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows, failures


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each row's times in units of Nitro's of the same shape and kind of scores."""
    nitro = {(row["shape"], row["scores"]): row for row in rows if row["way"] == "nitro"}
    for row in rows:
        for key in ("gpu", "wall"):
            base = nitro.get((row["shape"], row["scores"]), {}).get(f"{key}_micros")
            row[f"{key}_ratio"] = row[f"{key}_micros"] / base if base else None
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        "| shape | scores | way | GPU µs | × Nitro | wall µs | × Nitro | host µs | tokens that differ |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [f"{row['shape']}, {row['layers']} layers", row["scores"], row["way"]]
        for key in ("gpu", "wall"):
            cells += [number(row[f"{key}_micros"], ",.0f"), number(row[f"{key}_ratio"], ".1f")]
        cells += [number(row["host_micros"], ",.0f"), f"{row['tokens_that_differ']:,} of {row['tokens_kept']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fitting(shape: Shape, device: torch.device) -> Shape:
    """Return the shape with as many of its layers as memory has room for."""
    if device.type != "cuda":
        return shape
    # Source, target, dense, and twice what kvpress keeps (the graph's and the eager call's); the rest is small.
    layer = shape.layer_bytes(2) * (3 + 2 * shape.keep / shape.length)
    layers = int(torch.cuda.mem_get_info(device)[0] * 0.8 / layer)
    if layers < shape.layers:
        print(f"memory has room for {layers} of {shape.layers} layers", flush=True)
    return dataclasses.replace(shape, layers=max(min(layers, shape.layers), 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--layers", type=int, help="time fewer layers than the shape has")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shape of its own, to see that everything runs")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    described = torch.cuda.get_device_properties(device).name if cuda else "CPU"
    shapes = {"tiny": TINY} if arguments.tiny else {name: SHAPES[name] for name in arguments.shape or SHAPES}
    rows: list[dict[str, Any]] = []
    failures = 0
    for name, shape in shapes.items():
        if arguments.layers:
            shape = dataclasses.replace(shape, layers=arguments.layers)
        shape = fitting(shape, device)
        print(f"{name}: {shape}", flush=True)
        try:
            setup = make_setup(shape, device)
            found, failed = measure(setup, name, arguments.repeats)
            del setup
        except Exception:
            found, failed = [], 1
            traceback.print_exc()
        rows, failures = rows + found, failures + failed
        if cuda:
            torch.cuda.empty_cache()
    rows = with_ratios(rows)
    print(f"\n{described}, torch {torch.__version__}, bfloat16, median of {arguments.repeats}\n{table(rows)}")
    if arguments.json:
        text = {"device": described, "torch": torch.__version__, "repeats": arguments.repeats, "results": rows}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n")
    if failures:
        print(f"{failures} failed, see above", file=sys.stderr)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
