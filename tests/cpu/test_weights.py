# Owns: the rule tables and the files behind them: what fills what, and each way a checkpoint can be wrong.
# Promises: one clear error per fault, naming the tensor or file.
# Never: tests what the networks compute (test_decoder.py, test_dflash.py).
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.core.config import ModelConfig
from ratoon.models.decoder import Decoder
from ratoon.models.weights import INT8_QUANTIZATION, TARGET_RULES, expand, load_config, load_drafter, load_model
from tests.cpu import tiny

PARITY = Path(__file__).parent.parent / "data" / "parity" / "drafter"
CPU = torch.device("cpu")


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Rewrites model.safetensors after `change` has worked on its dict."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.make("qwen2"), tmp_path / "model")


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["own_head", "tied"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_table_names_exactly_hugging_faces_parameters(architecture: str, tied: bool) -> None:
    oracle = tiny.make(architecture, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(oracle.config.to_dict()))
    assert expand(model, TARGET_RULES).keys() == dict(oracle.named_parameters()).keys()


def test_fused_rows_are_query_key_value_and_gate_up(folder: Path) -> None:
    raw, model = load_file(folder / "model.safetensors"), load_model(folder, torch.float32)
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        expected = torch.cat([raw[f"{prefix}.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(model.get_parameter(f"layers.1.self_attn.qkv_proj.{kind}"), expected)
    expected = torch.cat([raw[f"model.layers.3.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(model.get_parameter("layers.3.mlp.gate_up_proj.weight"), expected)


def test_every_parameter_has_the_asked_dtype_and_the_default_dtype_is_put_back(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rotary.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert not model.training


# -- targets: files ----------------------------------------------------------------------------------------------------


def shard(folder: Path) -> Path:
    """The same checkpoint in several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, folder / file)
        weight_map |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def test_sharded_equals_single(folder: Path) -> None:
    single = load_model(folder, torch.float32)
    assert same(load_model(shard(folder), torch.float32), single)


def test_missing_shard_is_named_before_anything_is_read(folder: Path) -> None:
    (shard(folder) / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError, match=r"missing shard model-00002-of-00003\.safetensors"):
        load_model(folder, torch.float32)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = sorted(shard(folder).glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    with pytest.raises(ValueError, match=f"{name} appears twice"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("keep", [4, 200, -16], ids=["length", "header", "data"])
def test_truncated_file_is_one_clear_message(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short"):
        load_model(folder, torch.float32)


def test_missing_things_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model"):
        load_model(tmp_path / "nowhere", torch.float32)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin: pickled weights are not read"):
        load_model(folder, torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_model(folder, torch.float32)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_model(folder, torch.float32)


def test_stop_ids_of_generation_config_are_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert load_config(folder).eos_ids == (9, 2)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_ids == (2,)


# -- targets: tensors --------------------------------------------------------------------------------------------------


def test_missing_tensors_are_named(folder: Path) -> None:
    edit(folder, lambda t: t.pop("model.layers.2.self_attn.k_proj.bias"))
    with pytest.raises(ValueError, match=r"missing tensor model\.layers\.2\.self_attn\.k_proj\.bias$"):
        load_model(folder, torch.float32)


def test_a_tensor_without_a_place_is_refused(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"unused tensor model\.layers\.0\.self_attn\.o_proj\.bias \[64\]"):
        load_model(folder, torch.float32)


def test_shape_mismatch_names_tensor_and_both_shapes(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(31, 64)}))
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \[31, 64\], the config asks for \[32, 64\]"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_tensors_are_refused_though_the_config_is_silent(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} has dtype {dtype}"):
        load_model(folder, torch.float32)


def test_the_head_of_a_tied_model_and_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    folder = tiny.save(tiny.make("llama", tie_word_embeddings=True), tmp_path)
    before = load_model(folder, torch.float32)
    extra = {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert same(load_model(edit(folder, lambda t: t.update(extra)), torch.float32), before)


def test_the_head_of_an_untied_model_is_no_optional_tensor(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"missing tensor lm_head\.weight"):
        load_model(edit(folder, lambda t: t.pop("lm_head.weight")), torch.float32)


# -- drafters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return shutil.copytree(PARITY / "full_b16", tmp_path / "draft")


def target() -> ModelConfig:
    """What the parity drafters were made for: 12 layers, hidden 64, vocabulary 512."""
    config = ModelConfig.from_hf(tiny.make("qwen3").config.to_dict())
    return replace(config, num_layers=12, hidden_size=64, vocab_size=512)


def test_drafter_takes_every_tensor(draft: Path) -> None:
    raw, drafter = load_file(draft / "model.safetensors"), load_drafter(draft, torch.float32, CPU, target())
    assert sum(t.numel() for t in raw.values()) == sum(
        p.numel() for name, p in drafter.named_parameters() if not name.startswith("context.")
    )
    assert torch.equal(drafter.fc.weight, raw["fc.weight"])
    expected = torch.cat([raw[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(drafter.get_parameter("layers.1.self_attn.qkv_proj.weight"), expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 14, r"target of 12 layers \(num_target_layers\), this one has 14"),
        ("hidden_size", 128, "hidden_size is 64, the target's 128"),
        ("vocab_size", 513, "vocab_size is 512, the target's 513"),
    ],
)
def test_drafter_of_another_model_is_refused(draft: Path, field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafter(draft, torch.float32, CPU, replace(target(), **{field: value}))


def test_fc_that_takes_other_taps_is_refused(draft: Path) -> None:
    dflash = json.loads((draft / "config.json").read_text())["dflash_config"]
    edit_config(draft, dflash_config={**dflash, "target_layer_ids": [1, 5]})
    with pytest.raises(ValueError, match=r"fc\.weight takes 192 features, but 2 taps .* hidden_size 64 give 128"):
        load_drafter(draft, torch.float32, CPU, target())


def test_drafter_with_missing_or_unused_tensors_is_refused(draft: Path) -> None:
    edit(draft, lambda t: t.update({"layers.0.self_attn.sinks": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"unused tensor layers\.0\.self_attn\.sinks"):
        load_drafter(draft, torch.float32, CPU, target())
    edit(draft, lambda t: (t.pop("layers.0.self_attn.sinks"), t.pop("hidden_norm.weight")))
    with pytest.raises(ValueError, match=r"missing tensor hidden_norm\.weight"):
        load_drafter(draft, torch.float32, CPU, target())


def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """8-bit symmetric per row in place; returns what a reader should get back."""
    expected = {}
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.bfloat16()
        expected[name] = tensors[name].float() * scale.bfloat16().float()
    return expected


def test_8_bit_drafter_is_dequantised_row_by_row(draft: Path) -> None:
    expected: dict[str, Tensor] = {}
    edit(edit_config(draft, quantization_config=INT8_QUANTIZATION), lambda t: expected.update(quantise(t)))
    drafter = load_drafter(draft, torch.float32, CPU, target())
    assert torch.equal(drafter.fc.weight, expected["fc.weight"])
    assert torch.equal(
        drafter.get_parameter("layers.0.mlp.down_proj.weight"), expected["layers.0.mlp.down_proj.weight"]
    )


def test_8_bit_weights_need_their_scales_and_the_config_that_says_so(draft: Path) -> None:
    edit(draft, quantise)
    with pytest.raises(ValueError, match=r"fc\.weight has dtype torch\.int8"):
        load_drafter(draft, torch.float32, CPU, target())
    edit_config(draft, quantization_config=INT8_QUANTIZATION)
    edit(draft, lambda t: t.update({"fc.weight_scale": t["fc.weight_scale"].squeeze(1)}))
    with pytest.raises(ValueError, match=r"fc\.weight_scale has shape \[64\], not \[64, 1\]"):
        load_drafter(draft, torch.float32, CPU, target())
    edit(draft, lambda t: t.pop("fc.weight_scale"))
    with pytest.raises(ValueError, match=r"missing tensor fc\.weight_scale"):
        load_drafter(draft, torch.float32, CPU, target())
    edit(draft, lambda t: t.update({"norm.weight_scale": torch.ones(64, 1), "fc.weight": torch.zeros(64, 192)}))
    with pytest.raises(ValueError, match=r"unused tensor norm\.weight_scale"):
        load_drafter(draft, torch.float32, CPU, target())


def _group(activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = INT8_QUANTIZATION["config_groups"]["group_0"]
    changed = {**group, "weights": {**group["weights"], **weights}, "input_activations": activations}
    return {**INT8_QUANTIZATION, "config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantised with 'awq'"),
        ({**INT8_QUANTIZATION, "format": "pack-quantized"}, "pack-quantized"),
        (_group(num_bits=4), "num_bits"),
        (_group(symmetric=False), "symmetric"),
        (_group(strategy="group"), "strategy"),
        (_group(activations={"num_bits": 8}), "input_activations"),
        ({**INT8_QUANTIZATION, "config_groups": {}}, "config_groups"),
    ],
)
def test_other_drafter_quantisations_are_refused_by_name(draft: Path, settings: dict[str, Any], message: str) -> None:
    edit(edit_config(draft, quantization_config=settings), quantise)
    with pytest.raises(ValueError, match=message):
        load_drafter(draft, torch.float32, CPU, target())


def test_mask_embedding_is_taken_from_its_file(draft: Path) -> None:
    assert load_drafter(draft, torch.float32, CPU, target()).mask_embedding is None
    row = torch.randn(64)
    for stored in (row, row[None], {"mask_embedding": row}):
        torch.save(stored, draft / "mask_embedding.pt")
        taken = load_drafter(draft, torch.float32, CPU, target()).mask_embedding
        assert taken is not None and torch.equal(taken, row)


def test_bad_mask_embeddings_are_refused(draft: Path) -> None:
    file = draft / "mask_embedding.pt"
    for stored, message in ((torch.zeros(63), "shape"), ([1.0], "holds list"), (Path("x"), "not a plain torch tensor")):
        torch.save(stored, file)
        with pytest.raises(ValueError, match=message):
            load_drafter(draft, torch.float32, CPU, target())
    file.write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match="not a plain torch tensor"):
        load_drafter(draft, torch.float32, CPU, target())
