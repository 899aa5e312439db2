"""The oracle: do generated tokens equal those of a model that saw exactly the tokens the engine says it kept?

A transformers model runs in fp32 over prompt and generated tokens of a request at once (teacher-forced), under the
mask of `nitro.testing.visibility`. Its argmax at each position must be the token that the engine generated. The oracle
shares no code with the engine: not the cache, not the block tables, not the attention kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nitro.pooling import Merging
from nitro.testing.folding import Folding
from nitro.testing.masked import masked_logits
from nitro.testing.recording import Recording, check_records, runs_of
from nitro.testing.report import Generated, Mismatch, Report
from nitro.testing.visibility import Visibility, kv_owners
from nitro.types import KeepRecord

__all__ = ["Generated", "Mismatch", "Report", "check_recording", "check_request"]


def check_request(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    records_by_rank: Sequence[Sequence[KeepRecord]],
    run_starts: Sequence[int],
    *,
    request_id: str = "",
    logprobs: Sequence[float] | None = None,
    cached_as: torch.dtype | None = None,
    merging: Merging | None = None,
    sinks: int = 0,
) -> Report:
    """Compares one request's greedily generated tokens with the oracle's, and with full attention's.

    Output token i, at position ``len(prompt_ids) + i``, is compared under the records of the run that generated it: the
    last run r with ``run_starts[r] <= position``.

    Args:
        model: the oracle's model, in fp32 (see `masked_logits`).
        prompt_ids: the prompt's token ids; at least one.
        output_ids: the generated ones.
        records_by_rank: the request's records, all runs in order, per tensor-parallel rank (one entry without TP).
        run_starts: per run, the number of tokens known when it started.
        request_id: named in mismatches.
        logprobs: the engine's log-probabilities of `output_ids`, compared when given.
        cached_as: the FP8 dtype of the engine's cache, if it is one (see `masked_logits`).
        merging: how the engine pools evicted tokens, if it does.
        sinks: first tokens, into which nothing is pooled.

    Raises:
        IntegrityError: the records contradict each other (see `check_records`).
        ValueError: the run starts do not fit the prompt, a record belongs to no run, or there is pooling under tensor
            parallelism.
    """
    if merging is not None and len(records_by_rank) > 1:
        raise ValueError(
            f"records of {len(records_by_rank)} ranks: pooling is followed without tensor parallelism only"
        )
    config = model.config
    prompt, total = len(prompt_ids), len(prompt_ids) + len(output_ids)
    if not run_starts or run_starts[0] != prompt or list(run_starts) != sorted(run_starts):
        raise ValueError(f"run_starts={list(run_starts)} must ascend from the prompt's length, {prompt}")
    if any(record.run not in range(len(run_starts)) for record in records_by_rank[0]):
        raise ValueError(f"records name runs {sorted({r.run for r in records_by_rank[0]})} of {len(run_starts)}")
    kv_heads, tp = config.num_key_value_heads, len(records_by_rank)
    local_kv_heads = 1 + max(local for _, local in kv_owners(config.num_attention_heads, kv_heads, tp))
    check_records(records_by_rank, config.num_hidden_layers, local_kv_heads)

    report = Report(evictions=len(records_by_rank[0]))
    if not output_ids:
        return report
    tokens = [*prompt_ids, *output_ids]
    plain = Visibility((), total - 1, config.num_attention_heads, kv_heads)
    full = masked_logits(model, tokens[:-1], plain, first=prompt - 1, cached_as=cached_as)
    runs = runs_of(range(prompt, total), run_starts)
    for run in sorted(set(runs)):
        start, stop = prompt + runs.index(run), prompt + len(runs) - runs[::-1].index(run)
        records = [[record for record in rank if record.run == run] for rank in records_by_rank]
        # The last token is only ever an answer, never a query.
        visibility = Visibility(records, stop - 1, config.num_attention_heads, kv_heads)
        full_logits = full[start - prompt : stop - prompt]
        if visibility.first_eviction == visibility.length:
            logits = full_logits
        else:
            folding = None if merging is None else Folding(merging, sinks, records[0], stop - 1)
            logits = masked_logits(
                model, tokens[: stop - 1], visibility, first=start - 1, cached_as=cached_as, folding=folding
            )
        answers = torch.tensor(tokens[start:stop])
        after_eviction = max(0, stop - 1 - max(visibility.first_eviction, start - 1))
        mine = None if logprobs is None else torch.tensor(logprobs[start - prompt : stop - prompt])
        part = _compare(logits, full_logits, answers, mine, request_id, run, start - prompt)
        report += part + Report(tokens_after_eviction=after_eviction)
    return report


def _compare(
    logits: Tensor, full: Tensor, answers: Tensor, logprobs: Tensor | None, request_id: str, run: int, index: int
) -> Report:
    top = logits.topk(2, dim=-1)
    expected = top.indices[:, 0]
    gaps = top.values[:, 0] - logits.gather(1, answers[:, None])[:, 0]
    mismatches = tuple(
        Mismatch(request_id, run, index + i, int(expected[i]), int(answers[i]), float(gaps[i]))
        for i in (expected != answers).nonzero()[:, 0].tolist()
    )
    errors = torch.zeros(1)
    if logprobs is not None:
        errors = (logits.log_softmax(-1).gather(1, answers[:, None])[:, 0] - logprobs).abs()
    return Report(
        tokens_compared=len(answers),
        mismatches=mismatches,
        differs_from_full=int((full.argmax(-1) != answers).sum()),
        min_gap=float((top.values[:, 0] - top.values[:, 1]).min()),
        max_logprob_error=float(errors.max()),
        sum_logprob_error=float(errors.sum()),
    )


def check_recording(
    model: PreTrainedModel,
    recording: Recording,
    outputs: Iterable[Generated],
    *,
    cached_as: torch.dtype | None = None,
    merging: Merging | None = None,
    sinks: int = 0,
) -> Report:
    """Checks every request of a run of an engine; see `check_request`."""
    report = Report()
    for output in outputs:
        records, starts = recording.of(output.request_id)
        report += check_request(
            model,
            output.prompt_ids,
            output.output_ids,
            records,
            starts,
            request_id=output.request_id,
            logprobs=output.logprobs,
            cached_as=cached_as,
            merging=merging,
            sinks=sinks,
        )
    return report
