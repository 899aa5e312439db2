"""RoPE as vLLM does it is found and undone, in all variants; what cannot be undone is said, and once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nitro.policies.rotary import Rotations

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LENGTH, DIM = 64, 32
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"is_neox_style": False},
    "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": LENGTH // 4,
        }
    },
}


@pytest.fixture
def vllm_config() -> Iterator[None]:
    """Embeddings are made within a configuration of vLLM's."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


class Layer(nn.Module):
    """What is beside an attention layer in a model."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.attn = nn.Identity()


def make_embedding(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    arguments = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "is_neox_style": True, **changes}
    return get_rope(DIM, max_position=LENGTH, dtype=dtype, **arguments)


def found_in(*layers: nn.Module, dtype: torch.dtype = torch.float32, rotates: bool = True) -> Rotations:
    from nitro.integration.vllm.rotary import find_rotations

    names = [f"{index}.attn" for index in range(len(layers))]
    return find_rotations(nn.Sequential(*layers), names, dtype, rotates)


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, dtype: torch.dtype) -> None:
    embedding = make_embedding(dtype, **VARIANTS[variant])
    found = found_in(Layer(rotary_emb=embedding), dtype=dtype)
    assert found.problem is None
    (rotation,) = found.layers
    assert rotation is not None
    assert rotation.interleaved == (variant == "interleaved")
    assert rotation.cos_sin.shape[1] == (DIM // 2 if variant == "partial" else DIM)
    keys = torch.randn(LENGTH, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.arange(LENGTH)
    _, rotated = embedding(positions, keys.clone(), keys.clone())
    assert not torch.allclose(rotated[1:], keys[1:], atol=0.1)
    error = (rotation.undo(rotated, positions.int()) - keys.float()).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.usefixtures("vllm_config")
def test_an_embedding_that_does_something_else() -> None:
    class Shifted(type(make_embedding())):  # type: ignore[misc]
        def forward_native(self, positions: Any, query: Any, key: Any) -> Any:
            return super().forward_native((positions + 1).clamp(max=LENGTH - 1), query, key)

    embedding = make_embedding()
    embedding.__class__ = Shifted
    try:
        found = found_in(Layer(rotary_emb=embedding), Layer(rotary_emb=make_embedding(is_neox_style=False)))
    finally:
        embedding.__class__ = Shifted.__bases__[0]  # vLLM keeps embeddings, and hands out the same ones again
    assert found.layers[0] is None
    assert found.layers[1] is not None
    assert found.problem == "Shifted does more than its table says"


@pytest.mark.usefixtures("vllm_config")
def test_an_embedding_without_a_table() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    embedding = RotaryEmbeddingBase(DIM, DIM, LENGTH, 1e4, True, torch.float32, init_cache=False)
    found = found_in(Layer(rotary_emb=embedding))
    assert found.layers == (None,)
    assert found.problem == "RotaryEmbeddingBase has no table of cosines and sines for each position"


def test_layers_without_an_embedding() -> None:
    assert found_in(Layer(), rotates=False).problem is None
    found = found_in(Layer(), Layer())
    assert found.layers == (None, None)
    assert found.problem is not None
    assert "0.attn has no rotary embedding of its own" in found.problem


@pytest.mark.parametrize("arch", ["llama-gqa", "qwen2-mha"])
def test_keys_in_an_engines_cache_are_those_of_the_projection_once_undone(
    tiny: Callable[[str], Path], arch: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import SamplingParams

    from nitro.testing import matrix
    from nitro.testing.models import load_model

    path = tiny(arch)
    prompt = torch.randint(0, matrix.VOCAB, (70,), generator=torch.Generator().manual_seed(2))
    projected: list[torch.Tensor] = []
    model = load_model(path)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: projected.append(out[0]))
    with torch.inference_mode():
        model(prompt[None])
    with matrix.engine(path, matrix.SCENARIOS["plain"], "in-process") as llm:
        core = llm.llm_engine.engine_core.engine_core
        compactor = core.model_executor.driver_worker.worker.model_runner.nitro
        caplog.set_level(logging.WARNING, logger="nitro.compactor")
        llm.collective_rpc("nitro_set_policy", args=("kvdiff",))
        sampling = SamplingParams(max_tokens=1, detokenize=False, extra_args={"nitro": {"enabled": False}})
        llm.generate([{"prompt_token_ids": prompt.tolist()}], sampling, use_tqdm=False)
        blocks = torch.arange(1, 4)  # the first that an empty pool hands out, after the null block
        for cache, rotation, want in zip(compactor.caches, compactor.rotations.layers, projected, strict=True):
            keys, _ = cache.gather(blocks, 70)
            undone = rotation.undo(keys, torch.arange(70, dtype=torch.int32).expand(len(keys), -1))
            torch.testing.assert_close(undone, want.view(70, len(keys), -1).transpose(0, 1), rtol=1e-3, atol=1e-3)
    assert not [record for record in caplog.records if record.name == "nitro.compactor"]


def test_the_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    from nitro import policies
    from nitro.dense_compactor import DenseCompactor

    class Cache:
        block_size, num_kv_heads, head_dim, device = 4, 1, 8, torch.device("cpu")

        def gather(self, block_ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(1, length, 8), torch.zeros(1, length, 8)

        def scatter(self, block_ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
            raise AssertionError

    with caplog.at_level(logging.WARNING, logger="nitro.compactor"):
        compactor = DenseCompactor(
            [Cache()],
            [0],
            [0],
            policies.get("keydiff"),
            sinks=1,
            window=2,
            seed=0,
            rotations=Rotations((None,), "Odd has no table"),
        )
        assert not caplog.messages
        compactor.set_policy(policies.get("kvdiff"))
        compactor.set_policy(policies.get("vdiff"))
        compactor.set_policy(policies.get("kvdiff"))
    (message,) = caplog.messages
    assert message.startswith("policy kvdiff scores keys as they are in the cache")
    assert message.endswith("Odd has no table")
