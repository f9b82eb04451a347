# Owns: what a DFlash checkpoint's config.json says, read or refused (METHOD section 2).
# Promises: every key that changes the computation ends in a field here or in an error that names it.
# Never: reads a tensor or a file.
"""DFlash drafter settings: taps, block, windows, causality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.core.rope import RopeConfig

ARCHITECTURE = "DFlashDraftModel"
_REFUSED_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash2",
    "DSparkDraftModel": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    "DominoDraftModel": "Domino",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_DFLASH_KEYS = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "num_target_layers",
    "causal",
    "use_swa",
    "swa_window_size",
    "anchor_first",
    "shift_label",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
_BODY_KEYS = {
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "is_causal",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "dflash_config",
    "quantization_config",
    "speculators_model_type",
    "speculators_config",
    "speculators_version",
}
# Keys of a Hugging Face config that leave the drafter's forward pass as it is.
_NEUTRAL_KEYS = {
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "auto_map",
    "attention_dropout",
    "initializer_range",
    "max_window_layers",
    "tie_word_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "name_or_path",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "torchscript",
    "pruned_heads",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "is_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "pretraining_tp",
    "target_model",
    "target_model_name_or_path",
    "license",
}


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tap ids (0-based, the stream after that layer) of a checkpoint that names none.

    Evenly spread over 1 .. N-3, halves rounded to even; the middle layer for one draft layer.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash v1 drafter. `windows` and `causal` hold one entry per draft layer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    anchor_first: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_target_layers: int | None = None
    attention_bias: bool = False

    @property
    def num_drafts(self) -> int:
        """Tokens that one draft pass predicts."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def first_prediction(self) -> int:
        """First block position whose output is a prediction."""
        return 0 if self.anchor_first else 1

    @property
    def tap_size(self) -> int:
        """Width of the concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Reads a z-lab `config.json`; `dflash_config` first, then the top level.

        Raises ValueError naming the key or the format for anything that we do not compute.
        """
        _refuse_other_formats(config)
        nested = dict(config.get("dflash_config") or {})
        _refuse_unknown(config, nested)
        num_layers = int(_required(config, nested, "num_hidden_layers"))
        hidden = int(_required(config, nested, "hidden_size"))
        num_heads = int(_required(config, nested, "num_attention_heads"))
        num_target = _read(config, nested, "num_target_layers")
        num_target = None if num_target is None else int(num_target)
        layer_types = _layer_types(config, num_layers)
        softcap = _read(config, nested, "final_logit_softcapping")
        built = cls(
            hidden_size=hidden,
            intermediate_size=int(_required(config, nested, "intermediate_size")),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden // num_heads),
            rms_norm_eps=float(_required(config, nested, "rms_norm_eps")),
            rope=RopeConfig.from_hf(config),
            vocab_size=int(_required(config, nested, "vocab_size")),
            block_size=_block_size(config, nested),
            target_layer_ids=_taps(config, nested, num_target, num_layers),
            mask_token_id=int(_required(config, nested, "mask_token_id")),
            windows=_windows(config, nested, layer_types),
            causal=_causal(config, nested, layer_types),
            anchor_first=_anchor_first(config, nested),
            input_embedding_scale=float(_first(_read(config, nested, "input_embedding_scale"), 1.0)),
            output_multiplier=float(_first(_read(config, nested, "output_multiplier"), 1.0)),
            final_logit_softcapping=None if softcap is None else float(softcap),
            num_target_layers=num_target,
            attention_bias=bool(config.get("attention_bias", False)),
        )
        built._check()
        return built

    def _check(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_hidden_layers must be at least 1, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(f"final_logit_softcapping must be positive, got {self.final_logit_softcapping}")

    def require_target(self, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError, naming the quantity, when this drafter belongs to another target."""
        if self.num_target_layers is not None and self.num_target_layers != num_layers:
            raise ValueError(
                f"the drafter was made for a target of {self.num_target_layers} layers (num_target_layers), "
                f"this one has {num_layers}: use the drafter of this model"
            )
        if self.hidden_size != hidden_size:
            raise ValueError(f"the drafter's hidden_size is {self.hidden_size}, the target's {hidden_size}")
        if self.vocab_size != vocab_size:
            raise ValueError(f"the drafter's vocab_size is {self.vocab_size}, the target's {vocab_size}")
        _check_taps(self.target_layer_ids, num_layers)

    def to_hf(self) -> dict[str, Any]:
        """The z-lab `config.json` that `from_hf` reads back to this value (default or linear RoPE)."""
        if self.rope.kind not in ("default", "linear"):
            raise ValueError(f"rope scaling '{self.rope.kind}' is not written by the exporter")
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": None
            if self.rope.kind == "default"
            else {"rope_type": self.rope.kind, "factor": self.rope.factor},
            "max_position_embeddings": self.rope.original_max_position,
            "vocab_size": self.vocab_size,
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": False,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": self._dflash_keys(),
            **self._attention_keys(),
        }

    def _attention_keys(self) -> dict[str, Any]:
        windows = set(self.windows) - {None}
        if len(windows) > 1:
            raise ValueError(f"config.json holds one sliding window, not {sorted(w for w in windows if w)}")
        if len(set(self.causal)) > 1:
            natural = tuple(window is not None for window in self.windows)
            if self.causal != natural:
                raise ValueError("config.json cannot say: causality that differs by layer and not by window")
        keys: dict[str, Any] = {
            "layer_types": [_LAYER_TYPES[window is not None] for window in self.windows],
            "sliding_window": next(iter(windows), None),
            "use_sliding_window": bool(windows),
        }
        if len(set(self.causal)) == 1:
            keys["is_causal"] = self.causal[0]
        return keys

    def _dflash_keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
        }
        if self.anchor_first:
            keys["anchor_first"] = True
        if self.input_embedding_scale != 1.0:
            keys["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            keys["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            keys["final_logit_softcapping"] = self.final_logit_softcapping
        return keys


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    value = nested.get(key)
    return config.get(key) if value is None else value


def _required(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    value = _read(config, nested, key)
    if value is None:
        raise ValueError(f"the drafter's config.json has no '{key}'")
    return value


def _refuse_other_formats(config: Mapping[str, Any]) -> None:
    for key in ("speculators_model_type", "speculators_config", "speculators_version"):
        if config.get(key) is not None:
            raise ValueError(
                f"this drafter is in the speculators format ('{key}'), which is not supported: "
                "convert it to the z-lab layout (tap ids are one lower there)"
            )
    architectures = list(config.get("architectures") or [])
    for name in architectures:
        if name in _REFUSED_ARCHITECTURES:
            raise ValueError(f"{_REFUSED_ARCHITECTURES[name]} drafters ({name}) are not supported: use a DFlash v1 one")
    if architectures != [ARCHITECTURE]:
        found = ", ".join(map(str, architectures)) or "none"
        raise ValueError(f"architectures: {found}; a DFlash drafter says {ARCHITECTURE}")


def _refuse_unknown(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    unknown = sorted(key for key in nested if key not in _DFLASH_KEYS and not key.startswith("_"))
    if unknown:
        raise ValueError(f"dflash_config has keys that nobody reads: {unknown}")
    known = _BODY_KEYS | _DFLASH_KEYS | _NEUTRAL_KEYS
    unknown = sorted(k for k, v in config.items() if k not in known and not k.startswith("_") and v is not None)
    if unknown:
        raise ValueError(f"the drafter's config.json has keys that nobody reads: {unknown}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act '{config['hidden_act']}' is not supported: DFlash layers use silu")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported in a DFlash drafter")


def _block_size(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    size = _read(config, nested, "block_size")
    if size is None:
        raise ValueError("block_size is in neither dflash_config nor the top level: it cannot be guessed")
    if int(size) < 2:
        raise ValueError(f"block_size must be at least 2, got {size}")
    return int(size)


def _taps(
    config: Mapping[str, Any], nested: Mapping[str, Any], num_target: int | None, num_layers: int
) -> tuple[int, ...]:
    ids = _read(config, nested, "target_layer_ids")
    if ids is not None:
        taps = tuple(int(tap) for tap in ids)
    elif num_target is not None:
        taps = default_target_layer_ids(num_target, num_layers)
    else:
        raise ValueError("target_layer_ids and num_target_layers are both absent: the taps cannot be known")
    if not taps:
        raise ValueError("target_layer_ids is empty")
    _check_taps(taps, num_target)
    return taps


def _check_taps(taps: Sequence[int], num_target: int | None) -> None:
    for tap in taps:
        if tap == -1 or (num_target is not None and tap == num_target - 1):
            raise ValueError(
                f"target_layer_ids: {tap} is the last layer, whose stored output is already normed; "
                "a tap must be an earlier layer"
            )
        if tap < 0 or (num_target is not None and tap >= num_target):
            raise ValueError(f"target_layer_ids: {tap} is not a layer of the target")


def _layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    types = tuple(config.get("layer_types") or ("full_attention",) * num_layers)
    unknown = sorted(set(types) - set(_LAYER_TYPES))
    if unknown:
        raise ValueError(f"layer_types: {unknown[0]} is not supported (known: {', '.join(_LAYER_TYPES)})")
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {num_layers}")
    return types


def _windows(
    config: Mapping[str, Any], nested: Mapping[str, Any], layer_types: Sequence[str]
) -> tuple[int | None, ...]:
    if _read(config, nested, "use_swa"):
        forced = int(_read(config, nested, "swa_window_size") or 0)
        if forced <= 0:
            raise ValueError(f"use_swa needs a positive swa_window_size, got {forced}")
        return (forced,) * len(layer_types)
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    window = int(config.get("sliding_window") or 0)
    if not config.get("use_sliding_window") or window <= 0:
        raise ValueError(
            "layer_types has sliding_attention, which needs use_sliding_window true and a positive sliding_window "
            f"(got {config.get('use_sliding_window')}, {config.get('sliding_window')})"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _causal(config: Mapping[str, Any], nested: Mapping[str, Any], layer_types: Sequence[str]) -> tuple[bool, ...]:
    for value in (config.get("is_causal"), nested.get("causal")):
        if value is not None:
            return (bool(value),) * len(layer_types)
    if config.get("causal") is not None:
        raise ValueError("'causal' belongs inside dflash_config (the top level says is_causal)")
    # A window forced by use_swa does not make a layer causal: the type decides, not the window.
    return tuple(kind == "sliding_attention" for kind in layer_types)


def _anchor_first(config: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    flags = [
        bool(v) for v in (_read(config, nested, "anchor_first"), _read(config, nested, "shift_label")) if v is not None
    ]
    if len(set(flags)) > 1:
        raise ValueError("anchor_first and shift_label disagree")
    return bool(flags and flags[0])
