"""What ``nitro plan`` is asked, and whether it makes sense."""

from __future__ import annotations

from dataclasses import dataclass

from nitro.capacity.pool import UTILISATION
from nitro.config import contradictions
from nitro.errors import SettingsError
from nitro.planner import BudgetRule

KV_DTYPES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1}
_LONGEST = 2**20
_BOUNDS: dict[str, tuple[float, float]] = {
    "prompt": (1, _LONGEST),
    "answer": (1, _LONGEST),
    "budget": (1, _LONGEST),
    "slack": (1, _LONGEST),
    "sinks": (0, _LONGEST),
    "window": (1, _LONGEST),
    "block_size": (1, 1024),
    "tensor_parallel": (1, 1024),
    "max_batched": (1, _LONGEST),
    "max_seqs": (1, _LONGEST),
    "requests": (1, 100_000),
    "memory_gib": (1, 10_000),
    "reserve_gib": (0, 10_000),
    "weight_bits": (1, 32),
    "utilisation": (0.01, 1),
}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. What is None is taken from the model, the card or vLLM's defaults.

    Attributes:
        model: a named shape, or a folder with a config.json.
        card: a name of the table.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        budget: Nitro's, as are the next five.
        ratio: share of the tokens that stay, instead of a budget.
        slack: tokens by which a request may outgrow what it may keep.
        sinks: first tokens that always stay.
        window: newest tokens that always stay.
        evict_prompt: whether prompts may be evicted.
        kv_dtype: of the cache: auto (bf16) or fp8.
        weight_bits: of a weight in the layers.
        tensor_parallel: GPUs that share the model.
        block_size: tokens of a block.
        utilisation: ``gpu_memory_utilization``.
        memory_gib: of the card as CUDA reports it, instead of the datasheet's.
        reserve_gib: what a GPU needs beside weights and cache.
        max_batched: ``max_num_batched_tokens``.
        max_seqs: ``max_num_seqs``.
        requests: so many at once are played step by step, too.
    """

    model: str
    card: str
    prompt: int = 1000
    answer: int = 1000
    budget: int | None = None
    ratio: float | None = None
    slack: int = 64
    sinks: int = 4
    window: int = 32
    evict_prompt: bool = True
    kv_dtype: str = "auto"
    weight_bits: float | None = None
    tensor_parallel: int = 1
    block_size: int = 16
    utilisation: float = UTILISATION
    memory_gib: float | None = None
    reserve_gib: float | None = None
    max_batched: int = 8192
    max_seqs: int | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        """Check each value by itself, and Nitro's settings together.

        Raises:
            SettingsError: with the first thing that is wrong.
        """
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise SettingsError(f"{name}={value} is not between {least} and {most}: choose a value in these bounds")
        if self.ratio is not None and not 0 < self.ratio < 1:
            raise SettingsError(f"ratio={self.ratio} is not between 0 and 1: use e.g. 0.25")
        if self.kv_dtype not in KV_DTYPES:
            raise SettingsError(f"kv_dtype={self.kv_dtype!r} is not known: use one of {', '.join(KV_DTYPES)}")
        settings = {name: getattr(self, name) for name in ("budget", "ratio", "sinks", "window")}
        if self.budget is None and self.ratio is None:
            raise SettingsError("neither budget nor ratio is set: set budget, e.g. 512, or ratio, e.g. 0.25")
        if problems := contradictions({**settings, "threshold": None}):
            raise SettingsError("; ".join(problems))

    @property
    def rule(self) -> BudgetRule:
        """Return Nitro's rule of how many tokens a request keeps."""
        return BudgetRule(self.sinks, self.window, self.slack, self.evict_prompt, budget=self.budget, ratio=self.ratio)
