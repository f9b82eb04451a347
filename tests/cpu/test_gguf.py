# Owns: GGUF files as targets and tokenizers, against Hugging Face models of the same values.
# Promises: each architecture, several quantisations, every refusal by name.
# Never: needs a file that is not written here (test_smollm2.py reads the real one).
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from transformers import Qwen2Tokenizer

from ratoon.models.gguf import open_gguf
from ratoon.models.weights import load_config, load_model
from tests.cpu import gguf_files, tiny
from tests.dense import DenseCausal

Kind = gguf.GGMLQuantizationType


def check_against(oracle: Any, path: Path) -> None:
    model = load_model(path, torch.float32)
    ids_T = tiny.ids(19)
    with torch.no_grad():
        h_TH, _ = model(ids_T, torch.arange(19), DenseCausal(model.config.num_layers))
        difference = model.logits(h_TH) - oracle(ids_T[None]).logits[0]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_logits_equal_a_hugging_face_model_of_the_same_values(
    architecture: str, kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    oracle = tiny.make(architecture)
    check_against(oracle, gguf_files.write(tmp_path / "m.gguf", oracle, kind))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_config(architecture: str, tmp_path: Path) -> None:
    oracle = tiny.make(architecture, tie_word_embeddings=True, rope_parameters={"rope_theta": 5000.0})
    config = load_config(gguf_files.write(tmp_path / "m.gguf", oracle))
    assert (config.architecture, config.vocab_size, config.hidden_size) == (architecture, tiny.VOCAB, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (tiny.LAYERS, 4, 2)
    assert (config.head_dim, config.intermediate_size) == (32 if architecture == "qwen3" else 16, 96)
    assert (config.max_position, config.rope.theta, config.rope.kind) == (512, 5000.0, "default")
    assert (config.tie_embeddings, config.eos_ids, config.bos_id) == (True, (2,), 0)
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_a_file_with_output_weight_has_its_own_head(tmp_path: Path) -> None:
    oracle = tiny.make("qwen2", tie_word_embeddings=True)
    path = gguf_files.write(tmp_path / "m.gguf", oracle, extra={"output.weight": np.ones((tiny.VOCAB, 64), np.float32)})
    model = load_model(path, torch.float32)
    assert not model.config.tie_embeddings
    assert torch.equal(model.head_weight, torch.ones(tiny.VOCAB, 64))
    assert torch.equal(model.embed.weight, oracle.state_dict()["model.embed_tokens.weight"])


def test_end_of_turn_is_a_stop_id_too(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("qwen2"), fields={"tokenizer.ggml.eot_token_id": 1})
    assert load_config(path).eos_ids == (2, 1)


# -- rope --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_in_metadata(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0}
    fields: dict[str, Any] = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields["qwen2.rope.scaling.original_context_length"] = 128
    oracle = tiny.make("qwen2", rope_parameters=scaling)
    path = gguf_files.write(tmp_path / "m.gguf", oracle, fields=fields)
    assert load_config(path).rope.kind == kind
    check_against(oracle, path)


def llama3_divisors(theta: float, size: int, factor: float, original: int) -> np.ndarray:
    """What convert_hf_to_gguf.py stores in rope_freqs.weight for llama3 scaling."""
    low_wave, high_wave, divisors = original / 1.0, original / 4.0, []
    for frequency in theta ** -(np.arange(0, size, 2) / size):
        wave = 2 * np.pi / frequency
        if wave < high_wave:
            divisors.append(1.0)
        elif wave > low_wave:
            divisors.append(factor)
        else:
            smooth = (original / wave - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    oracle = tiny.make("llama", rope_parameters=scaling)
    divisors = llama3_divisors(500000.0, 16, 32.0, 8192)
    assert len(set(divisors.tolist())) >= 3, "the case must have a frequency between the two borders"
    path = gguf_files.write(tmp_path / "m.gguf", oracle, extra={"rope_freqs.weight": divisors})
    rope = load_config(path).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    check_against(oracle, path)


def test_other_frequency_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(500000.0, 16, 32.0, 4096)
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"), extra={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match="does not come from llama3 rope scaling"):
        load_config(path)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2' not supported; supported: llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, r"mixture of experts \(llama.expert_count\)"),
        ({"llama.attention.sliding_window": 512}, r"'llama\.attention\.sliding_window' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 differs from head_dim 16"),
        ({"llama.attention.value_length": 8}, "attention.value_length 8 differs from head_dim 16"),
        ({"llama.block_count": None}, "no 'num_hidden_layers'"),
    ],
)
def test_metadata_that_we_do_not_compute_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"), fields=fields)
    with pytest.raises(ValueError, match=message):
        load_model(path, torch.float32)


def test_a_tensor_without_a_place_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"), extra=extra)
    with pytest.raises(ValueError, match=r"unused tensor blk\.0\.attn_sinks\.weight"):
        load_model(path, torch.float32)


def set_type(path: Path, tensor: str, kind: int) -> None:
    """Overwrites the type number in a two-dimensional tensor's entry."""
    data, name = bytearray(path.read_bytes()), tensor.encode()
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)


