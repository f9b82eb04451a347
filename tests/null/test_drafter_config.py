# Owns: reading a drafter's config.json: every variant of METHOD section 2 read, or refused by name.
# Promises: each refusal names the key or the format.
# Never: imports torch.
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.drafter import DrafterConfig, default_target_layer_ids

PARITY = Path(__file__).parents[1] / "data" / "parity" / "drafter"


def config(checkpoint: str = "full_b16", **changes: Any) -> dict[str, Any]:
    read = json.loads((PARITY / checkpoint / "config.json").read_text())
    nested = changes.pop("dflash_config", {})
    read.update(changes)
    read["dflash_config"] = {**read["dflash_config"], **nested}
    return {key: value for key, value in read.items() if value is not ...}


def test_full_checkpoint() -> None:
    read = DrafterConfig.from_hf(config())
    assert (read.block_size, read.num_drafts, read.first_prediction) == (16, 15, 1)
    assert read.target_layer_ids == (1, 5, 9) and read.tap_size == 192 and read.mask_token_id == 511
    assert read.windows == (None, None) and read.causal == (False, False)
    assert read.rope.theta == 1e6 and read.head_dim == 16 and read.num_target_layers == 12


def test_sliding_layers_are_causal_by_type() -> None:
    read = DrafterConfig.from_hf(config("swa_causal_b16"))
    assert read.windows == (12, 12, None) and read.causal == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({"is_causal": False}, (12, 12, None), (False,) * 3),
        ({"is_causal": True}, (12, 12, None), (True,) * 3),
        ({"dflash_config": {"causal": True}}, (12, 12, None), (True,) * 3),
        ({"is_causal": False, "dflash_config": {"causal": True}}, (12, 12, None), (False,) * 3),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 20}}, (20,) * 3, (True, True, False)),
        ({"dflash_config": {"use_swa": False, "swa_window_size": 20}}, (12, 12, None), (True, True, False)),
        ({"layer_types": ..., "use_sliding_window": False}, (None,) * 3, (False,) * 3),
    ],
)
def test_causality_and_windows(changes: dict[str, Any], windows: tuple, causal: tuple) -> None:
    read = DrafterConfig.from_hf(config("swa_causal_b16", **changes))
    assert read.windows == windows and read.causal == causal


def test_forced_window_leaves_full_layers_bidirectional() -> None:
    read = DrafterConfig.from_hf(config(dflash_config={"use_swa": True, "swa_window_size": 7}))
    assert read.windows == (7, 7) and read.causal == (False, False)


def test_nested_block_size_wins() -> None:
    assert DrafterConfig.from_hf(config(dflash_config={"block_size": 8})).block_size == 8
    assert DrafterConfig.from_hf(config(block_size=..., dflash_config={"block_size": 4})).num_drafts == 3


@pytest.mark.parametrize("key", ["anchor_first", "shift_label"])
def test_anchor_first_predicts_one_more(key: str) -> None:
    read = DrafterConfig.from_hf(config(dflash_config={key: True}))
    assert read.anchor_first and read.num_drafts == 16 and read.first_prediction == 0


def test_scales() -> None:
    read = DrafterConfig.from_hf(
        config(output_multiplier=0.25, dflash_config={"input_embedding_scale": 8.0, "final_logit_softcapping": 30})
    )
    assert (read.output_multiplier, read.input_embedding_scale, read.final_logit_softcapping) == (0.25, 8.0, 30.0)


def test_default_taps() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_target_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    assert default_target_layer_ids(28, 1) == (14,)
    absent = config()
    del absent["dflash_config"]["target_layer_ids"]
    assert DrafterConfig.from_hf(absent).target_layer_ids == (1, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": ...}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"dflash_config": {"target_layer_ids": [1, 11]}}, "already normed"),
        ({"dflash_config": {"target_layer_ids": [1, -1]}}, "already normed"),
        ({"num_target_layers": ..., "dflash_config": {"target_layer_ids": [1, -1]}}, "already normed"),
        ({"dflash_config": {"target_layer_ids": [12]}}, "not a layer"),
        ({"dflash_config": {"target_layer_ids": [-2]}}, "not a layer"),
        ({"dflash_config": {"target_layer_ids": []}}, "empty"),
        ({"num_target_layers": ..., "dflash_config": {"target_layer_ids": None}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id"),
        ({"dflash_config": {"use_swa": True}}, "swa_window_size"),
        ({"dflash_config": {"new_trick": 1}}, "new_trick"),
        ({"attn_logit_cap": 5.0}, "attn_logit_cap"),
        ({"causal": True}, "is_causal"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "sliding_window"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"speculators_model_type": "dflash"}, "speculators"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "DFlashDraftModel"),
        ({"architectures": ...}, "DFlashDraftModel"),
        ({"dflash_config": {"anchor_first": True, "shift_label": False}}, "disagree"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_hf(config(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((13, 64, 512), "num_target_layers"), ((12, 32, 512), "hidden_size"), ((12, 64, 513), "vocab_size")],
)
def test_another_target_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    read = DrafterConfig.from_hf(config())
    read.require_target(12, 64, 512)
    with pytest.raises(ValueError, match=message):
        read.require_target(*arguments)


@pytest.mark.parametrize("checkpoint", ["full_b16", "swa_causal_b16"])
def test_written_config_reads_back(checkpoint: str) -> None:
    read = DrafterConfig.from_hf(config(checkpoint, dflash_config={"anchor_first": True, "output_multiplier": 2.0}))
    assert DrafterConfig.from_hf(read.to_hf()) == read
