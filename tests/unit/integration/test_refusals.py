"""Each configuration that Nitro cannot serve is refused at start-up, with its reason and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

import nitro
from nitro.config import Settings
from nitro.integration.vllm import compat, refusals

Configure = Callable[..., Any]
BUDGET, THRESHOLD = Settings.parse({"budget": 64}), Settings.parse({"threshold": 0.5})


@pytest.fixture
def config(tiny: Callable[[str], Path]) -> Any:
    return EngineArgs(
        model=str(tiny("llama-gqa")), skip_tokenizer_init=True, max_model_len=256, block_size=32
    ).create_engine_config()


def test_a_plain_model_is_served(config: Any) -> None:
    assert refusals.reasons(config, BUDGET) == ()
    assert refusals.reasons(config, THRESHOLD) == ()


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ("model_config", {"runner_type": "pooling"}, "use --runner generate"),
        ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("model_config", {"is_attention_free": True}, "attention-free"),
        ("model_config", {"is_hybrid": True}, "hybrid models"),
        ("model_config", {"use_mla": True}, "MLA"),
        ("model_config", {"is_multimodal_model": True}, "multi-modal"),
        ("model_config", {"enable_sleep_mode": True}, "drop --enable-sleep-mode"),
        ("", {"speculative_config": object()}, "drop --speculative-config"),
        ("", {"kv_transfer_config": object()}, "drop --kv-transfer-config"),
        ("", {"ec_transfer_config": object()}, "drop --ec-transfer-config"),
        ("cache_config", {"kv_offloading_size": 4.0}, "--kv-offloading-size"),
        ("cache_config", {"cache_dtype": "fp8_e4m3"}, "on a CPU: Nitro reads FP8 on GPUs only"),
        *(
            ("cache_config", {"cache_dtype": dtype}, f"dtype {dtype}: of quantised caches Nitro only reads FP8")
            for dtype in ("fp8_per_token_head", "fp8_ds_mla", "fp8_inc", "int8_per_token_head", "nvfp4")
        ),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 1"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ("parallel_config", {"data_parallel_size": 2}, "--data-parallel-size 1"),
        ("parallel_config", {"enable_dbo": True}, "drop --enable-dbo"),
        ("", {"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("device_config", {"device_type": "xpu"}, "NVIDIA GPUs and CPUs"),
    ],
)
def test_refused_with_a_remedy(config: Any, part: str, changes: dict[str, Any], says: str) -> None:
    class Overlay:
        """The configuration with some attributes replaced; vLLM's own classes check too much to be put out of tune."""

        def __init__(self, inner: Any, **replaced: Any) -> None:
            self.__dict__.update(replaced)
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    changed = (
        Overlay(config, **changes) if not part else Overlay(config, **{part: Overlay(getattr(config, part), **changes)})
    )
    found = refusals.reasons(changed, BUDGET)  # type: ignore[arg-type]
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "changes",
    [{"distributed_executor_backend": "ray"}, {"distributed_executor_backend": "external_launcher"}, {"nnodes": 2}],
)
def test_a_threshold_needs_its_workers_on_one_machine(changes: dict[str, Any]) -> None:
    parallel = SimpleNamespace(**{"distributed_executor_backend": "mp", "nnodes": 1} | changes)
    config: Any = SimpleNamespace(parallel_config=parallel)
    (reason,) = refusals.threshold_reasons(config)
    assert "shared memory; use a budget or a ratio, or" in reason
    config.parallel_config = SimpleNamespace(distributed_executor_backend="mp")
    assert not list(refusals.threshold_reasons(config))


def write_config(path: Path, source: Path, **changes: Any) -> Path:
    path.mkdir()
    values = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))
    return path


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "mistral",
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
            "window 64",
        ),
        ("alibi", {"alibi": True}, "ALiBi"),
        ("bloom", {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_head": 4, "n_layer": 2}, "ALiBi"),
        ("mpt-like", {"attn_config": {"alibi": True}}, "ALiBi"),
        ("chunked", {"attention_chunk_size": 128}, "chunked local attention"),
    ],
)
def test_real_model_configurations(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    model = write_config(tmp_path / name, tiny("llama-gqa"), **changes)
    with pytest.raises(nitro.UnsupportedError, match=says):
        EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=256,
            additional_config=nitro.vllm_config(budget=64),
        ).create_engine_config()


def test_all_reasons_are_given_at_once(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(nitro.UnsupportedError) as caught:
        EngineArgs(
            model=str(tiny("llama-gqa")),
            skip_tokenizer_init=True,
            max_model_len=256,
            pipeline_parallel_size=2,
            kv_cache_dtype="fp8",
            additional_config=nitro.vllm_config(budget=64),
        ).create_engine_config()
    assert "pipeline parallelism" in str(caught.value)
    assert "KV cache of dtype fp8 on a CPU" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"cache_dtype": "fp8_e4m3"}, None),
        ({"cache_dtype": "fp8_e5m2"}, "dtype fp8_e5m2 were never tested .* use --kv-cache-dtype fp8, or"),
        ({"kv_cache_dtype_skip_layers": ["0", "5"]}, "--kv-cache-dtype-skip-layers 0 5: .* drop it"),
        ({"calculate_kv_scales": True}, "--calculate-kv-scales may change scales"),
    ],
)
def test_fp8_on_gpus(changes: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TESTED_FP8_MINORS", (compat.minor_of(compat.vllm_version()),))
    cache = {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [], "calculate_kv_scales": False} | changes
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(**cache), device_config=SimpleNamespace(device_type="cuda")
    )
    found = list(refusals._quantisation_reasons(config))
    if says is None:
        assert not found
    else:
        (reason,) = found
        assert re.search(says, reason)


def test_pooling_is_served_on_cpus_only() -> None:
    def found(pooling: str, device: str) -> list[str]:
        config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        return list(refusals.pooling_reasons(config, pooling))

    assert found("none", "cuda") == found("none", "cpu") == found("merge", "cpu") == []
    (reason,) = found("merge", "cuda")
    assert re.search("pooling='merge' on device 'cuda': .* use \"pooling\": \"none\"", reason)


def test_fp8_is_refused_where_it_was_never_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"), device_config=SimpleNamespace(device_type="cuda")
    )
    (reason,) = refusals._quantisation_reasons(config)
    assert "never tested with Nitro on a GPU" in reason
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    assert not list(refusals._quantisation_reasons(config))


def test_layers_that_look_at_slots_are_refused_when_the_model_is_loaded() -> None:
    from nitro.integration.vllm.caches import _attention_layers

    plain = SimpleNamespace(impl=SimpleNamespace(alibi_slopes=None, sliding_window=-1))
    for layer, says in (
        (SimpleNamespace(impl=SimpleNamespace(alibi_slopes=[0.5])), "ALiBi"),
        (SimpleNamespace(impl=SimpleNamespace(sliding_window=128)), "sliding window of 128"),
        (SimpleNamespace(impl=SimpleNamespace(), kv_sharing_target_layer_name="a"), "shares the KV cache"),
    ):
        context = SimpleNamespace(static_forward_context={"a": plain, "b": layer})
        runner: Any = SimpleNamespace(compilation_config=context)
        assert _attention_layers(runner, ["a"]) == [plain]
        with pytest.raises(nitro.UnsupportedError, match=says):
            _attention_layers(runner, ["a", "b"])
