"""Shapes: weights to the last one, caches as vLLM counts them, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nitro.capacity import pool
from nitro.capacity.cards import CARDS, GIB, card_named
from nitro.capacity.pool import Layout, weight_bytes
from nitro.capacity.shapes import Shape, named_shapes, parse, shape_of
from nitro.errors import SettingsError

# Known of the checkpoints before anything was computed, but for qwen3-0.6b, mistral-7b-v0.1 and deepseek-v3: these
# three only pin what the formula gives today.
WEIGHTS = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-2-9b": 9_241_705_984,
    "deepseek-v3": 671_026_404_352,
}


def layout(shape: Shape, *, kv_bytes: float = 2, tensor_parallel: int = 1) -> Layout:
    return Layout.of(shape, block_size=16, kv_bytes=kv_bytes, tensor_parallel=tensor_parallel)


def variant(name: str = "qwen2.5-0.5b", **changes: Any) -> Shape:
    return parse("changed", named_shapes()[name] | changes)


def test_every_named_shape_has_its_number_of_weights() -> None:
    assert {name: shape_of(name).parameters.total for name in named_shapes()} == WEIGHTS


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("qwen2.5-0.5b", 12_288), ("llama-3.1-8b", 131_072), ("llama-2-7b", 524_288), ("deepseek-v3", 61 * 576 * 2)],
)
def test_bytes_of_a_token(name: str, nbytes: int) -> None:
    """Grouped-query, multi-head and latent attention."""
    assert layout(shape_of(name)).slot_bytes == nbytes
    assert layout(shape_of(name), kv_bytes=1).slot_bytes * 2 == nbytes


def test_tensor_parallel_divides_heads_and_repeats_the_last_one() -> None:
    qwen = shape_of("qwen2.5-0.5b")
    assert layout(qwen, tensor_parallel=2).slot_bytes == 6_144
    # 14 query heads over 14 GPUs: each of the 2 KV heads is on seven of them.
    assert layout(qwen, tensor_parallel=14).slot_bytes == 6_144
    assert layout(shape_of("deepseek-v3"), tensor_parallel=8).slot_bytes == 61 * 576 * 2
    with pytest.raises(SettingsError, match=r"tensor_parallel=4 does not divide 14 query heads.*divisor of both"):
        layout(qwen, tensor_parallel=4)


def test_layers_with_windows_hold_no_more_than_those() -> None:
    gemma = layout(shape_of("gemma-2-9b"))
    assert (gemma.full_groups, gemma.sliding_groups, gemma.window) == (1, 1, 4096)
    assert gemma.blocks(1000) == 2 * 63
    assert gemma.blocks(100_000) == 6250 + 256 + 1
    assert gemma.read_slots(100_000) == (100_000 + 4096) / 2
    mistral = layout(shape_of("mistral-7b-v0.1"))
    assert (mistral.full_groups, mistral.sliding_groups) == (0, 1)
    assert mistral.block_bytes == 16 * 131_072
    # Five with a window for one without: 26 layers are groups of 4 (and padding).
    some = layout(variant("gemma-2-9b", model_type="gemma3_text", num_hidden_layers=26))
    assert (some.full_groups, some.sliding_groups) == (1, 6)


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({"sliding_window": 4096}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096, "use_sliding_window": True}, 24),
        ({"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 24}, 0),
        (
            {
                "model_type": "x",
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 20,
            },
            4,
        ),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], sliding: int) -> None:
    shape = variant(**changes)
    assert shape.sliding == sliding
    assert any("sliding window" in reason for reason in shape.refusals) == bool(sliding)


def test_what_nitro_refuses() -> None:
    assert shape_of("qwen3-30b-a3b").refusals == ()
    assert "MLA" in shape_of("deepseek-v3").refusals[0]
    nested = parse("vision", {"text_config": named_shapes()["qwen3-8b"]})
    assert nested.layers == 36
    assert "multi-modal" in nested.refusals[0]


def test_weights_of_quantised_models() -> None:
    llama = shape_of("llama-3.1-8b")
    embeddings = 2 * 128_256 * 4096
    assert weight_bytes(llama, None, 1) == 2 * 8_030_261_248
    assert weight_bytes(llama, 4, 1) == 2 * embeddings + (8_030_261_248 - embeddings) // 2
    assert weight_bytes(llama, 16, 4) == 8_030_261_248 // 2
    for said, bits in (({"bits": 4}, 4), ({"quant_method": "fp8"}, 8), ({"load_in_4bit": True}, 4)):
        assert weight_bytes(variant("llama-3.1-8b", quantization_config=said), None, 1) == weight_bytes(llama, bits, 1)
    silent = variant("llama-3.1-8b", quantization_config={"quant_method": "own"})
    with pytest.raises(SettingsError, match=r"does not say how many bits.*--weight-bits"):
        weight_bytes(silent, None, 1)
    assert weight_bytes(silent, 16, 1) == weight_bytes(llama, None, 1)


def test_a_folder_counts_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(named_shapes()["qwen2.5-0.5b"]))
    assert shape_of(str(tmp_path)).file_bytes is None
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    for path in (tmp_path, tmp_path / "config.json"):
        assert weight_bytes(shape_of(str(path)), None, 1) == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON"),
        ("[1]", r"holds no JSON object"),
        ('{"hidden_size": 1}', r"lacks intermediate_size, .*vocab_size"),
        (json.dumps(named_shapes()["qwen3-8b"] | {"num_hidden_layers": 0}), r"num_hidden_layers=0 is no whole number"),
        (json.dumps(named_shapes()["qwen3-8b"] | {"vocab_size": "many"}), r"vocab_size='many' is no whole number"),
        (json.dumps(named_shapes()["qwen3-8b"] | {"linear_num_value_heads": 4}), r"keep a state instead of K and V"),
    ],
)
def test_configurations_that_cannot_be_planned(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        shape_of(str(tmp_path))


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'qwen2\.5-0\.5b'\?.*smollm2-135m"):
        shape_of("qwen2.5_0.5b")
    with pytest.raises(SettingsError, match=r"card='h20' is not in the table, did you mean 'h200'\?.*--memory"):
        card_named("h20")
    assert card_named("NVIDIA-L4") is CARDS["l4"]


def test_cards() -> None:
    for name, card in CARDS.items():
        assert card.name == name
        assert card.source.startswith("NVIDIA ")
        assert 20 < card.visible_bytes / GIB <= card.memory_gb
        assert 50 < card.flops / card.bandwidth < 1000, "operations for each byte: a slip of a unit is a factor of 1000"
    assert CARDS["l4"].visible_bytes == 22 * GIB


def test_what_nitro_takes_beside_the_cache_is_what_the_worker_takes() -> None:
    from nitro import kernel_compactor

    assert pool.SCRATCH_BYTES == kernel_compactor.SCRATCH_BYTES
    assert kernel_compactor.positions_bytes(3, 16) == pool.POSITION_BYTES * 3 * 16
