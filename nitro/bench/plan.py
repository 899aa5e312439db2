"""What a benchmark runs: engines that differ in few things, and the loads that all of them serve in turn."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from nitro.bench.shapes import Model
from nitro.device import Device
from nitro.errors import SettingsError

EXTENSION = "nitro.bench.instrument.BenchExtension"


@dataclass(frozen=True)
class Engine:
    """One engine: what sets it apart from the others.

    Attributes:
        name: of its rows and files.
        blocks: of its pool, the null block included.
        nitro: Nitro's settings; None for stock vLLM.
        fp8: whether its cache is FP8.
        arguments: further arguments of ``vllm.LLM``.
    """

    name: str
    blocks: int
    nitro: dict[str, Any] | None = None
    fp8: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Load:
    """So many requests at once, with prompts and answers of so many tokens.

    Attributes:
        budget: what each request says as its own budget; None: the engine's. Only engines with Nitro serve such a load.
    """

    requests: int
    prompt: int
    answer: int
    budget: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("prompt", 1), ("answer", 2)):
            if getattr(self, name) < least:
                raise SettingsError(f"{name}={getattr(self, name)} is below {least}: raise it to at least {least}")

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"{self.requests} x ({self.prompt} + {self.answer}){budget}"

    @property
    def tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Plan:
    """A whole benchmark.

    Attributes:
        model: what all engines serve.
        engines: in the order of a first round; every other round goes backwards.
        loads: served by each engine, one after the other.
        device: where, and the arguments that it needs.
        rounds: how often each engine serves each load.
        max_batched: tokens that a step may compute.
        warm_up: whether a round that does not count comes first.
        record: whether the engines' steps are recorded and timed from inside (`nitro.bench.instrument`).
    """

    model: Model
    engines: tuple[Engine, ...]
    loads: tuple[Load, ...]
    device: Device
    rounds: int = 1
    max_batched: int = 8192
    warm_up: bool = False
    record: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise SettingsError(f"rounds={self.rounds} is below 1: raise it to at least 1")
        if self.max_batched < 1:
            raise SettingsError(f"max_batched_tokens={self.max_batched} is below 1: raise it, e.g. to 8192")
        names = [engine.slug for engine in self.engines]
        if len(set(names)) < len(names):
            raise SettingsError(f"two engines are named alike: {', '.join(e.name for e in self.engines)}: rename one")

    @property
    def most(self) -> int:
        """The most requests at once."""
        return max(load.requests for load in self.loads)

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return max(load.tokens for load in self.loads)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return block_size(self.device)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of weights."""
        return itemsize(self.device)

    def pool_bytes(self, engine: Engine) -> int:
        """Return the bytes of an engine's cache."""
        return engine.blocks * self.block_size * self.model.kv_bytes(1 if engine.fp8 else self.itemsize)

    def memory(self, engine: Engine) -> int:
        """Return about how much memory an engine takes: weights, cache, positions, and what else it allocates."""
        beside = 0 if engine.nitro is None else engine.blocks * self.block_size * self.model.position_bytes()
        else_ = 4 * 10**9 if self.device.kind == "cuda" else 15 * 10**8
        return self.itemsize * self.model.parameters() + self.pool_bytes(engine) + beside + else_

    def arguments(self, engine: Engine, folder: str) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM`` for one engine; all that is not named is vLLM's default.

        Args:
            engine: which.
            folder: the model's.
        """
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, *range(256, self.most + 1, 128)]
        on_gpu = {
            "dtype": "bfloat16",
            "block_size": 16,
            "kv_cache_memory_bytes": self.pool_bytes(engine),
            "gpu_memory_utilization": 0.05,  # so that several engines fit; the size of the cache is given
            # For all engines, or the comparison would be unfair to those that run large batches: vLLM stops at 512.
            "compilation_config": {"cudagraph_capture_sizes": [size for size in sizes if size <= self.most]},
        }
        return {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "auto" if self.model.has_weights else "dummy",
            "max_model_len": self.longest,
            "max_num_seqs": self.most,
            "max_num_batched_tokens": max(self.max_batched, self.most),
            "num_gpu_blocks_override": engine.blocks,
            "disable_log_stats": False,
            "additional_config": {} if engine.nitro is None else {"nitro": engine.nitro},
            "seed": 0,
            **(on_gpu if self.device.kind == "cuda" else self.device.engine_args),
            **({"kv_cache_dtype": "fp8"} if engine.fp8 else {}),
            **({"worker_extension_cls": EXTENSION} if self.record else {}),
            **engine.arguments,
        }

    def environment(self, engine: Engine) -> dict[str, str]:
        """Return the environment variables that an engine's process needs beside the user's own."""
        if self.device.kind == "cuda":  # as a server runs: the engine's core in a process of its own
            return {**self.device.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        gib = -(-self.pool_bytes(engine) // 2**30)
        return {**self.device.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(gib)}

    def manifest(self) -> dict[str, Any]:
        """Return what a results directory remembers: results under other settings do not belong together."""
        return {
            "model": {"name": self.model.name, "config": self.model.config, "weights": self.model.has_weights},
            "engines": [asdict(engine) for engine in self.engines],
            "loads": [asdict(load) for load in self.loads],
            "device": self.device.description,
            "max_batched_tokens": self.max_batched,
            "warm_up": self.warm_up,
            "record": self.record,
        }


def block_size(device: Device) -> int:
    """Return the tokens of a block on a device."""
    return int(device.engine_args.get("block_size", 16))


def itemsize(device: Device) -> int:
    """Return the bytes of a number of weights and cache on a device."""
    return 4 if device.engine_args.get("dtype") == "float32" else 2
