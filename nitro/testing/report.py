"""What the oracle is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine generated for one request.

    Attributes:
        request_id: the id that users see, or the engine's internal one.
        prompt_ids: token ids of the prompt.
        output_ids: token ids generated greedily.
        logprobs: the engine's log-probability of each output token, if asked for; compared when given.
    """

    request_id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float] | None = None

    @classmethod
    def from_vllm(cls, output: Any) -> Generated:
        """From a `vllm.RequestOutput` with one sample (``n=1``)."""
        sample = output.outputs[0]
        logprobs = None
        if sample.logprobs is not None:
            logprobs = [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        return cls(output.request_id, list(output.prompt_token_ids), list(sample.token_ids), logprobs)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A generated token that the oracle would not have generated.

    Attributes:
        request_id: the request, as given.
        run: the run that generated the token.
        index: its index among the request's output tokens.
        expected: the oracle's token.
        generated: the engine's token.
        gap: the oracle's logit of `expected` minus that of `generated`; near fp32 rounding it is a tie.
    """

    request_id: str
    run: int
    index: int
    expected: int
    generated: int
    gap: float


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome for one request, or several added up.

    Attributes:
        tokens_compared: output tokens compared.
        tokens_after_eviction: those among them whose query saw an evicted cache.
        mismatches: those that differ from the oracle.
        differs_from_full: those that differ from the argmax of full attention: the test's power. Near 0, evictions
            did not matter and nothing was tested.
        evictions: evictions recorded.
        min_gap: smallest distance of the oracle's two highest logits; how near a tie the comparison came.
        max_logprob_error: largest distance between the engine's and the oracle's log-probability of a generated token;
            0 where the engine's were not given.
        sum_logprob_error: the sum of these distances.
    """

    tokens_compared: int = 0
    tokens_after_eviction: int = 0
    mismatches: tuple[Mismatch, ...] = field(default=())
    differs_from_full: int = 0
    evictions: int = 0
    min_gap: float = math.inf
    max_logprob_error: float = 0.0
    sum_logprob_error: float = 0.0

    @property
    def mean_logprob_error(self) -> float:
        """The mean distance between the log-probabilities of a generated token; 0 where the engine's were not given."""
        return self.sum_logprob_error / max(self.tokens_compared, 1)

    def __add__(self, other: Report) -> Report:
        return Report(
            self.tokens_compared + other.tokens_compared,
            self.tokens_after_eviction + other.tokens_after_eviction,
            self.mismatches + other.mismatches,
            self.differs_from_full + other.differs_from_full,
            self.evictions + other.evictions,
            min(self.min_gap, other.min_gap),
            max(self.max_logprob_error, other.max_logprob_error),
            self.sum_logprob_error + other.sum_logprob_error,
        )

    def __str__(self) -> str:
        return (
            f"{len(self.mismatches)} of {self.tokens_compared} tokens differ from the oracle "
            f"({self.tokens_after_eviction} after an eviction, {self.evictions} evictions); "
            f"{self.differs_from_full} differ from full attention; smallest logit gap {self.min_gap:.2e}, "
            f"log-probability error {self.max_logprob_error:.2e} at most, {self.mean_logprob_error:.2e} in the mean"
        )
