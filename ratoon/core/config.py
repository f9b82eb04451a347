# Owns: the shape of a target network, read from a checkpoint's config or refused.
# Promises: a key that would change the computation is read, or refused by name.
# Never: opens a file, imports torch.
"""Target model configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratoon.core.rope import RopeConfig

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

# Keys that change the computation and that we do not compute, with the values at which they change nothing.
# Qwen2's bias on q, k and v belongs to its architecture, so its own configs do not carry `attention_bias`.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "num_nextn_predict_layers": (0,),
    "attn_temperature_tuning": (False,),
}


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and SwiGLU. Heads and widths are counts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads a Hugging Face `config.json`; `generation` is its `generation_config.json`.

        Raises ValueError naming the key, the architecture or the quantisation that is not supported.
        """
        architecture = _architecture(config)
        _refuse_quantised(config)
        _refuse_uncomputed(config)
        heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        _check_heads(heads, kv_heads, head_dim, hidden, "head_dim" in config)
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            rope=RopeConfig.from_hf(config),
            max_position=_integer(config, "max_position_embeddings"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            eos_ids=_eos_ids(config, generation or {}),
            bos_id=_optional_id(config.get("bos_token_id")),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(names) or f"none (model_type '{config.get('model_type')}')"
    raise ValueError(f"architecture not supported: {found}; supported: {', '.join(ARCHITECTURES)}")


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method") or quantisation.get("quant_type") or "unnamed"
        raise ValueError(
            f"quantised checkpoint not supported: quantization_config says '{method}'; "
            "use the bfloat16, float16 or float32 weights of this model, or a GGUF file"
        )


def _refuse_uncomputed(config: Mapping[str, Any]) -> None:
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise ValueError(f"config key {key}={value!r} is not supported: it changes what the model computes")
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if others:
        raise ValueError(f"layer_types {', '.join(others)} not supported for a target: full_attention only")


def _check_heads(heads: int, kv_heads: int, head_dim: int, hidden: int, head_dim_given: bool) -> None:
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if not head_dim_given and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads} and head_dim is absent")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates pairs")


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config has no '{key}'")
    return config[key]


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config key {key}={value!r} must be a positive whole number")
    return value


def _optional_id(value: Any) -> int | None:
    """A token id; some configs write a list of one."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every stop id that either file names, each once, generation_config.json first."""
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in found))
