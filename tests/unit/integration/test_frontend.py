"""Requests' settings are checked where vLLM takes requests in, and the engine never sees a wrong one."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

import nitro
from nitro.integration.vllm import compat, frontend
from nitro.testing import matrix
from nitro.testing.recording import Recording

SERVER = {"policy": "keydiff", "budget": 72, "sinks": 4, "window": 16, "slack": 24}
BELOW = "nitro settings of a request: budget=12 is below sinks + window = 20"
Process = Callable[..., Any]


@pytest.fixture(scope="module")
def processors(tiny: Callable[[str], Path]) -> dict[bool, InputProcessor]:
    """Input processors of engines with and without Nitro."""
    made = {}
    for active in (True, False):
        config = EngineArgs(
            model=str(tiny("llama-gqa")),
            skip_tokenizer_init=True,
            max_model_len=256,
            block_size=32,
            additional_config=nitro.vllm_config(**SERVER) if active else {},
        ).create_engine_config()
        made[active] = InputProcessor(config)
    return made


@pytest.fixture
def process(processors: dict[bool, InputProcessor]) -> Process:
    def run(extra: Any, *, active: bool = True, **arguments: Any) -> Any:
        params = SamplingParams(max_tokens=5, extra_args=extra)
        prompt: Any = {"type": "token", "prompt_token_ids": [1, 2, 3]}
        return processors[active].process_inputs("r", prompt, params=params, supported_tasks=("generate",))

    return run


@pytest.mark.parametrize("own", [{"budget": 20}, '{"ratio": 0.5, "slack": 1}', {"enabled": False}, {}, None])
@pytest.mark.parametrize("others", [{}, {"anything": 1}])
def test_good_requests_pass_unchanged(process: Process, own: object, others: dict[str, Any]) -> None:
    extra = {"nitro": own, **others}
    assert process(extra).sampling_params.extra_args == extra


@pytest.mark.parametrize("own", [{"budget": 12}, '{"budget": 12}'])
def test_a_wrong_request_is_a_value_error_and_vllms_own_validation_error(process: Process, own: object) -> None:
    # The first is what users of Python expect, the second what vLLM's servers answer with status 400.
    for kind in (ValueError, nitro.SettingsError, VLLMValidationError):
        with pytest.raises(kind) as caught:
            process({"nitro": own})
    assert str(caught.value).startswith(BELOW)
    assert caught.value.parameter == "nitro"  # type: ignore[attr-defined]


def test_the_outer_key_in_other_letters_is_an_error(process: Process) -> None:
    with pytest.raises(ValueError, match="unknown entry 'NITRO', did you mean 'nitro'"):
        process({"NITRO": {"budget": 64}})
    assert process({"NITRO": 1}, active=False), "without Nitro, none of our business"


@pytest.mark.parametrize("own", [{"budget": 64}, {"enabled": False}, "{}", {}])
def test_an_engine_without_nitro_says_so(process: Process, own: object) -> None:
    with pytest.raises(ValueError, match="this engine runs without Nitro: remove the entry, or start vLLM with"):
        process({"nitro": own}, active=False)


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"nitro": None}])
@pytest.mark.parametrize("active", [True, False])
def test_requests_that_say_nothing_are_left_alone(process: Process, extra: Any, active: bool) -> None:
    assert process(extra, active=active).sampling_params.extra_args == extra


def test_wrapped_once_and_only_what_is_known(monkeypatch: pytest.MonkeyPatch, processors: object) -> None:
    assert processors
    wrapped = InputProcessor.process_inputs, AsyncLLM.generate
    frontend.wrap_front_end()
    assert (InputProcessor.process_inputs, AsyncLLM.generate) == wrapped

    def changed(self: InputProcessor, prompt: Any, params: Any) -> None: ...

    monkeypatch.setattr(InputProcessor, "process_inputs", changed)
    frontend.wrap_front_end()
    assert InputProcessor.process_inputs is changed, "another vLLM's method is left alone"
    assert AsyncLLM.generate is wrapped[1]
    with pytest.raises(nitro.UnsupportedError, match="process_inputs takes"):
        compat.require_hooks()


def tokens(seed: int, length: int = 100) -> dict[str, Any]:
    return {"prompt_token_ids": [(seed * 7919 + i * i * 31 + i) % 500 for i in range(length)]}


def sampling(own: object = None, **changes: Any) -> SamplingParams:
    extra = None if own is None else {"nitro": own}
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "detokenize": False}
    return SamplingParams(extra_args=extra, **{**greedy, **changes})


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_llm_generate(tiny: Callable[[str], Path]) -> None:
    scenario = matrix.SCENARIOS["plain"]
    with matrix.engine(tiny("llama-gqa"), scenario, "in-process") as llm:
        alone = llm.generate([tokens(1)], sampling(), use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(ValueError, match=re.escape(BELOW)):
            llm.generate([tokens(1), tokens(2)], [sampling(), sampling({"budget": 12})], use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        llm.collective_rpc("nitro_record", args=(True,))
        outputs = llm.generate(
            [tokens(1), tokens(2), tokens(3)],
            [sampling(), sampling({"budget": 40}, n=3, temperature=1.0), sampling({"enabled": False})],
            use_tqdm=False,
        )
        assert outputs[0].outputs[0].token_ids == alone, "a refused request leaves nothing behind"
        recording = Recording.combine(llm.collective_rpc("nitro_take_recording"))
        counts = Counter(record.kept.shape[-1] for record in recording.records_by_rank[0])
        # 159 tokens are computed: at 100, and then as often as slack (24) tokens have come.
        assert counts == {72: 1 + 59 // 24, 40: 3 * (1 + 59 // 24)}


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_async_llm_generate(tiny: Callable[[str], Path]) -> None:
    arguments = AsyncEngineArgs(
        model=str(tiny("llama-gqa")),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        num_gpu_blocks_override=60,
        kv_cache_memory_bytes=64 * 2**20,
        additional_config=nitro.vllm_config(**SERVER),
    )

    async def answer(llm: AsyncLLM, name: str, own: object) -> int:
        async for output in llm.generate(tokens(1), sampling(own), name):  # type: ignore[arg-type]
            last = output
        return len(last.outputs[0].token_ids)

    async def run() -> list[Any]:
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            asked = (None, {"budget": 12}, json.dumps({"budget": 40}), '{"budgt": 1}', {"enabled": False})
            return await asyncio.gather(
                *(answer(llm, f"r{number}", own) for number, own in enumerate(asked)), return_exceptions=True
            )
        finally:
            llm.shutdown()

    found = asyncio.run(run())
    assert [found[i] for i in (0, 2, 4)] == [60, 60, 60]
    assert all(isinstance(found[i], ValueError) for i in (1, 3))
    assert str(found[1]).startswith(BELOW)
    assert "did you mean 'budget'" in str(found[3])
