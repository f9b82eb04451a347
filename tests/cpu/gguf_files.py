# Owns: small GGUF files written from tiny Hugging Face models, as public converters write them.
# Promises: names, row permutation and metadata come from the format's description, not from our reader.
# Never: imports ratoon.
"""Writing GGUF for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ t", "t h", "Ġt h", "1 2", "Ċ Ċ", "Ġ 1", "< |", "i m", "ì ĺ"]
_SYMBOLS = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(c) for c in _SYMBOLS] + [chr(256 + i) for i in range(256 - len(_SYMBOLS))]
# Three control tokens, the bytes, the merges, a word that no merges reach, one user-defined token.
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "hello", "<tool_call>"]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    if not name.startswith("model.layers."):
        table = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem, kind = name.rsplit(".", 1)
        return f"{table[stem]}.{kind}"
    _, _, number, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{number}.{_NAMES[stem]}.{kind}"


def tokenizer_fields(vocab: int, pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer whose table is padded to `vocab` rows."""
    padding = [f"[PAD{i}]" for i in range(len(TOKENS), vocab)]
    kinds = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4] + [5] * len(padding)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS + padding,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }


def write(
    path: Path,
    oracle: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "qwen2",
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes the model, matrices quantised to `kind`, and gives the oracle the values that the file holds.

    `fields` overrides metadata (None removes a key); `extra` adds tensors.
    """
    config = oracle.config
    architecture = config.model_type
    body = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if architecture == "qwen3":
        body |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    metadata = {f"{architecture}.{key}": value for key, value in body.items()}
    metadata |= tokenizer_fields(config.vocab_size, pre) | (fields or {})
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture", architecture)))
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, parameter in oracle.named_parameters():
        _add_parameter(writer, oracle, name, parameter, kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


def _add_parameter(
    writer: gguf.GGUFWriter,
    oracle: PreTrainedModel,
    name: str,
    parameter: torch.nn.Parameter,
    kind: gguf.GGMLQuantizationType,
) -> None:
    config = oracle.config
    values = parameter.detach().numpy()
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        # convert_hf_to_gguf.py: rows of each head from two halves to pairs.
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    if parameter.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
        return
    # Blocks lie within a row, so permuting rows and quantising commute.
    writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    parameter.data = torch.from_numpy(np.array(dequantize(quantize(parameter.detach().numpy(), kind), kind)))
