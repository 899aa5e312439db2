"""vLLM's CPU worker and model runner with eviction.

In a module of their own: importing vLLM's CPU runner on a machine with a GPU replaces parts of torch that it needs.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # vLLM wants it imported before the runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from nitro.integration.vllm.runner_v1 import NitroRunnerMixin
from nitro.integration.vllm.worker import NitroWorkerMixin


class NitroCPUModelRunner(NitroRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with eviction."""


class NitroCPUWorker(NitroWorkerMixin, CPUWorker):
    """vLLM's CPU worker with eviction."""

    stock_runner = CPUModelRunner
    nitro_runner = NitroCPUModelRunner
