"""What Nitro refuses to serve, and why. Checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nitro.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nitro.config import Settings

ALIBI_ARCHITECTURES = {"BloomForCausalLM", "JAISLMHeadModel", "Step1ForCausalLM"}
UNQUANTISED_KV = {"auto", "float", "float32", "half", "float16", "bfloat16"}


def _get(config: object, *names: str) -> Any:
    """Follow attribute names; None where one is missing, since they differ between versions of vLLM."""
    for name in names:
        config = getattr(config, name, None)
        if config is None:
            return None
    return config


def _uses_alibi(model: Any) -> bool:
    """Return whether a model adds ALiBi's bias; some configurations say so, some architectures always do."""
    text = _get(model, "hf_text_config")
    said = _get(text, "alibi") or _get(text, "use_alibi") or _get(text, "position_embedding_type") == "alibi"
    attention = _get(text, "attn_config")  # MPT
    if isinstance(attention, dict):
        said = said or attention.get("alibi")
    architectures = set(_get(model, "architectures") or ())
    # The 13B Baichuan models have ALiBi, the 7B ones (hidden size 4096) RoPE, under the same name.
    baichuan = "BaichuanForCausalLM" in architectures and _get(text, "hidden_size") != 4096
    return bool(said) or baichuan or bool(architectures & ALIBI_ARCHITECTURES)


def model_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield why the model itself cannot be served."""
    model = config.model_config
    if _get(model, "runner_type") != "generate":
        yield f"runner={model.runner_type!r}: only text generation keeps a KV cache that grows; use --runner generate"
    if _get(model, "is_encoder_decoder"):
        yield "encoder-decoder models: cross-attention caches are not evicted yet; serve this model without Nitro"
    if _get(model, "is_attention_free"):
        yield "attention-free models have no KV cache to evict; serve this model without Nitro"
    if _get(model, "is_hybrid"):
        yield "hybrid models (with Mamba or linear layers) are not supported yet; serve this model without Nitro"
    if _get(model, "use_mla"):
        yield "multi-head latent attention (MLA) is not supported yet; serve this model without Nitro"
    if _get(model, "is_multimodal_model"):
        yield "multi-modal models were never tested with eviction; serve this model without Nitro"
    if _get(model, "is_diffusion"):
        yield "diffusion language models rewrite their cache; serve this model without Nitro"
    text = _get(model, "hf_text_config")
    layer_types = set(_get(text, "layer_types") or ())
    window = _get(config.cache_config, "sliding_window") or (
        model.get_sliding_window() if hasattr(model, "get_sliding_window") else None
    )
    if window is not None and (not layer_types or "sliding_attention" in layer_types):
        yield (
            f"sliding-window attention (window {window}): vLLM's own windows already free blocks, and the two are not "
            "combined yet; serve this model without Nitro, or disable the window with --disable-sliding-window"
        )
    if _get(text, "attention_chunk_size"):
        yield "chunked local attention is not supported yet; serve this model without Nitro"
    if _get(text, "dual_chunk_attention_config"):
        yield "dual chunk attention was never tested with eviction; serve this model without Nitro"
    if _uses_alibi(model):
        yield "ALiBi adds a bias per slot, which is wrong once tokens move; serve this model without Nitro"


def feature_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield which switched-on features of vLLM cannot be combined with eviction (yet)."""
    parallel, cache = config.parallel_config, config.cache_config
    if config.speculative_config is not None:
        yield "speculative decoding: a rejected draft could roll back past a compaction; drop --speculative-config"
    if config.kv_transfer_config is not None or _get(cache, "kv_offloading_size"):
        yield (
            "KV connectors and KV offloading ship blocks by position, which eviction changes; drop "
            "--kv-transfer-config and --kv-offloading-size"
        )
    if config.ec_transfer_config is not None:
        yield "encoder-cache connectors were never tested with eviction; drop --ec-transfer-config"
    if parallel.decode_context_parallel_size > 1 or (_get(parallel, "prefill_context_parallel_size") or 1) > 1:
        yield (
            "context parallelism interleaves one request's tokens over ranks; use "
            "--decode-context-parallel-size 1 and --prefill-context-parallel-size 1"
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline parallelism (size {parallel.pipeline_parallel_size}) was never tested with eviction; use "
            "--pipeline-parallel-size 1 (tensor parallelism works)"
        )
    if parallel.data_parallel_size > 1:
        yield (
            f"data parallelism (size {parallel.data_parallel_size}) was never tested with eviction; use "
            "--data-parallel-size 1, or start one server per replica"
        )
    if parallel.enable_dbo:
        yield "dual-batch overlap was never tested with eviction; drop --enable-dbo"
    yield from _quantisation_reasons(config)
    if _get(cache, "kv_sharing_fast_prefill"):
        yield "--kv-sharing-fast-prefill skips layers that eviction must see; drop it"
    if _get(config.model_config, "enable_sleep_mode"):
        yield "sleep mode discards what Nitro keeps beside the cache; drop --enable-sleep-mode"
    if _get(config.model_config, "enable_return_routed_experts"):
        yield "--enable-return-routed-experts indexes by slot, which eviction changes; drop it"


