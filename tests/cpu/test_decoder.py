# Owns: the target network against Hugging Face's, in float32.
# Promises: logits and taps within 1e-4, for each architecture and rope kind.
# Never: shares code with the oracle.
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.models.decoder import Decoder, check_tap_ids
from ratoon.models.layers import RMSNorm
from ratoon.models.weights import load_model
from tests.cpu import tiny
from tests.dense import DenseCausal

BOUND = 1e-4
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
        "truncate": False,
    },
}


def run(model: Decoder, ids_T: torch.Tensor, position_T: torch.Tensor | None = None, taps: tuple[int, ...] = ()):
    positions = torch.arange(ids_T.shape[0]) if position_T is None else position_T
    with torch.no_grad():
        h_TH, taps_TX = model(ids_T, positions, DenseCausal(model.config.num_layers), taps)
        return model.logits(h_TH), taps_TX


@pytest.mark.parametrize("tied", [False, True], ids=["own_head", "tied"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_logits_and_taps_equal_hugging_face(architecture: str, tied: bool, tmp_path: Path) -> None:
    oracle = tiny.make(architecture, tie_word_embeddings=tied)
    model = load_model(tiny.save(oracle, tmp_path), torch.float32)
    ids_T = tiny.ids(33)
    with torch.no_grad():
        expected = oracle(ids_T[None], output_hidden_states=True)
    logits_TV, taps_TX = run(model, ids_T, taps=(2, 0))
    assert logits_TV.dtype == torch.float32
    assert (logits_TV - expected.logits[0]).abs().max() < BOUND
    # hidden_states[0] is the embedding, so the stream after layer i is entry i + 1; the list order is kept.
    after_2, after_0 = taps_TX.chunk(2, dim=-1)
    assert (after_2 - expected.hidden_states[3][0]).abs().max() < BOUND
    assert (after_0 - expected.hidden_states[1][0]).abs().max() < BOUND
    assert (model.head_weight is model.embed.weight) == tied


@pytest.mark.parametrize("old_keys", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_kinds_equal_hugging_face(kind: str, old_keys: bool, tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 5000.0, **ROPE_KINDS[kind]}
    oracle = tiny.make("llama", rope_parameters=parameters, max_position_embeddings=256)
    tiny.save(oracle, tmp_path)
    if old_keys:
        config = json.loads((tmp_path / "config.json").read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = None if kind == "default" else scaling
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, torch.float32)
    ids_T = tiny.ids(24)
    position_T = torch.arange(24) * 10 + 5
    with torch.no_grad():
        expected = oracle(ids_T[None], position_ids=position_T[None]).logits[0]
    assert (run(model, ids_T, position_T)[0] - expected).abs().max() < BOUND


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_token_by_token_equals_one_pass(architecture: str, prepared: bool, tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.make(architecture), tmp_path), torch.float32)
    for index, weight in enumerate(module.weight for module in model.modules() if isinstance(module, RMSNorm)):
        weight.data = 0.5 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(index))
    ids_T = tiny.ids(12)
    whole_TV, _ = run(model, ids_T)
    if prepared:
        model.prepare()
    attend = DenseCausal(model.config.num_layers)
    with torch.no_grad():
        for start, stop in [(0, 5), *((i, i + 1) for i in range(5, 12))]:
            h_TH, _ = model(ids_T[start:stop], torch.arange(start, stop), attend)
            assert (model.logits(h_TH) - whole_TV[start:stop]).abs().max() < BOUND
    assert attend.length == 12


def test_the_last_layer_and_ids_outside_are_no_taps(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.make("llama"), tmp_path), torch.float32)
    for tap in (tiny.LAYERS - 1, -1, tiny.LAYERS):
        with pytest.raises(ValueError, match=f"layer {tap} refused"):
            run(model, tiny.ids(3), taps=(0, tap))
    check_tap_ids((0, tiny.LAYERS - 2), tiny.LAYERS)


def test_rescore_is_exact_and_independent_of_the_other_rows(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.make("qwen2"), tmp_path), torch.bfloat16)
    h_TH = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    token_TK = tiny.ids(35).view(7, 5)
    scored_TK = model.rescore(h_TH, token_TK)
    exact_TV = h_TH.double() @ model.head_weight.double().t()
    assert scored_TK.dtype == torch.float32
    assert (scored_TK - exact_TV.gather(1, token_TK)).abs().max() < 1e-5
    assert torch.equal(model.rescore(h_TH[3:4], token_TK[3:4]), scored_TK[3:4])


def test_bfloat16_logits_are_float32_near_the_exact_ones(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.make("llama"), tmp_path), torch.bfloat16)
    h_TH = torch.randn(4, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits_TV = model.logits(h_TH)
    exact_TV = h_TH.double() @ model.head_weight.double().t()
    assert logits_TV.dtype == torch.float32
    assert ((logits_TV - exact_TV).abs() <= exact_TV.abs() * 2**-8 + 1e-6).all()


def test_frequencies_stay_float32_through_casts_and_meta(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.make("llama"), tmp_path), torch.float32)
    before = model.rotary.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(model.rotary.inv_freq, before)
    with torch.device("meta"):
        empty = Decoder(model.config)
    assert torch.equal(empty.to_empty(device="cpu").rotary.inv_freq, before)
    assert "rotary.inv_freq" not in model.state_dict()


def test_forward_makes_cos_and_sin_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny.save(tiny.make("llama"), tmp_path), torch.float32)
    calls: list[int] = []
    original = model.rotary.forward
    monkeypatch.setattr(model.rotary, "forward", lambda *args: calls.append(1) or original(*args))
    run(model, tiny.ids(3))
    assert len(calls) == 1
