"""A model's shape: what its config.json says of its cache and its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from nitro._suggest import did_you_mean
from nitro.capacity.parameters import Parameters, count
from nitro.errors import SettingsError

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Of how many layers one attends to everything, where a configuration with a window does not say."""
_STATE_KEYS = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "attn_layer_period", "state_size")


@dataclass(frozen=True, slots=True)
class Shape:
    """What counts of a model.

    Attributes:
        name: of the table, or the folder.
        layers: attention layers.
        sliding: how many of them attend to a window only.
        window: tokens of that window; None without one.
        heads: query heads.
        kv_heads: KV heads; with latent attention 1.
        head_dim: channels of a head.
        latent: numbers that a token takes in a layer's cache with latent attention (MLA); None: K and V of each head.
        hidden: channels between layers.
        intermediate: channels inside an MLP.
        vocab: tokens of the vocabulary.
        parameters: numbers of weights.
        weight_bits: of a weight in the layers, by ``quantization_config``; None if that does not say.
        file_bytes: what the folder's safetensors take; None without any.
        multimodal: whether it is the text part of a larger model.
    """

    name: str
    layers: int
    sliding: int
    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    latent: int | None
    hidden: int
    intermediate: int
    vocab: int
    parameters: Parameters
    weight_bits: float | None = 16
    file_bytes: int | None = None
    multimodal: bool = False

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return why Nitro cannot serve it, in the order of ``nitro.integration.vllm.refusals``; empty if it can."""
        found = []
        if self.latent is not None:
            found.append("multi-head latent attention (MLA) is not supported yet")
        if self.multimodal:
            found.append("multi-modal models were never tested with eviction")
        if self.sliding:
            found.append(
                f"{self.sliding} of {self.layers} layers have a sliding window of {self.window} tokens, in which vLLM "
                "frees blocks itself (--disable-sliding-window lifts that, and limits contexts to the window)"
            )
        return tuple(found)


@cache
def named_shapes() -> dict[str, dict[str, Any]]:
    """Return the table of shapes: what counts of the config.json that each model was published with."""
    found: dict[str, dict[str, Any]] = json.loads((files("nitro.capacity") / "shapes.json").read_text())
    return found


def shape_of(model: str) -> Shape:
    """Return the shape of a model: a name of the table, a folder with a config.json, or such a file.

    Raises:
        SettingsError: there is neither; or the file is no JSON object, or of no model that can be planned.
    """
    known = named_shapes()
    path = Path(model).expanduser()
    if model.lower() in known and not path.exists():
        return parse(model.lower(), known[model.lower()])
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SettingsError(
            f"model={model!r} is neither a folder with a config.json nor a known shape{did_you_mean(model, known)}: "
            f"use such a folder, or one of {', '.join(known)}"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}: pass the config.json of a model") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds no JSON object: pass the config.json of a model")
    stored = sum(part.stat().st_size for part in file.parent.glob("*.safetensors"))
    return parse(str(file.parent if file.name == "config.json" else file), config, file_bytes=stored or None)


def parse(name: str, config: Mapping[str, Any], *, file_bytes: int | None = None) -> Shape:
    """Return the shape that a config.json describes.

    Raises:
        SettingsError: a key is missing or wrong, or not all layers keep a cache of K and V.
    """
    whole = config
    if isinstance(nested := config.get("text_config"), Mapping):
        config = dict(nested)
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise SettingsError(
            f"{name}: config.json lacks {', '.join(missing)}: only decoder-only transformers can be planned"
        )
    if found := [key for key in _STATE_KEYS if config.get(key)]:
        raise SettingsError(
            f"{name}: config.json has {found[0]}, so some layers keep a state instead of K and V: the planner cannot "
            "count those, and Nitro refuses such models"
        )
    filled = {
        "num_key_value_heads": config["num_attention_heads"],
        "tie_word_embeddings": str(config.get("model_type", "")).startswith(
            "gemma"
        ),  # as transformers' classes have it
        **config,
    }
    for key in (*_NEEDED, "num_key_value_heads"):
        value = filled[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{name}: {key}={value!r} is no whole number above 0: correct the config.json")
    heads = filled["num_attention_heads"]
    head_dim = filled.get("head_dim") or filled["hidden_size"] // heads
    latent = filled.get("kv_lora_rank")
    window, sliding = _window(filled)
    return Shape(
        name=name,
        layers=filled["num_hidden_layers"],
        sliding=sliding,
        window=window,
        heads=heads,
        kv_heads=1 if latent else filled["num_key_value_heads"],
        head_dim=head_dim,
        latent=latent + filled["qk_rope_head_dim"] if latent else None,
        hidden=filled["hidden_size"],
        intermediate=filled["intermediate_size"],
        vocab=filled["vocab_size"],
        parameters=count(filled, head_dim),
        weight_bits=_weight_bits(whole.get("quantization_config")),
        file_bytes=file_bytes,
        multimodal=config is not whole,
    )


def _window(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the sliding window and how many layers have one."""
    window = config.get("sliding_window")
    # Qwen's configurations name a window that is off unless they say otherwise.
    used = config.get("use_sliding_window", not str(config.get("model_type", "")).startswith("qwen"))
    if not window or not used:
        return None, 0
    layers: int = config["num_hidden_layers"]
    if types := config.get("layer_types"):
        sliding = sum(kind == "sliding_attention" for kind in types)
    elif every := config.get("sliding_window_pattern") or _FULL_EVERY.get(config.get("model_type", "")):
        sliding = layers - layers // every
    else:
        sliding = layers
    return (window, sliding) if sliding else (None, 0)


def _weight_bits(quantisation: Mapping[str, Any] | None) -> float | None:
    """Return the bits of a weight in the layers, without scales; None if it is quantised and does not say how."""
    if not quantisation:
        return 16
    bits = quantisation.get("bits") or quantisation.get("w_bit") or (4 if quantisation.get("load_in_4bit") else None)
    methods = {"fp8": 8, "mxfp4": 4}
    return bits or methods.get(str(quantisation.get("quant_method")))
