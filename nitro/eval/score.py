"""What an engine's outputs say about an answer: likelihood, exactness, divergence from the full cache, loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nitro.demo.quality import repeated_ngram_ratio, unique_word_ratio, words
from nitro.eval.store import Row

LIKELIEST = 20
"""Tokens whose log-probabilities are asked for where the divergence is measured: vLLM's own limit."""


def answer_row(prompt_logprobs: Sequence[Any], tokens: Sequence[int]) -> Row:
    """Return an answer's mean negative log-likelihood, in nats a token, and whether all of it is the argmax.

    Args:
        prompt_logprobs: vLLM's, of the prompt that the answer ends; those of a cached prefix may be missing.
        tokens: the answer.
    """
    found = [logprobs[token] for logprobs, token in zip(prompt_logprobs[-len(tokens) :], tokens, strict=True)]
    return {
        "nll": -math.fsum(one.logprob for one in found) / len(found),
        "exact": all(one.rank == 1 for one in found),
        "tokens": len(found),
    }


def likeliest(prompt_logprobs: Sequence[Any], count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return ids and log-probabilities ``[count, LIKELIEST]`` of the likeliest tokens at each of an answer's places."""
    ids = np.empty((count, LIKELIEST), np.int32)
    logprobs = np.empty((count, LIKELIEST), np.float32)
    for i, found in enumerate(prompt_logprobs[-count:]):
        best = sorted(found.items(), key=lambda item: item[1].rank)[:LIKELIEST]
        ids[i] = [token for token, _ in best]
        logprobs[i] = [one.logprob for _, one in best]
    return ids, logprobs


def divergence(
    full_ids: npt.NDArray[np.int32],
    full: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
) -> float:
    """Return a lower bound of the mean KL divergence, in nats a token, of the evicted model from the full cache's.

    Tokens that are among the likeliest of both are told apart, all others are one event: by the data processing
    inequality, that can only make it smaller.

    Args:
        full_ids: ``[tokens, k]``, under the full cache.
        full: their log-probabilities.
        ids: ``[tokens, k]``, after evictions.
        logprobs: theirs.
    """
    total = 0.0
    for i in range(len(full_ids)):
        p = dict(zip(full_ids[i].tolist(), full[i].tolist(), strict=True))
        q = dict(zip(ids[i].tolist(), logprobs[i].tolist(), strict=True))
        both = sorted(p.keys() & q.keys())
        total += math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
        rest_p = max(1.0 - math.fsum(math.exp(p[token]) for token in both), 1e-9)
        rest_q = max(1.0 - math.fsum(math.exp(q[token]) for token in both), 1e-9)
        total += rest_p * math.log(rest_p / rest_q)
    return total / len(full_ids)


def text_row(text: str) -> Row:
    """Return the essay's two figures of a generated text."""
    return {"words": len(words(text)), "unique": unique_word_ratio(text), "repeated": repeated_ngram_ratio(text)}
