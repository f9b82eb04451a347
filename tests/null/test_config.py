# Owns: what core/config.py reads and refuses.
# Promises: configs as the public checkpoints write them.
# Never: imports torch.
from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN2: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias", "pretraining_tp")},
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "layer_types": ["full_attention"] * 30,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def test_llama() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.architecture, config.qkv_bias, config.qk_norm) == ("llama", False, False)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rms_norm_eps, config.max_position, config.rope.theta) == (1e-5, 8192, 100000.0)
    assert (config.tie_embeddings, config.eos_ids, config.bos_id) == (True, (2,), 1)


def test_qwen2_has_qkv_bias_and_qwen3_has_head_norms_and_its_own_head_dim() -> None:
    qwen2, qwen3 = ModelConfig.from_hf(QWEN2), ModelConfig.from_hf(QWEN3)
    assert (qwen2.architecture, qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == ("qwen2", True, False, 64)
    assert (qwen3.architecture, qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == ("qwen3", False, True, 128)
    assert not qwen3.tie_embeddings


def test_absent_kv_heads_mean_one_per_query_head_and_absent_tie_means_own_head() -> None:
    absent = ("num_key_value_heads", "tie_word_embeddings")
    config = ModelConfig.from_hf({key: value for key, value in LLAMA.items() if key not in absent})
    assert (config.num_kv_heads, config.tie_embeddings) == (9, False)


def test_rope_parameters_and_rope_scaling_say_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})
    new = ModelConfig.from_hf(
        {**{k: v for k, v in LLAMA.items() if k != "rope_theta"}, "rope_parameters": {**scaling, "rope_theta": 100000}}
    )
    assert old == new
    assert (old.rope.kind, old.rope.factor, old.rope.theta) == ("linear", 4.0, 100000.0)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, {}, (2,)),
        (None, {}, ()),
        (151645, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        ([5, 6], {"eos_token_id": 7}, (7, 5, 6)),
        (0, {"eos_token_id": None}, (0,)),
    ],
)
def test_stop_ids_come_from_both_files(own: Any, generation: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": own}, generation).eos_ids == expected


def test_absent_bos_is_none_and_zero_is_a_token() -> None:
    assert ModelConfig.from_hf({**LLAMA, "bos_token_id": None}).bos_id is None
    assert ModelConfig.from_hf({**LLAMA, "bos_token_id": 0}).bos_id == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("num_experts", 128),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.22),
        ("no_rope_layers", [1, 0]),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_key_that_changes_the_computation_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_hf({**QWEN3, key: value})


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantised_targets_are_refused_by_method(method: str) -> None:
    with pytest.raises(ValueError, match=f"'{method}'"):
        ModelConfig.from_hf({**LLAMA, "quantization_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize("names", [["MistralForCausalLM"], [], None])
def test_unknown_architecture_lists_what_is_supported(names: list[str] | None) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM") as error:
        ModelConfig.from_hf({**LLAMA, "architectures": names})
    assert names is None or not names or names[0] in str(error.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"no '{key}'"):
        ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "multiple of num_key_value_heads"),
        ({"hidden_size": 577}, "multiple of num_attention_heads"),
        ({"head_dim": 63}, "odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})
