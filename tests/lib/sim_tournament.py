"""One context after the other, each prefilled once and read under every candidate and budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sim_answer import answer_rows
from sim_candidates import Candidate
from sim_prefill import prefill
from sim_store import Row, SimStore
from torch import Tensor

from nitro.eval.case import Case
from nitro.eval.settings import FULL

BATCH = 12
"""Ways to evict that are read at once: enough rows for the matrix products, few enough for their caches to fit."""


Entry = tuple[Candidate, Sequence[float]]
"""A candidate, and the shares of a context that it is to keep."""


@dataclass(frozen=True, slots=True)
class Models:
    """The model under test, and the same in float32 for presses to score with.

    Attributes:
        reader: computes contexts and answers.
        scorer: may be the same.
    """

    reader: Any
    scorer: Any


def play(
    models: Models,
    cases: Sequence[Case],
    where: Mapping[str, Any],
    entries: Sequence[Entry],
    store: SimStore,
    seed: int = 0,
) -> Iterator[int]:
    """Play what the store has not, and yield the number of rows that each case has added.

    Args:
        models: compute.
        cases: of one task and length.
        where: ``task`` and ``length``, which all rows begin with.
        entries: the candidates, with their budgets.
        store: is given the rows, those of the full cache among them.
        seed: of the random policy.
    """
    for case in cases:
        key = where["task"], where["length"], case.name
        missing = [
            (candidate, budget)
            for candidate, budgets in entries
            for budget in budgets
            if (*key, candidate.name, budget) not in store.rows
        ]
        if not missing:
            continue
        context = prefill(models.reader, case.context, case.name, seed, models.scorer)
        labels: list[tuple[str, str, float]] = []
        masks: list[Tensor] = []
        if (*key, FULL, 1.0) not in store.rows:
            labels.append((FULL, FULL, 1.0))
            masks.append(torch.ones(context.x.keys.shape[:3], dtype=torch.bool))
        for candidate in dict.fromkeys(candidate for candidate, _ in missing):
            keep = candidate.prepare(context)
            for budget in (budget for one, budget in missing if one == candidate):
                count = round(budget * context.length)
                masks.append(checked(keep(count), count, candidate))
                labels.append((candidate.name, candidate.kind, budget))
        found: dict[int, Row] = {}
        # The most padding is between caches of other sizes, so that equal ones are read together.
        ordered = sorted(range(len(masks)), key=lambda i: int(masks[i].sum(dim=-1).amax(dim=-1).sum()))
        for start in range(0, len(ordered), BATCH):
            part = ordered[start : start + BATCH]
            rows = answer_rows(
                models.reader, context, torch.stack([masks[i] for i in part]), case.question, case.answer
            )
            found |= dict(zip(part, rows, strict=True))
        store.add(
            {**where, "case": case.name, "depth": case.depth, "candidate": name, "kind": kind, "budget": budget, **row}
            for (name, kind, budget), row in ((labels[i], found[i]) for i in range(len(masks)))
        )
        yield len(masks)


def checked(kept: Tensor, count: int, candidate: Candidate) -> Tensor:
    """Return a mask, if it keeps as many as it may.

    Raises:
        AssertionError: it keeps other counts than its kind and the budget say.
    """
    counts = kept.sum(dim=-1)
    assert int(counts.sum()) == count * counts.numel(), f"{candidate.name} keeps {int(counts.sum())} slots"
    if candidate.kind != "unequal":
        assert bool((counts == count).all()), f"{candidate.name} keeps unequal counts"
    return kept
