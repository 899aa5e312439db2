"""The figures of the demo's table, from two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Literal

from nitro.demo.quality import repeated_ngram_ratio, unique_word_ratio
from nitro.demo.records import Run

Better = Literal["lower", "higher"]
Verdict = Literal["better", "same", "worse", "unclear"]
# Figures closer than this are called the same.
SAME_WITHIN = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs.

    Attributes:
        key: its name in the JSON.
        label: its name in the table, with the unit.
        stock: stock vLLM's value.
        nitro: Nitro's value.
        better: which values are better.
        digits: decimals shown.
        noise: two standard errors of the difference; 0 for figures that are counted, not estimated.
    """

    key: str
    label: str
    stock: float
    nitro: float
    better: Better
    digits: int = 0
    noise: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Nitro's value over stock's; None where stock's is 0."""
        return self.nitro / self.stock if self.stock else None

    @property
    def verdict(self) -> Verdict:
        """How Nitro compares with stock; unclear where the difference may be chance."""
        gap = abs(self.nitro - self.stock)
        if gap <= SAME_WITHIN * max(abs(self.stock), abs(self.nitro)):
            return "same"
        if gap <= self.noise:
            return "unclear"
        return "better" if (self.nitro < self.stock) == (self.better == "lower") else "worse"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON-able values."""
        return asdict(self) | {"ratio": self.ratio, "verdict": self.verdict}


def rows(stock: Run, nitro: Run, nll: Sequence[Sequence[float]]) -> list[Row]:
    """Return the table.

    Args:
        stock: stock vLLM's run.
        nitro: Nitro's run.
        nll: mean negative log-likelihood of each answer, for stock and for Nitro, in nats per token.
    """

    def row(key: str, label: str, figure: Callable[[Run], float], better: Better, digits: int = 0) -> Row:
        return Row(key, label, figure(stock), figure(nitro), better, digits)

    def quality(key: str, label: str, figures: Sequence[Sequence[float]], better: Better) -> Row:
        return Row(key, label, fmean(figures[0]), fmean(figures[1]), better, 3, paired_noise(*figures))

    def per_answer(figure: Callable[[str], float]) -> list[list[float]]:
        return [[figure(answer.text) for answer in run.answers] for run in (stock, nitro)]

    return [
        row("peak_blocks", "KV blocks allocated, peak", peak_blocks, "lower"),
        row("blocks_per_running", "KV blocks per running request, mean", blocks_per_running, "lower", 1),
        row("blocks_at_end", "KV blocks at a request's end, mean", blocks_at_end, "lower", 1),
        row("fragmentation", "slots allocated / in use, mean", fragmentation, "lower", 2),
        row("running_mean", "running requests, mean over time", running_mean, "higher", 1),
        row("running_peak", "running requests, peak", lambda r: max(s.running for s in r.steps), "higher"),
        row("preemptions", "preemptions", lambda r: sum(s.preempted for s in r.steps), "lower"),
        row("tokens_computed", "tokens computed (with recomputation)", tokens_computed, "lower"),
        row("engine_steps", "engine steps", lambda r: len(r.steps), "lower"),
        row("wall_s", "time for all answers, s", lambda r: r.wall_s, "lower", 1),
        row("output_tokens_per_s", "output tokens per second", output_tokens_per_s, "higher", 1),
        quality("unique_words", "unique / total words", per_answer(unique_word_ratio), "higher"),
        quality("repeated_4grams", "repeated 4-grams, share", per_answer(repeated_ngram_ratio), "lower"),
        quality("nll", "NLL under the full cache, nats/token", nll, "lower"),
    ]


def paired_noise(stock: Sequence[float], nitro: Sequence[float]) -> float:
    """Return two standard errors of the mean difference between answers to the same prompts; 0 for one answer."""
    gaps = [b - a for a, b in zip(stock, nitro, strict=True)]
    return 2 * stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else 0.0


def peak_blocks(run: Run) -> int:
    """Return the most blocks that requests owned at once."""
    return max(step.blocks for step in run.steps)


def over_time(run: Run, figure: str) -> float:
    """Return the mean of a step's figure, each step weighted with its duration."""
    ends = [step.time_s for step in run.steps[1:]] + [run.wall_s]
    total = sum(getattr(step, figure) * (end - step.time_s) for step, end in zip(run.steps, ends, strict=True))
    return total / (run.wall_s - run.steps[0].time_s)


def running_mean(run: Run) -> float:
    """Return the mean number of running requests over time."""
    return over_time(run, "running")


def blocks_per_running(run: Run) -> float:
    """Return the blocks in use over the running requests, both averaged over time."""
    return over_time(run, "blocks") / over_time(run, "running")


def blocks_at_end(run: Run) -> float:
    """Return how many blocks a request holds in its last step, on average."""
    return fmean(answer.last_blocks for answer in run.answers)


def fragmentation(run: Run) -> float:
    """Return the slots that running requests hold over those that hold a token, both summed over the steps."""
    return sum(step.allocated for step in run.steps) / sum(step.live for step in run.steps)


def tokens_computed(run: Run) -> int:
    """Return the tokens that went through the model; those beyond prompts and answers were computed again."""
    return sum(step.tokens for step in run.steps)


def output_tokens_per_s(run: Run) -> float:
    """Return generated tokens over the time of the run."""
    return sum(len(answer.token_ids) for answer in run.answers) / run.wall_s


def conclusion(table: Sequence[Row], requests: int) -> str:
    """Return the measured saving, and its price, in one sentence."""
    found = {row.key: row for row in table}
    blocks, running, speed, nll = (found[k] for k in ("blocks_at_end", "running_mean", "output_tokens_per_s", "nll"))
    return (
        f"In the same pool, Nitro held {_against(blocks)} KV blocks per finished request, ran {_against(running)} "
        f"of {requests} requests at once and generated {_against(speed)} tokens per second (each ran once, one after "
        "the other: what else the machine did meanwhile is in that); its answers' NLL under the full-cache model "
        f"differs by {nll.nitro - nll.stock:+.2f} ± {nll.noise:.2f} nats "
        "per token (positive is worse)."
    )


def _against(row: Row) -> str:
    return f"{row.nitro:.{row.digits}f} instead of {row.stock:.{row.digits}f}"