def _quantisation_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield why a quantised KV cache cannot be served. FP8 can, on GPUs, with scales that stay as they are."""
    from nitro.integration.vllm.compat import untested_fp8_reason, vllm_version
    from nitro.integration.vllm.fp8 import FP8_KV

    cache = config.cache_config
    dtype = str(cache.cache_dtype)
    if dtype in UNQUANTISED_KV:
        return
    if dtype not in FP8_KV:
        yield (
            f"KV cache of dtype {dtype}: of quantised caches Nitro only reads FP8 with a scale for each layer or KV "
            "head; use --kv-cache-dtype fp8, or auto"
        )
        return
    if str(config.device_config.device_type) == "cpu":
        yield f"KV cache of dtype {dtype} on a CPU: Nitro reads FP8 on GPUs only; use --kv-cache-dtype auto"
    elif untested := untested_fp8_reason(vllm_version(), dtype):
        yield untested
    if skipped := _get(cache, "kv_cache_dtype_skip_layers"):
        yield (
            f"--kv-cache-dtype-skip-layers {' '.join(map(str, skipped))}: Nitro needs caches of one dtype in all "
            "layers; drop it, or use --kv-cache-dtype auto"
        )
    if _get(cache, "calculate_kv_scales"):
        yield "--calculate-kv-scales may change scales that Nitro has read already; drop it, as vLLM recommends"


def threshold_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield why a worker's answers would not reach the scheduler, or not the only one."""
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend
    if backend not in (None, "uni", "mp"):
        yield (
            f"a threshold with distributed_executor_backend={backend!r}: rank 0's worker answers one scheduler, on its "
            "machine, through shared memory; use a budget or a ratio, or --distributed-executor-backend mp"
        )
    if (_get(parallel, "nnodes") or 1) > 1:
        yield (
            f"a threshold with workers on {parallel.nnodes} machines: workers answer the scheduler through shared "
            "memory; use a budget or a ratio, or --nnodes 1"
        )


def pooling_reasons(config: VllmConfig, pooling: str) -> Iterator[str]:
    """Yield why evicted tokens cannot be pooled."""
    device = str(config.device_config.device_type)
    if pooling != "none" and device != "cpu":
        yield (
            f"pooling={pooling!r} on device {device!r}: it would have to write to blocks that requests may share, "
            'which is not solved yet; use "pooling": "none"'
        )


def platform_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield why this device or model runner cannot be served."""
    from nitro.integration.vllm.compat import untested_v2_reason, vllm_version

    device = str(config.device_config.device_type)
    if device not in ("cpu", "cuda"):
        yield f"device {device!r}: Nitro runs on NVIDIA GPUs and CPUs"
    if config.use_v2_model_runner and (untested := untested_v2_reason(vllm_version())):
        yield untested


def hook_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield which of Nitro's seats in vLLM is already taken by something else."""
    from nitro.integration.vllm.activate import STOCK_WORKERS, is_nitro

    scheduler = config.scheduler_config.scheduler_cls
    if scheduler is not None and not is_nitro(scheduler):
        yield f"scheduler_cls={scheduler!r} is set, but Nitro needs its own scheduler; drop --scheduler-cls"
    worker = config.parallel_config.worker_cls
    if worker not in STOCK_WORKERS and not is_nitro(worker):
        yield f"worker_cls={worker!r} is set, but Nitro needs its own worker; drop --worker-cls"


def reasons(config: VllmConfig, settings: Settings) -> tuple[str, ...]:
    """Return every reason why this configuration is refused; empty if Nitro can serve it."""
    from nitro.integration.vllm.compat import untested_reason, vllm_version

    untested = untested_reason(vllm_version())
    return (
        *([untested] if untested else []),
        *model_reasons(config),
        *feature_reasons(config),
        *(threshold_reasons(config) if settings.threshold is not None else ()),
        *pooling_reasons(config, settings.pooling),
        *platform_reasons(config),
        *hook_reasons(config),
    )


def require_supported(config: VllmConfig, settings: Settings) -> None:
    """Raise UnsupportedError with every reason if Nitro cannot serve this configuration with these settings."""
    found = reasons(config, settings)
    if found:
        raise UnsupportedError("Nitro cannot serve this configuration:\n" + "\n".join(f"  - {line}" for line in found))
