"""Nitro's part of the V2 model runner, driven by vLLM's real scheduler, with stand-ins for what lives on a GPU.

The stock methods that it overrides are replaced by what they do to block tables and request rows; the shadow worker of
simulation.py, which knows nothing of the runner, says what each step must see.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

import nitro
from nitro.integration.vllm import runner_v2
from nitro.integration.vllm.runner_v2 import NitroV2ModelRunner
from nitro.kernels.shift import shift_to_slots_ref
from nitro.types import StepPlan

from . import simulation
from .lives import STREAMED, mingle

ROWS, COLUMNS, TOKENS = 16, 24, 256


class Compactor:
    """Counts, as the real one does, and moves nothing: the shadow does."""

    def __init__(self) -> None:
        self.lost: dict[str, int] = {}
        self.applied = 0

    def apply(self, plan: StepPlan) -> None:
        self.applied += len(plan)
        for eviction in plan.evictions():
            assert eviction.logical_len - eviction.physical_len == self.evicted(eviction.request_id)
            self.lost[eviction.request_id] = eviction.logical_len - eviction.keep

    def begin_run(self, name: str, tokens: int) -> None:
        pass

    def evicted(self, name: str) -> int:
        return self.lost.get(name, 0)

    def forget(self, name: str) -> None:
        self.lost.pop(name, None)

    def __len__(self) -> int:
        return len(self.lost)


class Rows:
    """vLLM's request table: which row a request has."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.free = list(range(ROWS))

    def add(self, name: str) -> int:
        self.req_id_to_index[name] = row = self.free.pop()
        return row

    def remove(self, name: str) -> None:
        row = self.req_id_to_index.pop(name, None)
        if row is not None:
            self.free.append(row)


