"""How many weights a decoder-only transformer has, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GEMMA = ("gemma2", "gemma3", "gemma3_text")
_QK_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights.

    Attributes:
        embedding: of the input embedding, vocabulary times hidden size; of the output's head as many.
        tied: whether both are one matrix.
        dense: of all layers, without routed experts.
        experts: of all routed experts of all layers together.
        routed_share: experts that one token uses over all experts of a layer; 1 where there are none.
    """

    embedding: int
    tied: bool
    dense: int
    experts: int = 0
    routed_share: float = 1.0

    @property
    def total(self) -> int:
        """Return all weights."""
        return self.embedding * (1 if self.tied else 2) + self.dense + self.experts

    @property
    def active(self) -> float:
        """Return the weights that one token is multiplied with, the output's head included."""
        return self.embedding + self.dense + self.experts * self.routed_share

    def read(self, tokens: float) -> float:
        """Return the weights that a step of so many tokens reads at least: of experts those that can be used."""
        return self.embedding + self.dense + self.experts * min(1.0, self.routed_share * tokens)


def count(config: Mapping[str, Any], head_dim: int) -> Parameters:
    """Count the weights of a Llama-like decoder: gated MLPs, norms without biases, perhaps experts or latent attention.

    Exact for the families of ``shapes.json`` (their published numbers are a test). Of others, biases, further norms
    and whatever else they have are missing, which is below a percent where layers are of these kinds.

    Args:
        config: keys of config.json, those that are missing filled in.
        head_dim: channels of a head.
    """
    hidden, layers, kind = config["hidden_size"], config["num_hidden_layers"], config.get("model_type", "")
    norms = (4 if kind in _GEMMA else 2) * hidden + (2 * head_dim if kind in _QK_NORMS else 0)
    experts, used = _experts(config)
    sparse = 0
    if experts:
        sparse = layers - config.get("first_k_dense_replace", 0)
    mlp = 3 * hidden * config["intermediate_size"]
    one = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = one * (config.get("n_shared_experts") or 0)
    dense = layers * (_attention(config, head_dim) + norms) + hidden
    dense += (layers - sparse) * mlp + sparse * (hidden * experts + shared)
    return Parameters(
        embedding=config["vocab_size"] * hidden,
        tied=bool(config["tie_word_embeddings"]),
        dense=dense,
        experts=sparse * experts * one,
        routed_share=used / experts if experts else 1.0,
    )


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many routed experts a layer has, and how many a token uses."""
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if number := config.get(name):
            return int(number), int(config.get("num_experts_per_tok") or 1)
    return 0, 0


def _attention(config: Mapping[str, Any], head_dim: int) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        return _latent_attention(config)
    query, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    weights: int = 2 * hidden * query + 2 * hidden * keys
    if config.get("model_type") == "qwen2":
        weights += query + 2 * keys
    elif config.get("attention_bias"):
        weights += query + 2 * keys + hidden
    return weights


def _latent_attention(config: Mapping[str, Any]) -> int:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, equations 9 to 19)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, compressed = config["v_head_dim"], config.get("q_lora_rank")
    query = heads * (nope + rope)
    weights = compressed * (hidden + query + 1) if compressed else hidden * query
    weights += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    return int(weights)
