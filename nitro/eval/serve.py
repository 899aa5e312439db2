"""Serve the cells of an evaluation on one vLLM engine with Nitro.

One engine is enough: a budget is a setting of each request, the full cache is ``enabled: false``, and the policy is
changed on the running engine between cells, since the scheduler's counts do not depend on it.

**Evicted before the question is read.** Prompts are prefilled in chunks of half a block, and every context ends where
a chunk does. A request with a budget of b and a slack of n - b is due when it holds n tokens, so exactly once: when its
context of n tokens has been computed, and before the question that follows is. The log-probabilities of question and
answer are vLLM's ``prompt_logprobs``. That this is what happened is checked by the workers' counters.

**Computed once.** A context ends in the middle of a block, so that whoever finds it in the prefix cache has its last
chunk still to compute, and is evicted behind that: all cells of a task share what is before. It is computed by itself
first, so that a cell's bits do not depend on which cells ran before it. The full cache's requests read no prefix cache
and have a salt of their own, since they publish blocks behind the context, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nitro.errors import NitroError
from nitro.eval import score
from nitro.eval.case import Case, Writer
from nitro.eval.plan import Cell
from nitro.eval.settings import BLOCK, CHUNK, FULL, GO_ON, SLACK, EvalSettings
from nitro.eval.store import Likeliest, Row

TEMPERATURE, TOP_K = 0.7, 40
_SHARED = "shared"
Progress = Callable[[int], None]


class EvalError(NitroError, RuntimeError):
    """The engine failed, or did not do what the evaluation measures."""


def engine_arguments(settings: EvalSettings, longest: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that the evaluation depends on.

    Args:
        settings: what runs.
        longest: tokens of the longest request.
    """
    return {
        "max_model_len": longest,
        "max_num_seqs": settings.parallel,
        # Room for a whole chunk of every request: none may be cut elsewhere than at the end of its context.
        "max_num_batched_tokens": max(CHUNK * settings.parallel, longest),
        "long_prefill_token_threshold": CHUNK,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "max_logprobs": score.LIKELIEST,
        "seed": settings.seed,
        "disable_log_stats": True,
        "additional_config": settings.nitro_config(),
    }


