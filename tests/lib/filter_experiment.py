"""A prompt in chunks under `streaming`, its tokens written, filtered or left out; prints docs/kernels.md's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from toy_engine import VOCABULARY, Engine, Model
from write_filter import filter_slots_ref

SINKS, NEWEST = 2, 10
BUDGET = SINKS + NEWEST
PROMPT = 64


@dataclass
class Outcome:
    """What became of a prompt, and what its queries read in the first layer."""

    logits: Tensor | None = None  # of the last token
    content: dict[int, Tensor] = field(default_factory=dict)
    peak: int = 0  # slots
    rejected: int = 0  # tokens that the eviction after their own chunk drops
    unwritten: int = 0  # rows (token, layer) that were not written
    stale_reads: int = 0  # of a slot that does not hold the token it should
    stale_queries: int = 0
    wrong: int = 0  # queries that do not read what was kept before and their own chunk up to themselves
    without_self: int = 0
    blind: int = 0  # queries that read nothing
    survivors: int = 0
    masked: int = 0  # survivors that read what they would if rejected tokens did not exist


def prompt(length: int = PROMPT) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def chunked(size: int, first: int = 0, length: int = PROMPT) -> list[int]:
    """Chunks of ``size`` tokens after one of ``first``."""
    sizes = [first] if first else []
    while sum(sizes) < length:
        sizes.append(min(size, length - sum(sizes)))
    return sizes


def new_engine(model: Model, length: int = PROMPT) -> Engine:
    blocks = -(-length // 4) + 1
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)).tolist()
    return Engine(model, table)


def prefill(model: Model, tokens: Sequence[int], chunks: Sequence[int], mode: str) -> Outcome:
    """Run a prompt; after each chunk, all but the first ``SINKS`` and the last ``NEWEST`` tokens are evicted.

    Modes: "write" is what Nitro does. "filter" does not write rejected tokens and leaves lengths alone; "filter,
    shorter" gives the survivors dense slots and takes the rejected off the length; "filter last layer" filters that
    layer of all chunks but the last; "never computed" leaves rejected tokens out of the step; "own attention" does not
    read the chunk from the cache.
    """
    engine, result = new_engine(model, len(tokens)), Outcome()
    end = 0
    hidden: list[Tensor] = []
    for size in chunks:
        before, start, end = list(engine.slots), end, end + size
        used = len(before)
        positions = list(range(start, end))
        # The eviction that follows this chunk, known before it.
        survives = {p: p < SINKS or p >= end - NEWEST for p in (*before, *positions)}
        survivors = [p for p in positions if survives[p]]
        bounds = torch.tensor([SINKS], dtype=torch.int32), torch.tensor([end - NEWEST])
        starts = torch.tensor([0, size], dtype=torch.int32)

        def filtered(slots: Sequence[int]) -> Tensor:
            mapping = engine.mapping(slots)
            return filter_slots_ref(mapping, torch.tensor(positions), starts, *bounds)  # noqa: B023

        everywhere = engine.mapping(range(used, used + size))
        mappings, seq_len, after = [everywhere] * model.num_layers, used + size, before + positions
        if mode == "filter":
            mappings = [filtered(range(used, used + size))] * model.num_layers
        elif mode == "filter last layer" and end < len(tokens):
            mappings[-1] = filtered(range(used, used + size))
        elif mode == "filter, shorter":
            ranks = [used + sum(q < p for q in survivors) for p in positions]
            mappings = [filtered(ranks)] * model.num_layers
            seq_len, after = used + len(survivors), before + survivors
        elif mode == "never computed":
            positions = survivors
            seq_len, after = used + len(survivors), before + survivors
            mappings = [engine.mapping(range(used, seq_len))] * model.num_layers
        result.rejected += size - len(survivors)
        result.survivors += len(survivors)

        chunk = [tokens[p] for p in positions]
        if mode == "own attention":
            holes = [slot for slot, p in enumerate(before) if not survives[p]]
            places = [*holes, *range(used, used + size)][: len(survivors)]
            where = dict(zip(survivors, places, strict=True))
            mappings = [filtered([where.get(p, 0) for p in positions])] * model.num_layers
            hidden = engine.run_unwritten(chunk, positions, mappings, used)
            engine.slots = before + [0] * (max([used - 1, *places]) + 1 - used)
            for p, slot in where.items():
                engine.slots[slot] = p
            engine.peak = max(engine.peak, len(engine.slots))
        else:
            engine.slots = after
            hidden, seen = engine.run(chunk, positions, mappings, seq_len)
            _count(result, after, before, survivors, positions, seen[0])
            engine.compact([slot for slot, p in enumerate(after) if survives[p]])
        result.unwritten += sum(int((mapping < 0).sum()) for mapping in mappings)
    result.logits, result.content, result.peak = model.logits(hidden[-1]), engine.content(), engine.peak
    return result


def _count(
    result: Outcome,
    should: Sequence[int],
    before: Sequence[int],
    survivors: Sequence[int],
    positions: Sequence[int],
    seen: Sequence[Sequence[int]],
) -> None:
    for index, (position, read) in enumerate(zip(positions, seen, strict=True)):
        stale = sum(got != want for got, want in zip(read, should, strict=False))
        result.stale_reads += stale
        result.stale_queries += stale > 0
        result.wrong += sorted(read) != sorted((*before, *positions[: index + 1]))
        result.without_self += position not in read
        result.blind += not read
        if position in survivors:
            result.masked += sorted(read) == sorted((*before, *(p for p in survivors if p <= position)))


def needed(keep: Sequence[Sequence[bool]], sampled: bool) -> list[list[bool]]:
    """Return ``[layer][token]``: whether a chunk's cached row has to be there, by the recurrence of docs/kernels.md.

    Args:
        keep: ``[layer][token]``, whether the eviction after the chunk keeps the row.
        sampled: the last token's logits are used.
    """
    size = len(keep[0])
    leaves = [sampled and token == size - 1 for token in range(size)]  # hidden states that someone uses
    found: list[list[bool]] = []
    for kept in reversed(keep):
        rows = [kept[token] or any(leaves[token:]) for token in range(size)]
        leaves = [row or leaf for row, leaf in zip(rows, leaves, strict=True)]
        found.insert(0, rows)
    return found


def influence(model: Model, tokens: Sequence[int], keep: Sequence[Sequence[bool]], sampled: bool) -> list[list[bool]]:
    """The same, found out: whether any use of the chunk has a gradient with respect to the row."""
    size, engine = len(tokens), new_engine(model)
    engine.run(prompt(3), range(3), [engine.mapping(range(3))] * model.num_layers, 3)
    shape = (model.num_layers, size, 2, 16)
    nudges = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    mapping = engine.mapping(range(3, 3 + size))
    positions = range(3, 3 + size)
    hidden, _ = engine.run(tokens, positions, [mapping] * model.num_layers, 3 + size, [list(n) for n in nudges])
    uses = [model.logits(hidden[-1])] if sampled else []
    for layer, kept in enumerate(keep):
        rows, _ = engine.read(layer, 3 + size)
        uses += [rows[3 + token] for token in range(size) if kept[token]]
    if not uses:
        return [[False] * size for _ in keep]
    generator = torch.Generator().manual_seed(3)
    weighed = [(torch.randn(use.shape, generator=generator, dtype=torch.float64) * use).sum() for use in uses]
    (gradient,) = torch.autograd.grad(torch.stack(weighed).sum(), nudges)
    return (gradient.abs().amax((-1, -2)) > 0).tolist()


TABLE = {"1": chunked(1), "8": chunked(8), "16": chunked(16), "32": chunked(32), "64": chunked(64)} | {
    "2, then 31": chunked(31, first=SINKS)
}


def row(model: Model, chunks: Sequence[int]) -> tuple[int, ...]:
    """One row of the table: counts of one prompt of ``PROMPT`` tokens."""
    tokens = prompt()
    found = {
        mode: prefill(model, tokens, chunks, mode) for mode in ("write", "filter", "filter, shorter", "own attention")
    }
    stale, short = found["filter"], found["filter, shorter"]
    return (
        stale.rejected,
        stale.stale_reads,
        stale.stale_queries,
        short.wrong,
        short.without_self,
        short.blind,
        short.survivors - short.masked,
        found["write"].peak,
        found["own attention"].peak,
    )


def main() -> None:
    model = Model()
    for name, chunks in TABLE.items():
        print(f"| {name} |", " | ".join(f"{n:,}" for n in row(model, chunks)), "|")


if __name__ == "__main__":
    main()
