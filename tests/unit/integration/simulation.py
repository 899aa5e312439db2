"""vLLM's real scheduler with Nitro, and in place of a model a shadow cache of stamps.

Every slot of the shadow carries a stamp of what was written there last: the position, and a hash of all tokens up to
it, on which K and V depend. The worker's side is played by the rules that the real one follows: apply the plans first,
then write this step's tokens, then read. Each read must find exactly the request's own kept tokens and nobody else's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from faulty_bridge import FaultyProducer
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nitro.integration.vllm.answers import messages_of
from nitro.integration.vllm.scheduler import NitroAsyncScheduler, NitroScheduler
from nitro.integration.vllm.work import ASKS, PLAN
from nitro.ipc import MESSAGE, Messages, Producer
from nitro.testing.pool import assert_pool_whole, view_of
from nitro.types import StepAsks

BLOCK = 16
Stamp = tuple[int, int]  # a position, and the hash of the tokens up to and including it


def make_scheduler(config: VllmConfig, num_blocks: int) -> Any:
    """Return Nitro's scheduler over a pool of ``num_blocks`` blocks, for a configuration made with Nitro's settings."""
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv_config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
    )
    cls = NitroAsyncScheduler if config.scheduler_config.async_scheduling else NitroScheduler
    return cls(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


@dataclass
class WorkerRequest:
    """What the shadow worker knows of a request."""

    blocks: list[int]
    tokens: list[int]
    kept: list[int] = field(default_factory=list)  # logical positions of the compacted part
    since: int = 0  # logical length at the last eviction
    epoch: int = 0
    stamps: list[Stamp] = field(default_factory=list)  # of the tokens, as far as they were asked for

    @property
    def evicted(self) -> int:
        return self.since - len(self.kept)

    def forget(self) -> None:
        """Begin anew, as a request does that was preempted."""
        self.kept, self.since, self.epoch = [], 0, 0

    def go_on(self, blocks: list[int], tokens: list[int], computed: int) -> None:
        """Begin the next part of a streamed input: what was computed stays, up to the last answer's end."""
        self.blocks, self.tokens = blocks, tokens
        del self.stamps[computed:]

    def visible(self, logical: int) -> list[int]:
        return [*self.kept, *range(self.since, logical)]

    def stamp(self, position: int) -> Stamp:
        while len(self.stamps) <= position:
            end = len(self.stamps)
            before = self.stamps[-1][1] if self.stamps else 0
            self.stamps.append((end, hash((before, self.tokens[end]))))
        return self.stamps[position]