class Server:
    """An engine, and what its outputs are turned into."""

    def __init__(self, llm: Any, writer: Writer, settings: EvalSettings, *, own_seeds: bool) -> None:
        """Begin.

        Args:
            llm: ``vllm.LLM`` with the arguments above, in this process.
            writer: has the tokenizer.
            settings: what runs.
            own_seeds: whether requests may have seeds of their own: not on CPUs, where vLLM cannot rewind a request's
                generator between the chunks of its prompt.
        """
        self._llm, self._writer, self._settings, self._own_seeds = llm, writer, settings, own_seeds
        self._shared: set[str] = set()  # cases whose contexts have been computed for others to find

    def run(
        self, cell: Cell, cases: Sequence[Case], full: Likeliest | None, progress: Progress
    ) -> tuple[list[Row], Likeliest | None]:
        """Serve a cell.

        Args:
            cell: the policy and the budget.
            cases: of its task.
            full: the likeliest tokens under the full cache, where the task is one of ``GO_ON`` and there are any.
            progress: called with the number of requests that are done.

        Returns:
            A row for each case; for tasks of ``GO_ON`` also the likeliest tokens.

        Raises:
            EvalError: requests were not evicted as the cell says.
        """
        if cell.policy is not None:
            self._llm.collective_rpc("nitro_set_policy", args=(cell.policy.name, cell.policy.options))
        if cell.task == "stories":
            return self._tell(cell, cases, progress), None
        if cell.policy is not None:
            self._share(cases)
        before = self._evictions()
        wide = cell.task in GO_ON
        requests = {}
        for case in cases:
            kept = round(cell.budget * len(case.context))
            own = {"budget": kept, "slack": len(case.context) - kept}
            prompt = case.context + case.question + case.answer
            requests[case.name] = (prompt, self._sampling(own if cell.policy else None, score.LIKELIEST if wide else 0))
        outputs = self._serve(requests, FULL if cell.policy is None else _SHARED, progress)
        self._check(cell, cases, before)
        rows, likeliest = [], []
        for index, case in enumerate(cases):
            logprobs = outputs[case.name].prompt_logprobs
            row = score.answer_row(logprobs, case.answer)
            if wide:
                likeliest.append(score.likeliest(logprobs, len(case.answer)))
                if full is not None:
                    row["kl"] = score.divergence(full[0][index], full[1][index], *likeliest[-1])
            rows.append({"case": case.name, "depth": case.depth, **row})
        if not wide:
            return rows, None
        return rows, (np.stack([ids for ids, _ in likeliest]), np.stack([found for _, found in likeliest]))

    def _share(self, cases: Sequence[Case]) -> None:
        """Let the prefix cache have these contexts."""
        missing = [case for case in cases if case.name not in self._shared]
        requests = {f"{case.name}-context": (case.context, self._sampling(None, None)) for case in missing}
        self._serve(requests, _SHARED, lambda _: None)
        self._shared.update(case.name for case in missing)

    def _sampling(self, own: dict[str, Any] | None, logprobs: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=logprobs,
            skip_reading_prefix_cache=own is None,
            detokenize=False,
            extra_args={"nitro": {"enabled": False} if own is None else own},
        )

    def _tell(self, cell: Cell, cases: Sequence[Case], progress: Progress) -> list[Row]:
        """Let the model write long answers under evictions, and score them with the full cache."""
        from vllm import SamplingParams

        answer, before = self._settings.answer, self._evictions()
        requests: dict[str, tuple[Sequence[int], Any]] = {}
        for index, case in enumerate(cases):
            kept = round(cell.budget * (len(case.context) + answer))
            own = {"budget": kept, "slack": SLACK} if cell.policy else {"enabled": False}
            sampling = SamplingParams(
                temperature=TEMPERATURE,
                top_k=TOP_K,
                skip_reading_prefix_cache=True,
                seed=self._settings.seed * 1_000_003 + index if self._own_seeds else None,
                min_tokens=answer,
                max_tokens=answer,
                detokenize=False,
                extra_args={"nitro": own},
            )
            requests[case.name] = (case.context, sampling)
        if not self._own_seeds:
            self._llm.collective_rpc(_reseed, args=(self._settings.seed,))
        told = self._serve(requests, FULL, progress)
        if cell.policy is not None and self._evictions()[0] == before[0]:
            raise EvalError(
                f"{cell.title}: nothing was evicted from answers of {answer} tokens: raise --answer or lower --budgets"
            )
        texts = {case.name: tuple(told[case.name].outputs[0].token_ids) for case in cases}
        scored = self._serve(
            {case.name: (case.context + texts[case.name], self._sampling(None, 0)) for case in cases},
            FULL,
            lambda done: progress(len(cases) + done),
        )
        rows = []
        for case in cases:
            text = self._writer.text(texts[case.name])
            row = score.answer_row(scored[case.name].prompt_logprobs, texts[case.name])
            rows.append({"case": case.name, **row, **score.text_row(text), "text": text})
        return rows

    def _serve(
        self, requests: Mapping[str, tuple[Sequence[int], Any]], salt: str, progress: Progress
    ) -> dict[str, Any]:
        """Serve requests, all at once, and return the outputs by their names; only equal salts share prefixes."""
        engine, done = self._llm.llm_engine, {}
        for name, (tokens, sampling) in requests.items():
            engine.add_request(name, {"prompt_token_ids": list(tokens), "cache_salt": salt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
                    progress(len(done))
        return done

    def _evictions(self) -> tuple[int, int]:
        """Return how often, and how many tokens, rank 0's worker has evicted so far."""
        stats = self._llm.collective_rpc("nitro_stats")[0]
        return int(stats["evictions"]), int(stats["tokens_evicted"])

    def _check(self, cell: Cell, cases: Sequence[Case], before: tuple[int, int]) -> None:
        """Make sure that each request lost tokens once, and as many as it should."""
        after = self._evictions()
        found = (after[0] - before[0], after[1] - before[1])
        lost = [len(case.context) - round(cell.budget * len(case.context)) for case in cases]
        wanted = (len(cases), sum(lost)) if cell.policy is not None else (0, 0)
        if found != wanted:
            raise EvalError(
                f"{cell.title}: {found[0]} evictions of {found[1]} tokens, not {wanted[0]} of {wanted[1]}: requests "
                "were not evicted once, at the end of their contexts. If some were preempted, lower --parallel"
            )


def _reseed(worker: Any, seed: int) -> None:
    """Let a worker's sampler begin again."""
    import torch

    torch.manual_seed(seed)
