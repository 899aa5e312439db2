"""How good the generated texts are: words, loops, and likelihood under the model with a full cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nitro.demo.models import quiet_transformers
from nitro.demo.records import Answer

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def words(text: str) -> list[str]:
    """Return the text's words in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def unique_word_ratio(text: str) -> float:
    """Return distinct words over all words; 0 for a text without words."""
    found = words(text)
    return len(set(found)) / len(found) if found else 0.0


def repeated_ngram_ratio(text: str, n: int = 4) -> float:
    """Return the share of word n-grams that occurred before in the same text; 0 for a text without any."""
    found = words(text)
    grams = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def answer_nlls(
    model_dir: Path, runs: Sequence[Sequence[Answer]], device: str, done: Callable[[int], None]
) -> list[list[float]]:
    """Score every answer, teacher-forced, with the full cache of a transformers model in float32.

    Args:
        model_dir: folder of the model.
        runs: the answers of each run, to the same prompts in the same order.
        device: torch device.
        done: called with the number of prompts scored so far.

    Returns:
        For each run and answer, the mean negative log-likelihood of its tokens, in nats per token.

    Raises:
        ValueError: the runs answered different prompts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    scores: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for count, answers in enumerate(zip(*runs, strict=True), start=1):
            prompt = answers[0].prompt_token_ids
            if any(answer.prompt_token_ids != prompt for answer in answers):
                raise ValueError(f"the runs differ in prompt {count - 1}: compare runs of the same prompts only")
            # The prompt is computed once and its cache is used for every run's answer.
            start = model(torch.tensor([prompt], device=device), use_cache=True, logits_to_keep=1)
            cache = start.past_key_values
            for run, answer in enumerate(answers):
                tokens = torch.tensor([answer.token_ids], device=device)
                rest = model(tokens, past_key_values=cache, use_cache=True)
                logits = torch.cat([start.logits, rest.logits[:, :-1]], dim=1)[0]
                scores[run].append(float(torch.nn.functional.cross_entropy(logits.float(), tokens[0])))
                cache.crop(-len(answer.token_ids))
            done(count)
    return scores
