"""vLLM's workers with Nitro's model runner in them, and what can be asked of them with ``collective_rpc``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from nitro import policies
from nitro.compactor import Compactor
from nitro.integration.vllm.activate import settings_in
from nitro.integration.vllm.asks import try_bridge
from nitro.integration.vllm.caches import adopt
from nitro.integration.vllm.runner_v1 import NitroGPUModelRunner, NitroRunnerMixin
from nitro.kernel_compactor import SCRATCH_BYTES, positions_bytes
from nitro.types import to_wire


class NitroWorkerMixin(Worker):
    """Installs Nitro's model runner, and answers questions about it."""

    stock_runner: ClassVar[type[GPUModelRunner]] = GPUModelRunner
    nitro_runner: ClassVar[type[NitroRunnerMixin]] = NitroGPUModelRunner

    def init_device(self) -> None:
        """Initialise the device, and take over the model runner before it loads a model.

        Raises:
            BridgeError: there is a threshold, but no shared memory for the workers' answers.
        """
        settings = settings_in(self.vllm_config.additional_config)
        if settings is not None and settings.threshold is not None and self.rank == 0:
            try_bridge()  # the scheduler makes its own only once the weights are loaded, which may take minutes
        super().init_device()
        if getattr(self.vllm_config, "use_v2_model_runner", False):
            # In a module of its own: importing it where it is not used would take memory and time for nothing.
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner as StockV2ModelRunner

            from nitro.integration.vllm.runner_v2 import NitroV2ModelRunner

            adopt(self.model_runner, StockV2ModelRunner, NitroV2ModelRunner)
        else:
            adopt(self.model_runner, self.stock_runner, self.nitro_runner)

    @property
    def _nitro(self) -> Compactor:
        compactor: Compactor = self.model_runner.nitro
        return compactor

    def nitro_stats(self) -> dict[str, int]:
        """Return this worker's counters, and how many requests it holds evicted state of."""
        return {**asdict(self._nitro.counters), "requests": len(self._nitro)}

    def nitro_set_policy(self, name: str, options: dict[str, Any] | None = None) -> None:
        """Score with another policy from now on; counts, and with them the scheduler, do not depend on it."""
        self._nitro.set_policy(policies.get(name, **(options or {})))

    def nitro_record(self, enabled: bool) -> None:
        """Start (empty) or stop recording which tokens are kept."""
        self._nitro.records = [] if enabled else None
        self._nitro.run_starts.clear()

    def nitro_take_recording(self) -> dict[str, Any]:
        """Return and clear the recording, as plain values (see ``nitro.types.to_wire``)."""
        records = self._nitro.records or []
        taken = {
            "rank": self.model_runner.parallel_config.rank % self.model_runner.parallel_config.tensor_parallel_size,
            "tp": self.model_runner.parallel_config.tensor_parallel_size,
            "records": [to_wire(record) for record in records],
            "run_starts": {key: list(value) for key, value in self._nitro.run_starts.items()},
        }
        if self._nitro.records is not None:
            self._nitro.records = []
        self._nitro.run_starts.clear()
        return taken


class NitroGPUWorker(NitroWorkerMixin, Worker):
    """vLLM's GPU worker with eviction."""

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> int:
        """Leave room beside the cache for each slot's logical position, and for what an eviction needs."""
        available = int(super().determine_available_memory(*args, **kwargs))
        specs = [s for s in self.model_runner.get_kv_cache_spec().values() if isinstance(s, FullAttentionSpec)]
        cached = sum(spec.page_size_bytes for spec in specs)
        beside = sum(positions_bytes(spec.num_kv_heads, spec.block_size) for spec in specs)
        if not cached:
            return available
        # A size that the user has set (kv_cache_memory_bytes) is of the cache, and leaves room for scratch beside it.
        scratch = 0 if self.cache_config.kv_cache_memory_bytes else SCRATCH_BYTES
        return max((available - scratch) * cached // (cached + beside), 0)
