"""What the demo runs; the same for both engines, apart from Nitro itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import nitro
from nitro.errors import SettingsError


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The workload and the engine. The defaults are sized for two CPU cores and SmolLM2-135M.

    Sampling is seeded per engine, not per request: vLLM's CPU sampler cannot rewind a request's own generator, which
    chunked prefill and preemption need. The schedule is deterministic, so that the same machine repeats a run token
    for token.

    Attributes:
        requests: questions asked at once, each about its own passage.
        output_tokens: tokens generated for each; the end-of-text token is banned until then, so that both engines do
            the same work.
        pool_tokens: size of the KV-cache block pool of both engines, in tokens.
        policy: Nitro's policy.
        budget: tokens that a request may hold after an eviction.
        slack: tokens by which it may grow beyond the budget before it is compacted.
        temperature: sampling temperature, > 0: greedy answers of small models loop with a full cache, too.
        top_k: sample among the k likeliest tokens; cheaper on a CPU than top-p, which sorts the vocabulary.
        seed: seed of vLLM's sampler and of Nitro's policy.
        max_batched_tokens: tokens that an engine step may compute; longer prompts are prefilled in chunks.
    """

    requests: int = 16
    output_tokens: int = 256
    pool_tokens: int = 4096
    policy: str = "keydiff"
    budget: int = 160
    slack: int = 32
    temperature: float = 0.7
    top_k: int = 40
    seed: int = 0
    max_batched_tokens: int = 512

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("output_tokens", 8), ("top_k", 1), ("max_batched_tokens", 32)):
            value = getattr(self, name)
            if value < least:
                raise SettingsError(f"{name}={value} is below {least}: raise it to at least {least}")
        if not self.temperature > 0:
            raise SettingsError(f"temperature={self.temperature} is not above 0: the demo samples, set e.g. 0.7")

    def nitro_config(self) -> dict[str, dict[str, Any]]:
        """Return vLLM's ``additional_config`` for the run with Nitro.

        Raises:
            SettingsError: Nitro does not accept the policy, budget, slack or seed.
        """
        return nitro.vllm_config(policy=self.policy, budget=self.budget, slack=self.slack, seed=self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values."""
        return asdict(self)
