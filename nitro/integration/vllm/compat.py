"""Which vLLM this is, and whether it still has the methods that Nitro overrides, with the parameters it expects."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from nitro.errors import UnsupportedError

TESTED_MINORS = {"cpu": ("0.28", "0.30", "0.32"), "cuda": ("0.26",)}
"""By device type; see docs/benchmarks.md for what was run."""
TESTED_V2_MINORS: tuple[str, ...] = ("0.26",)
"""Those whose V2 model runner (the default on GPUs) was tested."""
TESTED_FP8_MINORS: tuple[str, ...] = ("0.26",)
"""Those on which FP8 KV caches (e4m3) were tested."""
ALLOW_UNTESTED = "NITRO_ALLOW_UNTESTED_VLLM"


def vllm_version() -> str:
    """Return the version of the installed vLLM, e.g. ``0.32.0``."""
    import vllm

    return str(vllm.__version__)


def minor_of(version: str) -> str:
    """Return ``major.minor`` of a version string; the string itself where it has no such form."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return f"{found[1]}.{found[2]}" if found else version


def device_type() -> str:
    """Return the device that vLLM runs on here: ``cpu``, ``cuda``, ..."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def tested_minors() -> tuple[str, ...]:
    """Return the minor versions of vLLM that were tested with Nitro on this device."""
    return TESTED_MINORS.get(device_type(), ())


def _untested(version: str, tested: tuple[str, ...], said: str, remedy: str) -> str | None:
    if minor_of(version) in tested or os.environ.get(ALLOW_UNTESTED) == "1":
        return None
    known = ", ".join(tested) or "none"
    return f"{said} (tested: {known}): {remedy} {ALLOW_UNTESTED}=1 to try it at your own risk"


def untested_reason(version: str) -> str | None:
    """Say why this vLLM is refused, or return None if it is served."""
    said = f"vLLM {version} was never tested with Nitro on {device_type()}"
    return _untested(version, tested_minors(), said, "install one of these, or set")


def untested_v2_reason(version: str) -> str | None:
    """Say why this vLLM's V2 model runner is refused, or return None if it is served."""
    said = f"the V2 model runner of vLLM {version} was never tested with Nitro"
    return _untested(version, TESTED_V2_MINORS, said, "set VLLM_USE_V2_MODEL_RUNNER=0, or")


def untested_fp8_reason(version: str, dtype: str) -> str | None:
    """Say why this vLLM's FP8 KV caches of a dtype (vLLM's name) are refused, or return None if they are served."""
    if dtype == "fp8_e5m2":
        # FlashAttention and Triton attention of vLLM 0.26 refuse it themselves.
        said = f"FP8 KV caches of dtype {dtype} were never tested with Nitro on a GPU"
        return _untested(version, (), said, "use --kv-cache-dtype fp8, or set")
    said = f"FP8 KV caches of vLLM {version} were never tested with Nitro on a GPU"
    return _untested(version, TESTED_FP8_MINORS, said, "use --kv-cache-dtype auto, or set")


@dataclass(frozen=True, slots=True)
class Hook:
    """A method of vLLM that Nitro overrides, and the first positional parameters that it relies on."""

    owner: type
    name: str
    parameters: tuple[str, ...]

    @property
    def label(self) -> str:
        """Module, class and method."""
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"

    def fault(self) -> str | None:
        """Say what is wrong with the method in this vLLM, or return None."""
        function: Callable[..., Any] | None = getattr(self.owner, self.name, None)
        if function is None:
            return f"{self.label} does not exist"
        found = tuple(inspect.signature(function).parameters)[1 : 1 + len(self.parameters)]
        if found != self.parameters:
            return f"{self.label} takes {found}, Nitro expects {self.parameters}"
        return None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one of vLLM's dataclasses that Nitro uses."""

    owner: type
    name: str

    @property
    def label(self) -> str:
        """Module, class and field."""
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"

    def fault(self) -> str | None:
        """Say what is wrong with the field in this vLLM, or return None."""
        found = [field.name for field in fields(self.owner)]
        return None if self.name in found else f"{self.label} does not exist"