class Simulation:
    """Drives a scheduler with random requests, and plays the worker ``lag`` steps behind it."""

    def __init__(self, config: VllmConfig, num_blocks: int, *, seed: int, lag: int = 0) -> None:
        init_none_hash(sha256)
        self.scheduler: Scheduler = make_scheduler(config, num_blocks)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.random = random.Random(seed)
        self.lag = lag
        self.slots: dict[tuple[int, int], Stamp] = {}
        self.known: dict[str, WorkerRequest] = {}
        self.sessions: dict[str, int] = {}  # streamed inputs that go on, and how many tokens they may still have
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, int]]] = deque()
        self.stats: deque[Any] = deque(maxlen=1000)
        self.watched = True  # whether ledger and pool are checked in each step; the shadow cache always is
        self.producer: Producer | None = None
        self.bridge: type[Producer] = FaultyProducer
        self.reached: int | None = None  # what every question is answered with; by chance if None
        self.counted: Messages | None = None
        self.counter = 0
        self.reads = self.evictions = self.preemptions = self.hits = self.steps = self.parts = 0

    def add(self, prompt: list[int], max_tokens: int, nitro: object = None) -> str:
        """Add a request, with settings of its own where given; returns its name."""
        self.counter += 1
        name = f"r{self.counter}"
        self._send(name, prompt, max_tokens, nitro, resumable=False)
        return name

    def add_session(self, prompt: list[int], max_tokens: int, nitro: object = None) -> str:
        """Add a streamed input with its first part; returns its name."""
        self.counter += 1
        name = f"s{self.counter}"
        self.sessions[name] = self.scheduler.max_model_len - 1
        self.continue_session(name, prompt, max_tokens, nitro)
        return name

    def continue_session(self, name: str, prompt: list[int], max_tokens: int, nitro: object = None) -> None:
        """Send the next part of a streamed input, or end it if there is no room for that."""
        self.sessions[name] -= len(prompt) + max_tokens
        if self.sessions[name] < 0:
            self.end_session(name)
        else:
            self._send(name, prompt, max_tokens, nitro, resumable=True)

    def end_session(self, name: str) -> None:
        """Say that there are no more parts."""
        del self.sessions[name]
        if name in self.scheduler.requests:
            self._send(name, [0], 1, None, resumable=False)

    def _send(self, name: str, prompt: list[int], max_tokens: int, nitro: object, *, resumable: bool) -> None:
        extra = None if nitro is None else {"nitro": nitro}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, 511)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher, resumable=resumable))

    def step(self, during: Callable[[SchedulerOutput], object] = lambda _: None) -> SchedulerOutput:
        """Schedule one step, let the worker run it, and deliver what the worker finished ``lag`` steps ago.

        Args:
            during: called when the step is scheduled and the worker has not begun.
        """
        self.steps += 1
        output = self.scheduler.schedule()
        during(output)
        if self.watched:
            self.check()
        self.in_flight.append((output, self._work(output)))
        while len(self.in_flight) > self.lag:
            self._deliver()
        return output

    def check(self) -> None:
        """Prove that the ledger and vLLM's pool agree, and that nothing is set aside for requests that do not run."""
        pool = self.scheduler.kv_cache_manager.block_pool
        nitro = self.scheduler.nitro  # type: ignore[attr-defined]
        nitro.collector.check_integrity(view_of(pool))
        self._check_enough()
        assert nitro.admission.forecast.names <= {request.request_id for request in self.scheduler.running}
        assert self.scheduler.running or nitro.admission.forecast.most == 0

    def _check_enough(self) -> None:
        """Prove that a remembered number never hides a block that a request needs, or one that it publishes."""
        manager = self.scheduler.nitro.manager  # type: ignore[attr-defined]
        for name, enough in manager.nitro_enough.items():
            evicted = manager.nitro.evicted(name)
            assert enough <= len(manager.req_to_blocks.get(name, ())) * BLOCK + evicted, name
            assert evicted or enough < (manager.num_cached_block.get(name, 0) + 1) * BLOCK, name

    def drain(self, limit: int = 5000) -> None:
        for name in list(self.sessions):
            self.end_session(name)
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                break
            if self.scheduler.has_requests():
                self.step()
            elif self.in_flight:
                self._deliver()
        else:
            left = [(r.request_id, str(r.status), r.num_tokens) for r in self.scheduler.requests.values()]
            raise AssertionError(f"requests are stuck (id, status, tokens): {left}")
        assert_pool_whole(self.scheduler)
        assert not self.scheduler.nitro.manager.nitro_enough  # type: ignore[attr-defined]

    def abort(self, name: str) -> None:
        self.sessions.pop(name, None)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _deliver(self) -> None:
        output, sampled = self.in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        delivered = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[sampled[n]] if n in sampled else [] for n in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        self.stats += [out.scheduler_stats for out in delivered.values() if out.scheduler_stats is not None]

    def _work(self, output: SchedulerOutput) -> dict[str, int]:
        self.preemptions += len(output.preempted_req_ids or ())
        for name in output.preempted_req_ids or ():  # some of which may have been aborted since
            self.known[name].forget()
        for name in output.finished_req_ids:
            self.known.pop(name, None)
        self._apply(output)
        self._answer(getattr(output, ASKS, None))
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for data in output.scheduled_new_reqs:
            known = self.known.get(data.req_id)
            computed[data.req_id] = data.num_computed_tokens
            if known and data.num_computed_tokens and data.req_id.startswith("s"):
                self.parts += 1
                known.go_on(list(data.block_ids[0]), list(data.prompt_token_ids or []), data.num_computed_tokens)
                continue
            tokens = known.tokens if known else list(data.prompt_token_ids or [])  # the V2 runner resumes as new
            self.known[data.req_id] = WorkerRequest(list(data.block_ids[0]), tokens)
            self.hits += data.num_computed_tokens > 0
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            request = self.known[name]
            if name in cached.resumed_req_ids:
                assert new is not None
                self.known[name] = WorkerRequest(list(new[0]), request.tokens)
            elif new is not None:
                request.blocks.extend(new[0])
        return self._forward(output, computed)

    def _apply(self, output: SchedulerOutput) -> None:
        plan = getattr(output, PLAN, None)
        evictions = list(plan.evictions()) if plan else []
        self.random.shuffle(evictions)  # one kernel may do them all at once, so no order may be relied on
        for e in evictions:
            self.evictions += 1
            request = self.known[e.request_id]
            assert e.epoch == request.epoch
            assert e.logical_len - e.physical_len == request.evicted
            visible = request.visible(e.logical_len)
            assert len(visible) == e.physical_len
            stamps = [self._read(request, slot) for slot in range(e.physical_len)]
            head, tail = list(range(e.protect)), list(range(e.physical_len - 4, e.physical_len))
            middle = self.random.sample(range(e.protect, e.physical_len - 4), e.keep - e.protect - 4)
            chosen = [*head, *sorted(middle), *tail]
            request.blocks = e.dst_blocks.tolist()
            for slot, source in enumerate(chosen):
                self.slots[request.blocks[slot // BLOCK], slot % BLOCK] = stamps[source]
            request.kept, request.since = [visible[i] for i in chosen], e.logical_len
            request.epoch += 1

    def _answer(self, asks: StepAsks | None) -> None:
        """Send what rank 0 counted in earlier steps, over a bridge that is late and loses some, and count anew."""
        if self.producer is not None:
            self.producer.publish(np.empty(0, MESSAGE) if self.counted is None else self.counted)
            self.counted = None
        if asks is None:
            return
        if self.producer is None:
            self.producer = self.bridge(asks.ring)
            if isinstance(self.producer, FaultyProducer):
                self.producer.random = self.random
        slots = asks.slots
        for e in slots.evictions():  # a worker refuses to count what it does not know
            request = self.known[e.request_id]
            assert (e.epoch, e.logical_len - e.physical_len) == (request.epoch, request.evicted)
            assert e.src_blocks.tolist() == request.blocks[: len(e.src_blocks)]
        held = slots.physical_len.tolist()
        keep = [self.random.randint(min(6, n), n) if self.reached is None else min(self.reached, n) for n in held]
        self.counted = messages_of(asks, np.array(keep, np.int32))

    def _read(self, request: WorkerRequest, slot: int) -> Stamp:
        return self.slots[request.blocks[slot // BLOCK], slot % BLOCK]

    def _forward(self, output: SchedulerOutput, computed: dict[str, int]) -> dict[str, int]:
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.known[name], computed[name]
            assert start >= request.since
            room = len(request.blocks) * BLOCK
            assert start + count - request.evicted <= room, f"{name} writes beyond its {room} slots"
            for position in range(start, start + count):
                slot = position - request.evicted
                self.slots[request.blocks[slot // BLOCK], slot % BLOCK] = request.stamp(position)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            request, end = self.known[name], computed[name] + count
            for slot, position in enumerate(request.visible(end)):
                want, got = request.stamp(position), self._read(request, slot)
                assert got == want, f"{name} reads at slot {slot} {got}, and not {want}"
            self.reads += end - request.evicted
            if end == len(request.tokens):
                sampled[name] = self.random.randrange(500)
                request.tokens.append(sampled[name])
        return sampled
