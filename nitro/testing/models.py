"""Tiny models with random weights under which attention matters, for tests that need no download.

With the usual initialisation attention is nearly uniform and the argmax hardly depends on the context, so a wrong
eviction would pass unseen. Here queries and keys are scaled so that attention is peaked, attention dominates the
residual stream, and logits are spread so widely that a rounding error hardly ever flips an argmax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

Arch = Literal["llama", "qwen2"]

_SCORE_STD = 3.0  # of a query-key score: attention picks out few keys, so evicting one of them shows
_BRANCH_GAIN = 4.0  # attention's share of the residual stream, against 1 for the token's own embedding
_MLP_GAIN = 1.0  # likewise the MLP's share
_BIAS_STD = 0.1  # larger biases make the greedy text run into loops
_LOGIT_STD = 10.0  # of a logit; the two highest are then 2 apart in the median


def make_tiny_model(
    path: Path,
    arch: Arch,
    *,
    num_kv_heads: int,
    num_heads: int = 4,
    head_dim: int = 32,
    layers: int = 3,
    hidden: int | None = None,
    vocab: int = 512,
    max_len: int = 4096,
    seed: int = 0,
) -> Path:
    """Writes a model that vLLM loads with ``skip_tokenizer_init=True``; prompts are token ids.

    The last token of the vocabulary is the end of sequence and can never win (its logit is 0), so a generation always
    reaches its `max_tokens`.

    Args:
        path: directory to write; created if needed.
        arch: "llama", or "qwen2" (biases on queries, keys and values).
        num_kv_heads: KV heads; `num_heads` for multi-head attention, fewer for grouped-query attention.
        num_heads: query heads.
        head_dim: size of a head; vLLM's CPU attention needs at least 32. Qwen2 needs ``hidden / num_heads``.
        layers: number of layers.
        hidden: size of the residual stream; ``num_heads * head_dim`` by default.
        vocab: size of the vocabulary.
        max_len: the longest sequence that the configuration allows.
        seed: of the weights.

    Returns:
        `path`.

    Raises:
        ValueError: the sizes do not fit each other, or `arch` is unknown.
    """
    hidden = num_heads * head_dim if hidden is None else hidden
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": vocab - 1,
        "dtype": "float32",
    }
    model: PreTrainedModel
    if arch == "llama":
        model = LlamaForCausalLM(LlamaConfig(head_dim=head_dim, **sizes))
    elif arch == "qwen2":
        if hidden != num_heads * head_dim:
            raise ValueError(f"hidden={hidden}: qwen2 needs num_heads * head_dim = {num_heads * head_dim}")
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        raise ValueError(f"arch={arch!r}: give 'llama' or 'qwen2'")
    _init_weights(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=vocab - 1)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def _init_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.normal_(0.0, std, generator=generator)

    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[-1]
        unit = fan_in**-0.5
        if name.endswith("norm.weight"):
            parameter.uniform_(0.8, 1.2, generator=generator)
        elif name.endswith(".bias"):
            normal(parameter, _BIAS_STD)
        elif "q_proj" in name or "k_proj" in name:
            # Unit-rms inputs give scores q·k / sqrt(head_dim) a variance of the product of both variances.
            normal(parameter, _SCORE_STD**0.5 * unit)
        elif "o_proj" in name:
            normal(parameter, _BRANCH_GAIN * unit)
        elif "down_proj" in name:
            normal(parameter, _MLP_GAIN * unit)
        elif "lm_head" in name:
            normal(parameter, _LOGIT_STD * unit)
            parameter[-1] = 0.0
        elif "embed_tokens" in name:
            normal(parameter, 1.0)
        else:
            normal(parameter, unit)


def load_model(path: Path, *, rounded_to: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """A model directory as the oracle needs it: in fp32, for inference.

    Args:
        path: the directory.
        rounded_to: the dtype in which the engine has the weights; the oracle's are rounded to it, too.
        device: where it runs.
    """
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=rounded_to, local_files_only=True)
    return model.float().to(device).eval()