class Tables:
    """vLLM's block tables, with staged writes that reach the device at the end."""

    def __init__(self) -> None:
        self.gpu = torch.full((ROWS, COLUMNS), -1, dtype=torch.int32)
        self.block_tables = [SimpleNamespace(gpu=self.gpu)]
        self.num_blocks = SimpleNamespace(np=np.zeros((1, ROWS), np.int32))
        self.staged: list[tuple[int, int, list[int]]] = []

    def append(self, row: int, blocks: list[int], *, overwrite: bool) -> None:
        start = 0 if overwrite else int(self.num_blocks.np[0, row])
        self.staged.append((row, start, list(blocks)))
        self.num_blocks.np[0, row] = start + len(blocks)

    def apply_staged_writes(self) -> None:
        for row, start, blocks in self.staged:
            self.gpu[row, start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.staged.clear()


def install_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: Any, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.req_states.remove(name)

    def add(self: Any, output: SchedulerOutput) -> None:
        for data in output.scheduled_new_reqs:
            self.req_states.remove(data.req_id)
            self.block_tables.append(self.req_states.add(data.req_id), data.block_ids[0], overwrite=True)

    def update(self: Any, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None:
                self.block_tables.append(self.req_states.req_id_to_index[name], new[0], overwrite=False)

    def attend(self: Any, batch: Any) -> tuple[Any, Any]:
        self.seen = (batch.positions.clone(), self.input_buffers.seq_lens.clone())
        return (), torch.empty(0)

    def sample(self: Any, *args: Any) -> Any:
        self.sampled = self.execute_model_state.input_batch.seq_lens.clone()

    for name, stand_in in (
        ("finish_requests", finish),
        ("add_requests", add),
        ("update_requests", update),
        ("prepare_attn", attend),
        ("sample_tokens", sample),
    ):
        monkeypatch.setattr(GPUModelRunner, name, stand_in)
    monkeypatch.setattr(runner_v2, "shift_to_slots", shift_to_slots_ref)


def make_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner whose stock part is stand-ins, after `initialize_kv_cache`."""
    install_stand_ins(monkeypatch)
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", lambda *_: None)
    monkeypatch.setattr(runner_v2, "take_over", lambda _: (Compactor(), None))
    runner: Any = object.__new__(NitroV2ModelRunner)
    runner.max_num_reqs, runner.max_num_tokens, runner.device = ROWS, TOKENS, torch.device("cpu")
    runner.req_states, runner.block_tables = Rows(), Tables()
    runner.input_buffers = SimpleNamespace(seq_lens=torch.zeros(ROWS, dtype=torch.int32))
    runner.initialize_kv_cache(None)
    return runner


class Driven(simulation.Simulation):
    """Lets the runner see each step, after the shadow worker has."""

    runner: Any
    shifted = 0

    def _work(self, output: SchedulerOutput) -> dict[str, int]:
        sampled = super()._work(output)
        runner = self.runner
        runner.finish_requests(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        if output.num_scheduled_tokens:
            self._check(output)
        return sampled

    def _check(self, output: SchedulerOutput) -> None:
        runner = self.runner
        names = sorted(output.num_scheduled_tokens, key=lambda name: (output.num_scheduled_tokens[name], name))
        counts = [output.num_scheduled_tokens[name] for name in names]
        rows = np.array([runner.req_states.req_id_to_index[name] for name in names], np.int32)
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {data.req_id: data.num_computed_tokens for data in new}
        ends = [computed[name] + count for name, count in zip(names, counts, strict=True)]
        positions = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        padded = len(names) + 2
        runner.input_buffers.seq_lens.zero_()
        runner.input_buffers.seq_lens[: len(names)] = torch.tensor(ends, dtype=torch.int32)
        flat = torch.tensor([p for tokens in positions for p in tokens])
        batch = SimpleNamespace(
            idx_mapping_np=rows,
            query_start_loc=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
            positions=torch.cat([flat, torch.zeros(3, dtype=torch.int64)]),
            seq_lens=runner.input_buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.tensor([*ends, 0, 0], dtype=torch.int32),
            num_reqs_after_padding=padded,
        )
        logical = batch.positions
        runner.prepare_attn(batch)
        assert batch.positions is logical
        seen_positions, seen_lens = runner.seen
        first = 0
        for index, name in enumerate(names):
            request, row = self.known[name], rows[index]
            number = int(runner.block_tables.num_blocks.np[0, row])
            assert runner.block_tables.gpu[row, :number].tolist() == request.blocks
            slots = len(request.visible(ends[index]))
            assert seen_lens[index] == slots == batch.seq_lens_cpu_upper_bound[index]
            want = range(slots - counts[index], slots)
            assert seen_positions[first : first + counts[index]].tolist() == list(want)
            assert request.evicted == runner.nitro.evicted(name)
            first += counts[index]
            self.shifted += request.evicted > 0
        assert not seen_lens[len(names) :].any()
        runner.execute_model_state = SimpleNamespace(input_batch=batch)
        runner.sample_tokens(None)
        assert runner.sampled[: len(names)].tolist() == ends, "the sampler sees logical lengths"


def make_config(tiny: Callable[[str], Path], lag: int) -> VllmConfig:
    config = EngineArgs(
        model=str(tiny("llama-gqa")),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=ROWS,
        block_size=simulation.BLOCK,
        enable_prefix_caching=True,
        additional_config=nitro.vllm_config(budget=40, sinks=2, window=4, slack=8),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = lag > 0
    return config


@pytest.mark.parametrize("lag", [0, 1])
def test_rows_lengths_and_positions(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    config = make_config(tiny, lag)
    evictions = preemptions = hits = shifted = 0
    for seed in range(3):
        sim = Driven(config, 14, seed=seed, lag=lag)
        sim.scheduler.use_v2_model_runner = True
        sim.runner = make_runner(monkeypatch)
        draw, names = sim.random, []
        for _ in range(250):
            if draw.random() < 0.3 and len(sim.scheduler.requests) < 12:
                shared = [n % 500 for n in range(draw.choice([0, 16, 32]))]
                names.append(sim.add([*shared, *(draw.randrange(500) for _ in range(draw.randint(1, 70)))], 60))
            if names and draw.random() < 0.03:
                sim.abort(draw.choice(names))
            if sim.scheduler.has_requests():
                sim.step()
        sim.drain()
        evictions, preemptions = evictions + sim.evictions, preemptions + sim.preemptions
        hits, shifted = hits + sim.hits, shifted + sim.shifted
        assert sim.runner.nitro.applied == sim.evictions
    assert evictions > 40
    assert shifted > 500
    assert preemptions > 0
    assert hits > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_the_next_part_of_a_streamed_input(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    sim = Driven(make_config(tiny, lag), 200, seed=3, lag=lag)  # without preemptions: see test_simulation.py
    sim.scheduler.use_v2_model_runner = True
    sim.runner = make_runner(monkeypatch)
    mingle(sim, 300, turmoil=STREAMED)
    assert sim.parts > 30
    assert sim.runner.nitro.applied == sim.evictions > 20
    assert sim.shifted > 200
    assert sim.preemptions == 0
