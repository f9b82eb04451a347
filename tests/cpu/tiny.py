# Owns: tiny random Hugging Face targets, the oracle of the model tests.
# Promises: every parameter is random, norms and biases too, so that none can be forgotten unseen.
# Never: leaves a weight at the value that hides it (ones, zeros).
"""Tiny Llama, Qwen2 and Qwen3 models of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
VOCAB, LAYERS = 320, 4
_CLASSES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model in eval mode; Qwen3's head_dim is not hidden / heads."""
    config_class, model_class = _CLASSES[architecture]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    if architecture == "qwen3":
        sizes["head_dim"] = 32
    config = config_class(**{**sizes, **changes})
    config.architectures = [model_class.__name__]
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise
    return model


def save(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Path:
    """Writes config.json and safetensors."""
    model.save_pretrained(folder, **kwargs)
    return folder


def ids(count: int, seed: int = 1) -> Tensor:
    """Random token ids [count]."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
