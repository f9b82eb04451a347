# Owns: parity of the draft network with the public reference, and its visibility rule.
# Promises: every stored pass of both checkpoints is replayed from the loader's own weights.
# Never: tests acceptance (test_train.py and the benchmark do).
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.models.dflash import DFlash, visible
from ratoon.models.layers import Apart
from ratoon.models.weights import load_drafter

PARITY = Path(__file__).parents[1] / "data" / "parity" / "drafter"
CHECKPOINTS = ("full_b16", "swa_causal_b16")
SINGLE = ("ctx00", "ctx05", "ctx20", "ctx40")


def target_config() -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "eos_token_id": 1,
        }
    )


class Cache(Apart):
    """The smallest `Attend`: one row, a growing context, the block thrown away."""

    def __init__(self, model: DFlash) -> None:
        super().__init__(self._dense)
        self.config = model.config
        self.keys = [torch.zeros(0, self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers
        self.values = list(self.keys)
        self.position = torch.zeros(0, dtype=torch.long)
        self.block_position = self.position

    def append(self, k_LNKD: Tensor, v_LNKD: Tensor, position: Tensor) -> None:
        self.keys = [torch.cat(pair) for pair in zip(self.keys, k_LNKD, strict=True)]
        self.values = [torch.cat(pair) for pair in zip(self.values, v_LNKD, strict=True)]
        self.position = torch.cat((self.position, position))

    def _dense(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, values = torch.cat((self.keys[layer], k_TKD)), torch.cat((self.values[layer], v_TKD))
        k_pos = torch.cat((self.position, self.block_position))
        mask = visible(self.block_position[:, None], k_pos, self.config.windows[layer], self.config.causal[layer])
        groups = self.config.num_heads // self.config.num_kv_heads
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        score = torch.einsum("tnd,snd->nts", q_TND, keys) * self.config.head_dim**-0.5
        return torch.einsum("nts,snd->tnd", score.masked_fill(~mask, float("-inf")).softmax(-1), values)


def run_pass(model: DFlash, cache: Cache, taps: Tensor, start: int, anchor: Tensor, embed: Tensor) -> dict[str, Tensor]:
    position = torch.arange(start - taps.shape[0], start)
    feature = model.context_feature(taps)
    cache.append(*model.context_kv(feature, position), position)
    size = model.config.block_size
    cache.block_position = torch.arange(start, start + size)
    hidden = model(model.block_embeddings(embed, anchor, size), cache.block_position, cache)
    return {"context_feature": feature, "hidden": hidden}


def check(model: DFlash, cache: Cache, cases: dict[str, Tensor], name: str, target: dict[str, Tensor]) -> None:
    got = run_pass(
        model,
        cache,
        cases[f"{name}.taps"],
        int(cases[f"{name}.start"]),
        cases[f"{name}.anchor"],
        target["model.embed_tokens.weight"],
    )
    head = target["lm_head.weight"]
    got["logits"] = model.logits(got["hidden"][model.config.first_prediction :], lambda h: h @ head.t())
    for key, value in got.items():
        torch.testing.assert_close(value, cases[f"{name}.{key}"], rtol=0, atol=2e-5)
    assert torch.equal(got["logits"].argmax(-1), cases[f"{name}.logits"].argmax(-1))


@pytest.fixture(scope="module")
def target() -> dict[str, Tensor]:
    return load_file(PARITY / "target.safetensors")


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@torch.inference_mode()
def test_parity_single(checkpoint: str, target: dict[str, Tensor]) -> None:
    model = load_drafter(PARITY / checkpoint, torch.float32, torch.device("cpu"), target_config())
    cases = load_file(PARITY / checkpoint / "cases.safetensors")
    for name in SINGLE:
        check(model, Cache(model), cases, name, target)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@torch.inference_mode()
def test_parity_rounds_share_one_cache(checkpoint: str, target: dict[str, Tensor]) -> None:
    model = load_drafter(PARITY / checkpoint, torch.float32, torch.device("cpu"), target_config())
    cases = load_file(PARITY / checkpoint / "cases.safetensors")
    cache = Cache(model)
    for name in ("rounds.0", "rounds.1", "rounds.2"):
        check(model, cache, cases, name, target)


@torch.inference_mode()
def test_parity_notices_a_wrong_mask(target: dict[str, Tensor]) -> None:
    """The stored passes tell full from causal from windowed: a silent mask error cannot hide."""
    folder = PARITY / "swa_causal_b16"
    cases = load_file(folder / "cases.safetensors")
    for change in ({"windows": (None,) * 3}, {"causal": (False,) * 3}, {"windows": (13, 13, None)}):
        model = load_drafter(folder, torch.float32, torch.device("cpu"), target_config())
        model.config = dataclasses.replace(model.config, **change)
        with pytest.raises(AssertionError):
            check(model, Cache(model), cases, "ctx20", target)


@pytest.mark.parametrize("window", [None, 1, 3, 12, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_is_the_rule(window: int | None, causal: bool) -> None:
    got = visible(torch.arange(20)[:, None], torch.arange(20), window, causal)
    for q in range(20):
        for k in range(20):
            seen = (not causal or k <= q) and (window is None or (q - k < window and (causal or k - q < window)))
            assert bool(got[q, k]) == seen, (q, k)


def small_config(**changes: object) -> DrafterConfig:
    read = DrafterConfig.from_hf(json.loads((PARITY / "full_b16" / "config.json").read_text()))
    return dataclasses.replace(read, **changes)  # type: ignore[arg-type]


def test_block_embeddings_use_scale_and_mask_row() -> None:
    embed = torch.randn(512, 64)
    anchor = torch.tensor([3, 7])
    model = DFlash(small_config(input_embedding_scale=2.0))
    x = model.block_embeddings(embed, anchor, 4).reshape(2, 4, 64)
    torch.testing.assert_close(x[:, 0], embed[anchor] * 2)
    torch.testing.assert_close(x[:, 1:], (embed[511] * 2).expand(2, 3, -1))
    row = torch.randn(64)
    model.set_mask_embedding(row)
    torch.testing.assert_close(model.block_embeddings(embed, anchor, 4).reshape(2, 4, 64)[1, 3], row * 2)
    with pytest.raises(ValueError, match="mask_embedding"):
        model.set_mask_embedding(torch.randn(63))


def test_logits_multiplier_then_softcap() -> None:
    model = DFlash(small_config(output_multiplier=0.5, final_logit_softcapping=3.0))
    hidden, head = torch.randn(4, 64), torch.randn(512, 64)
    want = 3.0 * torch.tanh(hidden @ head.T * 0.5 / 3.0)
    torch.testing.assert_close(model.logits(hidden, lambda h: h @ head.t()), want)


def test_frequencies_survive_a_cast() -> None:
    model = DFlash(small_config())
    before = model.rotary.inv_freq.clone()
    assert torch.equal(model.to(torch.bfloat16).rotary.inv_freq, before)
    assert model.rotary.inv_freq.dtype == torch.float32
