"""Static tables of counts per (layer, KV head), made from texts that are not among the tournament's contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sim_attention import attention_paid, place_of
from sim_counts import table_of
from sim_prefill import prefill
from torch import Tensor

from nitro.eval import tasks
from nitro.eval.case import Writer
from nitro.eval.settings import EvalSettings

SEED = 1_000_003
"""Added to the tournament's seed: needles, too, are others."""
CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class Tables:
    """Weights ``[L, H]`` of counts, by the share of a context that stays.

    Attributes:
        of_scores: mean counts of D, which lets all heads compete.
        of_attention: the attention that heads pay to the answers of needles; the same for all shares.
    """

    of_scores: dict[float, Tensor]
    of_attention: dict[float, Tensor]


def calibrate(model: Any, writer: Writer, shares: Sequence[float], length: int, seed: int = 0) -> Tables:
    """Return tables of ``CONTEXTS`` needles in the writer's text, half of them numbers and half of them words.

    Args:
        model: of the tournament.
        writer: has the calibration text.
        shares: of a context that stay.
        length: of the contexts, in tokens.
        seed: of the tournament.
    """
    settings = EvalSettings(lengths=(length,), contexts=CONTEXTS // 2, seed=seed + SEED)
    contexts, paid = [], []
    for task in ("needle-text", "needle-word"):
        for case in tasks.cases(task, length, settings, writer):
            contexts.append(prefill(model, case.context, case.name))
            place = place_of(case.answer, case.context)
            paid.append(attention_paid(model, contexts[-1], case.question, case.answer, place))
    return Tables(
        {share: table_of(contexts, share) for share in shares},
        {1.0: torch.stack(paid).double().mean(dim=0)},
    )
