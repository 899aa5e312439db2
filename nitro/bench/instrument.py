"""Puts timers and a recorder into an engine's process, from outside: neither vLLM nor Nitro knows of them.

vLLM mixes `BenchExtension` into its worker (``worker_extension_cls``), whose methods ``collective_rpc`` calls. With one
worker in the process of the engine's core, scheduler and model runner are both within reach. Methods are wrapped on
their classes once the engine is ready, so that nothing is captured in a graph or compiled. Which methods there are
differs between versions of vLLM: those that are missing are left out, and their time is part of what is around them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from nitro.bench.device_times import DeviceTimes
from nitro.bench.recorder import Recorder
from nitro.bench.timers import Timers
from nitro.errors import UnsupportedError

# Of the model runner, of both kinds: V1's begin with an underscore.
_PREPARATION = (
    "_update_states",
    "_prepare_inputs",
    "_preprocess",
    "_build_attention_metadata",
    "_get_slot_mappings",
    "_determine_batch_execution_and_padding",
    "finish_requests",
    "free_states",
    "add_requests",
    "update_requests",
    "prepare_inputs",
    "prepare_attn",
)
_NITRO = ("_nitro_apply", "_nitro_shift", "_nitro_answer")
_OUTPUTS = {
    "vllm.v1.worker.gpu.async_utils": "AsyncOutput",
    "vllm.v1.worker.gpu_model_runner": "AsyncGPUModelRunnerOutput",
}


class BenchExtension:
    """What is added to vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def bench_install(self) -> None:
        """Wrap what is measured; once, when the engine is ready."""
        recorder = Recorder()
        self._bench_recorder, self._bench_device = recorder, DeviceTimes()
        time_scheduler(recorder)
        self._bench_time_runner(recorder.timers)

    def bench_begin(self) -> None:
        """Begin a run."""
        self._bench_recorder.begin()
        self._bench_device.begin()

    def bench_take(self) -> dict[str, Any]:
        """Return what was recorded since `bench_begin`.

        Raises:
            UnsupportedError: no step was seen.
        """
        if not self._bench_recorder.rows:
            raise UnsupportedError(
                "no step was recorded: the scheduler runs in another process than the worker; serve with one worker "
                "(tensor_parallel_size=1, distributed_executor_backend=uni)"
            )
        return {"columns": self._bench_recorder.columns(), "device": self._bench_device.take()}

    def _bench_time_runner(self, timers: Timers) -> None:
        runner = self.model_runner
        kind = type(runner)
        for name in _PREPARATION:
            timers.wrap(kind, name, "preparation")
        for owner, name in ((getattr(runner, "block_tables", None), "apply_staged_writes"),):
            timers.wrap(type(owner), name, "preparation")
        timers.wrap(type(getattr(runner, "model_state", None)), "prepare_attn", "preparation")
        for name in _NITRO:
            timers.wrap(kind, name, "nitro_worker")
        timers.wrap(sys.modules.get("nitro.integration.vllm.runner_v2"), "shift_to_slots", "nitro_worker")
        timers.wrap(kind, "execute_model", "runner")
        timers.wrap(kind, "sample_tokens", "sampler")
        for module, name in _OUTPUTS.items():
            timers.wrap(getattr(sys.modules.get(module), name, None), "get_output", "waiting")
        on_gpu = str(self.vllm_config.device_config.device_type) == "cuda"
        graphs = type(getattr(runner, "cudagraph_manager", None))
        for owner, name in ((kind, "_model_forward"), (graphs, "run_fullgraph"), (graphs, "run_pw_graph")):
            if on_gpu:
                self._bench_device.wrap_forward(owner, name, self._bench_recorder)
            timers.wrap(owner, name, "forward")
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        for impl in {type(layer.impl) for layer in layers if hasattr(layer, "impl")}:
            if on_gpu:
                self._bench_device.wrap_attention(impl, "forward", self._bench_recorder)
            else:  # it returns when it is done, so that the host's clock measures it
                timers.wrap(impl, "forward", "attention")


def time_scheduler(recorder: Recorder) -> None:
    """Wrap vLLM's scheduler, and Nitro's part of it if that is in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    timers, original = recorder.timers, Scheduler.schedule

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.starts()
        timers.enter("scheduler")
        try:
            output = original(self, *args, **kwargs)
            timers.enter("instrument")
            recorder.scheduled(self, output)
            timers.leave()
        finally:
            timers.leave()
        return output

    Scheduler.schedule = schedule
    _before(Scheduler, "_preempt_request", recorder.preempted)
    side = getattr(sys.modules.get("nitro.integration.vllm.scheduler"), "SchedulerSide", None)
    if side is not None:
        _start_with(side, "plan", recorder)
        for name in ("plan", "notice", "attach", "report"):
            timers.wrap(side, name, "nitro_scheduler")
    timers.wrap(Scheduler, "update_from_output", "scheduler")
    booked = Scheduler.update_from_output

    @functools.wraps(booked)
    def update_from_output(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        result = booked(self, output, *args, **kwargs)
        recorder.ended(output)
        return result

    Scheduler.update_from_output = update_from_output


def _before(owner: Any, name: str, call: Any) -> None:
    """Let ``call`` see the first argument of a method before the method does."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        call(first)
        return original(self, first, *args, **kwargs)

    setattr(owner, name, method)


def _start_with(owner: Any, name: str, recorder: Recorder) -> None:
    """Let a run begin with Nitro's plan, which comes before vLLM schedules, and let the recorder see it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.starts()
        plan = original(self, *args, **kwargs)
        recorder.planned(plan)
        return plan

    setattr(owner, name, method)
