"""Random lives of requests on a simulated engine: what may happen to them, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nitro.integration.vllm.work import PLAN

from .simulation import BLOCK, Simulation

SETTINGS: dict[str, Any] = {"budget": 40, "sinks": 2, "window": 4, "slack": 8}
"""Of the simulated server."""

BY_DATA: dict[str, Any] = {"budget": None, "threshold": 0.5, "min_keep": 8, "max_keep": 60}
"""Changes to them with which the data decides: here at random, over a bridge that is late and loses messages."""

MIXED: tuple[Any, ...] = (
    None,
    {},
    {"budget": 24, "slack": 3},
    '{"budget": 70}',
    {"ratio": 0.4, "slack": 5},
    {"evict_prompt": False, "budget": 12},
    {"enabled": False},
)
"""What requests may ask for themselves."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * 31) % 500 for i in range(length)]


@dataclass(frozen=True, slots=True)
class Turmoil:
    """How likely in a step it is that ...

    Attributes:
        storm: half of all requests are aborted at once.
        in_plan: a request is aborted after the step that evicts from it was scheduled, before its answer is there.
        reset: all running requests are preempted.
        burst: many requests arrive at once.
        session: a streamed input begins, or one that is there goes on or ends.
    """

    storm: float = 0.0
    in_plan: float = 0.0
    reset: float = 0.0
    burst: float = 0.0
    session: float = 0.0


CALM = Turmoil()
WILD = Turmoil(storm=0.01, in_plan=0.03, reset=0.005, burst=0.01)
STREAMED = Turmoil(in_plan=0.01, burst=0.005, session=0.3)


@dataclass(slots=True)
class Happened:
    """What did.

    Attributes:
        asked: what each request asked for itself, by its name.
        aborts: requests aborted between two steps.
        storms: times that half of all were.
        in_plan: requests aborted in the step of their eviction.
        ended_in_plan: requests whose last token came from the step of their eviction.
        resets: times that all running requests were preempted.
    """

    asked: dict[str, object] = field(default_factory=dict)
    aborts: int = 0
    storms: int = 0
    in_plan: int = 0
    ended_in_plan: int = 0
    resets: int = 0


def arrive(sim: Simulation, own: object) -> str:
    """Add a request of random length that may share its beginning with others."""
    draw = sim.random
    shared = prompt(draw.choice([0, 16, 32, 48]), draw.randrange(2))
    tokens = [*shared, *prompt(draw.randint(1, 60), draw.randrange(1000))]
    # One that is never evicted must fit by itself; vLLM sees to that at its start.
    room = (sim.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1) * BLOCK - len(tokens)
    return sim.add(tokens, min(draw.randint(1, 90), room), own)


def mingle(sim: Simulation, steps: int, asked: Sequence[object] = (None,), turmoil: Turmoil = CALM) -> Happened:
    """Let requests arrive, share prefixes and be aborted at random for so many rounds; then let all finish.

    Args:
        sim: the engine; what it counts goes on from where it is.
        steps: rounds; one in which nobody is there is no engine step.
        asked: what each request asks for itself is one of these.
        turmoil: what else happens.
    """
    draw, happened = sim.random, Happened()
    for _ in range(steps):
        if draw.random() < 0.3 and len(sim.scheduler.requests) < 14:
            own = asked[0] if len(asked) == 1 else draw.choice(asked)
            happened.asked[arrive(sim, own)] = own
        if sim.scheduler.requests and draw.random() < 0.03:
            sim.abort(draw.choice(list(sim.scheduler.requests)))
            happened.aborts += 1
        if turmoil is not CALM:
            _disturb(sim, asked, turmoil, happened)
        if sim.scheduler.has_requests():
            aborted: list[str] = []
            output = sim.step(during=lambda out, aborted=aborted: aborted.extend(_abort_in_plan(sim, out, turmoil)))
            happened.in_plan += len(aborted)
            plan = getattr(output, PLAN, None)
            gone = [name for name in plan.request_ids if name not in sim.scheduler.requests] if plan else []
            happened.ended_in_plan += len(gone) - len(aborted)
    sim.drain()
    return happened


def _disturb(sim: Simulation, asked: Sequence[object], turmoil: Turmoil, happened: Happened) -> None:
    draw = sim.random
    if turmoil.session and draw.random() < turmoil.session:
        _stream(sim, draw.choice(asked))
    if draw.random() < turmoil.burst:
        for _ in range(8):
            own = draw.choice(asked)
            happened.asked[arrive(sim, own)] = own
    if draw.random() < turmoil.storm and sim.scheduler.requests:
        names = list(sim.scheduler.requests)
        for name in draw.sample(names, -(-len(names) // 2)):
            sim.abort(name)
        happened.storms += 1
    if draw.random() < turmoil.reset and not sim.in_flight and sim.scheduler.running:
        assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
        happened.resets += 1


def _stream(sim: Simulation, own: object) -> None:
    """Begin a streamed input, send the next part of one, whether the last is answered or not, or end one."""
    draw, here = sim.random, list(sim.sessions)
    part, answer = prompt(draw.randint(1, 40), draw.randrange(1000)), draw.randint(1, 20)
    if len(here) < 3:
        sim.add_session(part, answer, own)
    elif draw.random() < 0.1:
        sim.end_session(draw.choice(here))
    else:
        sim.continue_session(draw.choice(here), part, answer, own)


def _abort_in_plan(sim: Simulation, output: Any, turmoil: Turmoil) -> list[str]:
    plan = getattr(output, PLAN, None)
    if plan is None or not turmoil.in_plan:
        return []
    chosen = [name for name in plan.request_ids if sim.random.random() < turmoil.in_plan]
    for name in chosen:
        sim.abort(name)
    return chosen
