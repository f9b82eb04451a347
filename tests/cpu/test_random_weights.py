# Owns: networks of a true shape with random weights, and the shapes that are shipped for measuring.
# Promises: sizes are the published ones; weights are what was asked for, where it was asked for.
# Never: allocates a large network: their sizes are counted without memory.
"""models/random.py and benchmarks/configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.lab.gpu_bench import floor_bytes, floor_ms
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.hub import drafter_for
from ratoon.models.layers import RMSNorm
from ratoon.models.random import drafter_shape, random_decoder, random_drafter, target_shape
from tests.cpu import toy

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"


def without_memory(target: ModelConfig, drafter: DrafterConfig) -> tuple[Decoder, DFlash]:
    with torch.device("meta"):
        nets = Decoder(target).to(torch.bfloat16), DFlash(drafter).to(torch.bfloat16)
        nets[1].stack_context()
    return nets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_normal_and_norms_one(dtype: torch.dtype) -> None:
    target = random_decoder(ModelConfig.from_hf(toy.TARGET), dtype, "cpu", seed=3)
    drafter = random_drafter(toy.drafter_config(), dtype, "cpu", seed=4)
    for network in (target, drafter):
        for module in network.modules():
            for parameter in module.parameters(recurse=False):
                assert parameter.dtype == dtype and not parameter.requires_grad
                if isinstance(module, RMSNorm):
                    assert (parameter == 1).all()
                elif parameter.ndim == 2 and parameter.numel() > 500 and parameter.shape[1] > 8:
                    assert float(parameter.float().std()) == pytest.approx(0.02, rel=0.15)
                    assert abs(float(parameter.float().mean())) < 0.004
    assert drafter.context is not None and torch.isfinite(drafter.context.proj.weight).all()
    attention: Any = drafter.layers[0].self_attn
    assert torch.equal(drafter.context.proj.weight[:4], attention.qkv_proj.weight[attention.kv_rows][:4])


def test_a_seed_fixes_the_weights() -> None:
    config = ModelConfig.from_hf(toy.TARGET)
    same = [random_decoder(config, torch.float32, "cpu", seed) for seed in (5, 5, 6)]
    first, second, other = ([p.clone() for p in net.parameters()] for net in same)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    matrices = [p for p in first if p.ndim == 2]
    assert not torch.equal(matrices[1][:4, :4], matrices[2][:4, :4]), "each matrix gets noise of its own"


def test_a_shape_is_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(toy.TARGET))
    assert target_shape(tmp_path) == target_shape(tmp_path / "config.json") == ModelConfig.from_hf(toy.TARGET)
    with pytest.raises(FileNotFoundError, match=r"no other\.json"):
        target_shape(tmp_path / "other.json")
    with pytest.raises(ValueError, match="DFlashDraftModel"):
        drafter_shape(tmp_path)


def test_qwen3_8b_has_its_published_size() -> None:
    config, own = target_shape(CONFIGS / "qwen3-8b.json"), drafter_shape(CONFIGS / "qwen3-8b-dflash-b16.json")
    own.require_target(config.num_layers, config.hidden_size, config.vocab_size)
    assert config.qk_norm and own.target_layer_ids == (1, 9, 17, 25, 33) and own.block_size == 16
    target, drafter = without_memory(config, own)
    assert sum(p.numel() for p in target.parameters()) == pytest.approx(8.19e9, rel=0.001)
    # NUMBERS section 1: 15.1 GB of a step, 3.17 GB of the drafter's layers and head; section 4: 3.55 and 4.36 ms.
    step, drafted = floor_bytes(target, None, 1, 0), floor_bytes(target, drafter, 1, 1024)
    assert step["target"] == pytest.approx(15.13e9, rel=0.002) and step["cache"] == 0
    assert drafted["drafter"] == pytest.approx(3.17e9 + 0.25e9, rel=0.01)
    assert drafted["cache"] == 1024 * 36 * 2 * 8 * 128 * 2 and drafted["draft_cache"] == 1024 * 5 * 2 * 8 * 128 * 2
    assert floor_ms(step, 4.26e12) == pytest.approx(3.55, abs=0.01)
    without_cache = {part: size for part, size in drafted.items() if "cache" not in part}
    assert floor_ms(without_cache, 4.26e12) == pytest.approx(4.36, abs=0.01)


def test_smollm2s_shape_is_that_of_the_drafter_that_is_shipped() -> None:
    config, own = target_shape(CONFIGS / "smollm2-135m.json"), drafter_shape(CONFIGS / "smollm2-135m-dflash-b16.json")
    own.require_target(config.num_layers, config.hidden_size, config.vocab_size)
    shipped = drafter_for("smollm2")
    assert shipped is not None
    theirs = drafter_shape(shipped)
    assert own == DrafterConfig(**{**vars(theirs), "rms_norm_eps": own.rms_norm_eps})
    assert own.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    target, drafter = without_memory(config, own)
    # Tied: the table is read once as the head.
    assert floor_bytes(target, None, 1, 0)["target"] == pytest.approx(0.269e9, rel=0.002)
    assert floor_bytes(target, drafter, 1, 0)["drafter"] > 2 * 49152 * 576
