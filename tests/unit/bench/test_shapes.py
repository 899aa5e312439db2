"""Models: what they weigh, what vLLM reads of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nitro.bench import shapes
from nitro.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        # As their model cards and vLLM say, in bf16.
        ("smollm2-135m", 134_515_008, 23_040),
        ("qwen2.5-0.5b", 494_032_768, 12_288),
        ("llama-3.2-1b", 1_235_814_400, 32_768),
        ("llama-3.1-8b", 8_030_261_248, 131_072),
    ],
)
def test_weights_and_keys_of_known_models(name: str, parameters: int, kv_bytes: int) -> None:
    model = shapes.find(name)
    assert model.parameters() == parameters
    assert model.kv_bytes(2) == kv_bytes
    assert model.kv_bytes(1) == kv_bytes // 2


def test_a_table_of_its_own_is_not_read_in_each_step() -> None:
    assert shapes.find("qwen2.5-0.5b").read_parameters() == 494_032_768
    assert shapes.find("llama-3.1-8b").read_parameters() == 8_030_261_248 - 128_256 * 4096


@pytest.mark.parametrize(("arch", "kind"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM")])
def test_the_formula_counts_what_transformers_makes(arch: str, kind: str) -> None:
    import transformers

    config = shapes.SHAPES["tiny"] | {"model_type": arch, "architectures": [kind], "tie_word_embeddings": False}
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(arch, **_plain(config)))
    assert sum(p.numel() for p in made.parameters()) == shapes.Model("a test", config).parameters()


def _plain(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in ("model_type", "architectures")}


def test_a_shape_is_written_for_vllm(tmp_path: Path) -> None:
    folder = shapes.find("tiny").write(tmp_path / "model", 50_000)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 50_000


def test_a_folder_is_served_as_it_is(tmp_path: Path) -> None:
    config = _plain(shapes.SHAPES["tiny"])
    config.pop("num_key_value_heads")  # older configurations mean as many as there are heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = shapes.find(str(tmp_path))
    assert (model.kv_heads, model.has_weights) == (4, False)
    assert model.write(tmp_path / "elsewhere", 10) == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert shapes.find(str(tmp_path)).has_weights


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'qwen2.5-05b' is neither .* did you mean 'qwen2.5-0.5b'\?"):
        shapes.find("qwen2.5-05b")
    with pytest.raises(SettingsError, match=r"config.json cannot be read.*give a model's folder"):
        shapes.find(str(tmp_path))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(SettingsError, match="its configuration has no hidden_size, intermediate_size"):
        shapes.find(str(tmp_path))