def test_unknown_and_undecodable_tensor_types_are_named(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"))
    set_type(path, "blk.0.ffn_up.weight", 9999)
    with pytest.raises(ValueError, match=r"GGUF type that is not known.*9999"):
        load_model(path, torch.float32)
    set_type(path, "blk.0.ffn_up.weight", Kind.Q8_1)
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_up\.weight has type Q8_1, which is not supported"):
        load_model(path, torch.float32)


@pytest.mark.parametrize("keep", [2, 30, 3000, -64], ids=["magic", "header", "metadata", "data"])
def test_truncated_file_is_one_clear_message(keep: int, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cannot read .*m\.gguf"):
        load_model(path, torch.float32)


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all, but long enough to have a header"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read .*m\.gguf"):
        load_model(tmp_path / "m.gguf", torch.float32)


def test_a_rewritten_file_is_read_anew(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.make("llama"))
    assert open_gguf(path) is open_gguf(path)
    gguf_files.write(path, tiny.make("qwen2"), fields={"general.note": "longer"})
    assert open_gguf(path).architecture == "qwen2"


# -- tokenizer ---------------------------------------------------------------------------------------------------------

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pre-tokenizers of the published tokenizer.json of SmolLM2 and Llama 3.
PUBLISHED: dict[str, Any] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_REGEX}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def published(pre: str) -> HFTokenizer:
    """The tokenizer that Hugging Face would have for these tokens; Llama 3 takes a known word whole."""
    vocab = {token: i for i, token in enumerate(gguf_files.TOKENS)}
    if pre == "qwen2":
        merges = [tuple(merge.split(" ")) for merge in gguf_files.MERGES]
        backend = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer  # type: ignore[arg-type]
    else:
        backend = HFTokenizer.from_str(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "pre_tokenizer": {"type": "Sequence", "pretokenizers": PUBLISHED[pre]},
                    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                    "model": {
                        "type": "BPE",
                        "vocab": vocab,
                        "merges": gguf_files.MERGES,
                        "ignore_merges": pre == "llama-bpe",
                    },
                }
            )
        )
    backend.add_special_tokens(gguf_files.SPECIAL)
    backend.add_tokens(["<tool_call>"])
    return backend


@pytest.fixture(scope="module", params=["smollm", "qwen2", "llama-bpe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTokenizer, HFTokenizer]:
    """Ours (without BOS) and the published one."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    fields = {"tokenizer.ggml.add_bos_token": False}
    gguf_files.write(path, tiny.make("qwen2"), pre=request.param, fields=fields)
    return open_gguf(path).tokenizer(), published(request.param)


SAMPLES = [
    "  the 123456 the12  \n\n\t th1\n\n1",
    "hello it's THEY'LL <|im_start|>user\n<|im_end|><tool_call>|im",
    "e\u0301 caf\u00e9 \uc601\u6587 \U0001f926\u200d\u2640\ufe0f \u0660\u0661 \u00b2 [PAD300]",
    "",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_token_ids_equal_the_published_tokenizer(pair: tuple[HFTokenizer, HFTokenizer], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text).ids == theirs.encode(text).ids


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("th 12\n\r\t'sSé字\u0301\u00a0<|im_start|>.,_"), max_size=30))
def test_token_ids_equal_on_any_text(pair: tuple[HFTokenizer, HFTokenizer], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text).ids == theirs.encode(text).ids


def test_user_defined_tokens_are_found_but_are_not_special(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    ours, theirs = pair
    ids = ours.encode("<|im_start|>a<tool_call>").ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids) == "a<tool_call>"


def test_unused_tokens_are_no_vocabulary(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    ours, _ = pair
    assert ours.get_vocab_size() == len(gguf_files.TOKENS)
    assert ours.id_to_token(len(gguf_files.TOKENS)) is None


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("qwen2", None, []),
        ("smollm", None, []),
        ("llama-bpe", None, [0]),
        ("qwen2", True, [0]),
        ("llama-bpe", False, []),
    ],
)
def test_bos_is_added_where_the_file_says_or_llama_3_expects_it(
    pre: str, flag: bool | None, expected: list[int], tmp_path: Path
) -> None:
    fields = {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = open_gguf(gguf_files.write(tmp_path / "m.gguf", tiny.make("qwen2"), pre=pre, fields=fields)).tokenizer()
    assert tokenizer.encode("t").ids == [*expected, gguf_files.TOKENS.index("t")]
    assert tokenizer.encode("t", add_special_tokens=False).ids == [gguf_files.TOKENS.index("t")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, r"pre-tokenizer 'tekken' not supported \(known: smollm, qwen2, llama-bpe\)"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id is absent"),
    ],
)
def test_unknown_tokenizers_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = open_gguf(gguf_files.write(tmp_path / "m.gguf", tiny.make("qwen2"), fields=fields))
    with pytest.raises(ValueError, match=message):
        file.tokenizer()
