"""Which model an engine serves: a named shape with dummy weights, or a folder; and what it weighs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nitro._suggest import nearest
from nitro.capacity.parameters import Parameters, count
from nitro.capacity.pool import POSITION_BYTES
from nitro.capacity.shapes import named_shapes
from nitro.errors import SettingsError

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
}
_TINY = dict(zip(_SIZES, (128, 256, 2, 4, 2), strict=True)) | {"vocab_size": 512, "head_dim": 32}
_NAMED = ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b")

SHAPES: dict[str, dict[str, Any]] = {
    name: _KINDS[sizes["model_type"]] | sizes
    for name, sizes in {
        "tiny": {"model_type": "llama", "tie_word_embeddings": True} | _TINY,
        **{name: named_shapes()[name] for name in _NAMED},
    }.items()
}
"""Configurations: the planner's shapes, with what vLLM needs beside the sizes.

``tiny`` is nobody's model, but small enough for tests.
"""


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

    def position_bytes(self) -> int:
        """Return the bytes that Nitro keeps for a slot beside its keys and values on a GPU, in all layers."""
        return POSITION_BYTES * self.layers * self.kv_heads

    def parameters(self) -> int:
        """Return the number of weights."""
        return self._counted.total

    def read_parameters(self) -> int:
        """Return how many weights a step reads: all but an embedding table of its own, of which it reads few rows."""
        counted = self._counted
        return counted.total if counted.tied else counted.total - counted.embedding

    @property
    def _counted(self) -> Parameters:
        return count({"tie_word_embeddings": False} | self.config, self.head_dim)

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
