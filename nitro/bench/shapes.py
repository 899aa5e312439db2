"""Which model an engine serves: a named shape with dummy weights, or a folder; and what it weighs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nitro._suggest import nearest
from nitro.errors import SettingsError

_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _sizes(*values: int, vocab: int, head_dim: int | None = None) -> dict[str, int]:
    sizes = dict(zip(_SIZES, values, strict=True)) | {"vocab_size": vocab}
    return sizes | ({} if head_dim is None else {"head_dim": head_dim})


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA | {"tie_word_embeddings": True} | _sizes(128, 256, 2, 4, 2, vocab=512, head_dim=32),
    "smollm2-135m": _LLAMA | {"tie_word_embeddings": True} | _sizes(576, 1536, 30, 9, 3, vocab=49_152),
    "qwen2.5-0.5b": _QWEN2 | _sizes(896, 4864, 24, 14, 2, vocab=151_936),
    "llama-3.2-1b": _LLAMA | {"tie_word_embeddings": True} | _sizes(2048, 8192, 16, 32, 8, vocab=128_256, head_dim=64),
    "llama-3.1-8b": _LLAMA
    | {"tie_word_embeddings": False}
    | _sizes(4096, 14_336, 32, 32, 8, vocab=128_256, head_dim=128),
}
"""Configurations as in each model's ``config.json``; ``tiny`` is nobody's model, but small enough for tests."""


@dataclass(frozen=True)
class Model:
    """A model's configuration, and where its weights are.

    Attributes:
        name: of the shape, or the folder's.
        config: what vLLM reads in ``config.json``.
        folder: of real weights; None for a shape, whose weights are dummies.
        has_weights: whether the folder holds weights; without them they are dummies, too.
    """

    name: str
    config: dict[str, Any]
    folder: Path | None = None
    has_weights: bool = False

    def __post_init__(self) -> None:
        missing = [key for key in (*_SIZES, "vocab_size") if not isinstance(self.config.get(key), int)]
        if missing:
            raise SettingsError(
                f"model {self.name!r}: its configuration has no {', '.join(missing)}: give a decoder's folder, or one "
                f"of the shapes {', '.join(SHAPES)}"
            )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.config["num_key_value_heads"])

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.config["vocab_size"])

    def kv_bytes(self, itemsize: float) -> int:
        """Return the bytes of keys and values of one token in all layers, with numbers of so many bytes."""
        return int(2 * self.layers * self.kv_heads * self.head_dim * itemsize)

    def parameters(self) -> int:
        """Return the number of weights of a Llama or Qwen2 of these sizes.

        A layer has query, key, value and output projections, the gated MLP's three, and two norms; Qwen2 has biases on
        queries, keys and values.
        """
        hidden, heads = int(self.config["hidden_size"]), int(self.config["num_attention_heads"])
        queries, keys = heads * self.head_dim, self.kv_heads * self.head_dim
        biases = queries + 2 * keys if self.config.get("model_type") == "qwen2" else 0
        mlp = 3 * hidden * int(self.config["intermediate_size"])
        layer = hidden * (2 * queries + 2 * keys) + biases + mlp + 2 * hidden
        tables = 1 if self.config.get("tie_word_embeddings") else 2
        return self.layers * layer + hidden + tables * self.vocab * hidden

    def read_parameters(self) -> int:
        """Return how many weights a step reads: all but an embedding table of its own, of which it reads few rows."""
        table = 0 if self.config.get("tie_word_embeddings") else self.vocab * int(self.config["hidden_size"])
        return self.parameters() - table

    def write(self, folder: Path, longest: int) -> Path:
        """Return the folder to give to vLLM: the model's own, or ``folder`` with a ``config.json`` in it.

        Args:
            folder: where a shape's configuration may be written.
            longest: the most tokens of a request.
        """
        if self.folder is not None:
            return self.folder
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "max_position_embeddings": max(32_768, longest),
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
            "rms_norm_eps": 1e-6,
        }
        (folder / "config.json").write_text(json.dumps(self.config | config), encoding="utf-8")
        return folder


def find(name: str) -> Model:
    """Return a model by a shape's name, or by its folder.

    Raises:
        SettingsError: it is neither, or its configuration cannot be read.
    """
    if name in SHAPES:
        return Model(name, SHAPES[name])
    folder = Path(name).expanduser()
    if not folder.is_dir():
        near = nearest(name, SHAPES)
        hint = f"did you mean {near!r}? Otherwise " if near else ""
        raise SettingsError(
            f"model {name!r} is neither a known shape nor a folder: {hint}give one of {', '.join(SHAPES)}, or a "
            "folder with config.json"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"model {name!r}: config.json cannot be read: {error}: give a model's folder") from error
    heads = config.get("num_attention_heads")
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return Model(folder.resolve().name, {"num_key_value_heads": heads} | config, folder.resolve(), weights)
