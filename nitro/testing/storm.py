"""Requests that come and go at the worst moments: clients that hang up, and last tokens, in the very step of a plan.

Runs on an in-process engine, step by step, so that the moment can be chosen: with asynchronous scheduling the step that
carries a request's plan is still in flight when the request is aborted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nitro.testing.matrix import SCENARIOS, VOCAB, by_threshold, variant
from nitro.testing.oracle import Generated, Report, check_recording
from nitro.testing.recording import Recording

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SCENARIO = replace(variant(SCENARIOS["all"], slack=6), name="storm")
"""The engine of a storm: few blocks, chunks, shared prefixes, and an eviction every six tokens."""
BY_THRESHOLD = variant(by_threshold(SCENARIO, "random"), slack=3)


@dataclass(slots=True)
class Moments:
    """When requests left.

    Attributes:
        planned: requests whose plan was in the last step that was scheduled.
        finished_with_plan: how many got their last token in a step that carried their plan.
        aborted_with_plan: how many were aborted right after a step that carried their plan was scheduled.
        aborted: how many were aborted in all.
        preempted: how often a request was preempted.
    """

    planned: tuple[str, ...] = ()
    finished_with_plan: int = 0
    aborted_with_plan: int = 0
    aborted: int = 0
    preempted: int = 0


@dataclass(frozen=True, slots=True)
class Storm:
    """What came of it.

    Attributes:
        report: of the oracle, on the requests that were left alone, or a sample of them.
        completed: how many those were.
        moments: when the others left.
        pool_whole: whether every block was free afterwards.
        left_over: requests that some worker still remembers.
    """

    report: Report
    completed: int
    moments: Moments
    pool_whole: bool
    left_over: int

    def faults(self) -> list[str]:
        """Return what is wrong whatever the rounding, or was not exercised; the report's tokens are the caller's."""
        found = []
        if not (self.moments.finished_with_plan and self.moments.aborted_with_plan):
            found.append(f"nobody left in the step of a plan: {self.moments}")
        if self.report.differs_from_full < self.report.tokens_after_eviction // 4:
            found.append(f"only {self.report.differs_from_full} tokens differ from full attention: no power")
        if not self.report.evictions:
            found.append("no eviction")
        if not self.pool_whole:
            found.append("blocks are still held after the run")
        if self.left_over:
            found.append(f"workers still remember {self.left_over} requests")
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine.

    Attributes:
        requests: how many come in all.
        at_once: how many are with the engine at a time.
        prompts: the shortest and the longest prompt.
        answers: the shortest and the longest answer; all lengths in between occur, so some end in the step of a plan.
        shared_prefix: tokens that half of the prompts share.
        own: settings of their own that requests may have, each as likely; None: the server's.
    """

    requests: int = 60
    at_once: int = 10
    prompts: tuple[int, int] = (20, 160)
    answers: tuple[int, int] = (8, 90)
    shared_prefix: int = 66
    own: tuple[Mapping[str, Any] | None, ...] = (None,)


@dataclass(slots=True)
class _Client:
    """Sends requests, and hangs up."""

    engine: Any
    load: Load
    random: random.Random
    moments: Moments
    sent: int = 0
    waiting: dict[str, None] = field(default_factory=dict)
    done: list[Generated] = field(default_factory=list)

    def send(self) -> None:
        from vllm import SamplingParams

        length, answer = self.random.randint(*self.load.prompts), self.random.randint(*self.load.answers)
        shared = random.Random(0) if self.sent % 2 else self.random
        head = [shared.randrange(VOCAB) for _ in range(min(self.load.shared_prefix, length - 1))]
        ids = head + [self.random.randrange(VOCAB) for _ in range(length - len(head))]
        name = f"storm{self.sent}"
        self.sent += 1
        own = self.random.choice(self.load.own) if len(self.load.own) > 1 else self.load.own[0]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args=None if own is None else {"nitro": dict(own)},
        )
        self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        self.waiting[name] = None

    def hang_up(self, names: Sequence[str]) -> None:
        for name in names:
            self.waiting.pop(name)
        self.moments.aborted += len(names)
        self.engine.abort_request(list(names))

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished and output.request_id in self.waiting:
                del self.waiting[output.request_id]
                self.done.append(Generated.from_vllm(output))


def run_storm(
    llm: Any,
    reference: PreTrainedModel,
    load: Load,
    *,
    policy: str = "keydiff",
    seed: int = 0,
    sample: int | None = None,
) -> Storm:
    """Let requests come and go on a running in-process engine, and hold those that stay against the oracle.

    Args:
        llm: the engine, a ``vllm.LLM`` with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
        reference: the oracle's model.
        load: what comes.
        policy: Nitro's, from now on.
        seed: of everything random here.
        sample: hold only so many requests against the oracle; None: all.
    """
    from vllm import SamplingParams

    llm.collective_rpc("nitro_set_policy", args=(policy,))
    llm.collective_rpc("nitro_record", args=(True,))
    llm.reset_prefix_cache()
    moments = Moments()
    client = _Client(llm.llm_engine, load, random.Random(seed), moments)
    with _watched(llm.llm_engine.engine_core.engine_core.scheduler, moments):
        while client.waiting or client.sent < load.requests:
            while client.sent < load.requests and len(client.waiting) < load.at_once:
                client.send()
            client.step()
            _hang_up(client)
    # Workers hear of finished requests with the next step, so let there be one.
    llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    recording = Recording.combine(llm.collective_rpc("nitro_take_recording"))
    held = client.done if sample is None else client.random.sample(client.done, min(sample, len(client.done)))
    return Storm(
        report=check_recording(reference, recording, held),
        completed=len(client.done),
        moments=moments,
        pool_whole=bool(llm.reset_prefix_cache()),
        left_over=sum(part["requests"] for part in llm.collective_rpc("nitro_stats")),
    )


def _hang_up(client: _Client) -> None:
    """Abort now and then: one whose plan was just shipped, any one, or half of all at once."""
    chance, moments = client.random.random(), client.moments
    # vLLM appends a dash and something random to the id that users see.
    shipped = {name.partition("-")[0] for name in moments.planned}
    planned = [name for name in client.waiting if name in shipped]
    moments.planned = ()
    if planned and chance < 0.06:
        moments.aborted_with_plan += len(planned)
        client.hang_up(planned)
    elif client.waiting and chance > 0.995:
        client.hang_up([client.random.choice(list(client.waiting))])
    elif client.waiting and chance > 0.992:
        client.hang_up(client.random.sample(list(client.waiting), (len(client.waiting) + 1) // 2))


@contextmanager
def _watched(scheduler: Any, moments: Moments) -> Iterator[None]:
    """Note which requests have a plan in a step, and which of those finish in it."""
    from nitro.integration.vllm.work import PLAN

    schedule, update = scheduler.schedule, scheduler.update_from_output

    def names(output: Any) -> tuple[str, ...]:
        plan = getattr(output, PLAN, None)
        return plan.request_ids if plan is not None else ()

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        moments.planned += names(output)
        moments.preempted += len(output.preempted_req_ids or ())
        return output

    def watched_update(output: Any, *args: Any, **kwargs: Any) -> Any:
        running = [name for name in names(output) if name in scheduler.requests]
        found = update(output, *args, **kwargs)
        moments.finished_with_plan += sum(name not in scheduler.requests for name in running)
        return found

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    try:
        yield
    finally:
        del scheduler.schedule, scheduler.update_from_output