def hooks() -> tuple[Hook | Field, ...]:
    """Return every method that Nitro overrides, and every field that it uses, for the platform that vLLM runs on."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    return (
        Hook(EngineArgs, "create_engine_config", ()),
        *front_end_hooks(),
        Hook(Scheduler, "schedule", ()),
        Hook(Scheduler, "make_stats", ()),
        Hook(Scheduler, "update_from_output", ("scheduler_output", "model_runner_output")),
        Hook(Scheduler, "shutdown", ()),
        Hook(FullAttentionManager, "get_num_blocks_to_allocate", ("request_id", "num_tokens")),
        Hook(FullAttentionManager, "allocate_new_blocks", ("request_id", "num_tokens", "num_tokens_main_model")),
        Hook(FullAttentionManager, "cache_blocks", ("request", "num_tokens")),
        Hook(FullAttentionManager, "pop_blocks_for_free", ("request_id",)),
        Hook(KVCacheManager, "allocate_slots", ("request", "num_new_tokens")),
        Hook(KVCacheManager, "cache_blocks", ("request", "num_computed_tokens")),
        Hook(BlockPool, "get_new_blocks", ("num_blocks",)),
        Hook(BlockPool, "free_blocks", ("ordered_blocks",)),
        Hook(BlockPool, "evict_blocks", ("block_ids",)),
        Hook(Worker, "init_device", ()),
        Hook(Worker, "determine_available_memory", ()),
        Hook(GPUModelRunner, "_update_states", ("scheduler_output",)),
        Hook(GPUModelRunner, "_prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
        Hook(GPUModelRunner, "initialize_kv_cache", ("kv_cache_config",)),
        Hook(GPUModelRunner, "sample_tokens", ("grammar_output",)),
        Hook(BlockTable, "compute_slot_mapping", ("num_reqs", "query_start_loc", "positions")),
        Hook(BlockTable, "clear_row", ("row_idx",)),
        Hook(BlockTable, "append_row", ("block_ids", "row_idx")),
        *metrics_hooks(),
        *(v2_hooks() if device_type() == "cuda" else ()),
    )


def metrics_hooks() -> tuple[Hook | Field, ...]:
    """Return what carries Nitro's figures from workers and scheduler to ``/metrics``."""
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    return (
        Hook(AggregateStatLoggerBase, "__init__", ("vllm_config", "engine_indexes")),
        Hook(AggregateStatLoggerBase, "record", ("scheduler_stats", "iteration_stats")),
        Hook(AggregateStatLoggerBase, "log_engine_initialized", ()),
        Hook(AsyncModelRunnerOutput, "get_output", ()),
        Field(ModelRunnerOutput, "req_ids"),
        Field(SchedulerStats, "waiting_lora_adapters"),
    )


def front_end_hooks() -> tuple[Hook, ...]:
    """Return the methods of vLLM's front-end that Nitro wraps."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    return (
        Hook(InputProcessor, "process_inputs", ("request_id", "prompt", "params")),
        Hook(AsyncLLM, "generate", ("prompt", "sampling_params")),
    )


def v2_hooks() -> tuple[Hook, ...]:
    """Return the methods of the V2 model runner that Nitro overrides or calls."""
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return (
        Hook(GPUModelRunner, "initialize_kv_cache", ("kv_cache_config",)),
        Hook(GPUModelRunner, "finish_requests", ("scheduler_output",)),
        Hook(GPUModelRunner, "add_requests", ("scheduler_output",)),
        Hook(GPUModelRunner, "update_requests", ("scheduler_output",)),
        Hook(GPUModelRunner, "prepare_attn", ("input_batch",)),
        Hook(GPUModelRunner, "sample_tokens", ("grammar_output",)),
        Hook(BlockTables, "append_block_ids", ("req_index", "new_block_ids", "overwrite")),
        Hook(BlockTables, "apply_staged_writes", ()),
    )


def require_hooks() -> None:
    """Raise UnsupportedError if a method that Nitro overrides is gone or takes other parameters."""
    faults = [fault for hook in hooks() if (fault := hook.fault())]
    if faults:
        raise UnsupportedError(
            f"Nitro does not fit vLLM {vllm_version()}: " + "; ".join(faults) + ". Install a vLLM that Nitro was "
            f"tested with ({', '.join(tested_minors()) or 'none'})"
        )
