# Owns: GGUF files: their metadata as a config, their tensors under checkpoint names, their tokenizer.
# Promises: tensors are dequantised to float32, llama's row permutation of q and k undone; the unknown is refused.
# Never: fills a parameter (weights.py does) or renders a template (runtime/text.py does).
"""Reading GGUF. The `gguf` package parses the file and dequantises."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer
from torch import Tensor

from ratoon.core.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
# Read by the functions below, not copied.
_OTHER_KEYS = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_PRE_TYPES = ("smollm", "qwen2", "llama-bpe")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def open_gguf(path: Path) -> GGUFFile:
    """A parsed GGUF file, shared by all who open the same unchanged file.

    Raises FileNotFoundError, or ValueError for a file that is no GGUF, is cut short or has unknown tensor types.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)
def _open(path: Path, _mtime_ns: int, _size: int) -> GGUFFile:
    # Parsing takes about a second for a vocabulary of 49152, and model and tokenizer both need it.
    return GGUFFile(path)


class _Reader(gguf.GGUFReader):
    """The package's reader over a plain array: slicing a memmap object tripled the time to open (2.6 s to 0.9 s)."""

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = np.asarray(mapped)


class GGUFFile:
    """One GGUF file; tensors are read from disk when iterated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
            # The reader holds an array object per string of the vocabulary: plain values are a fraction of that.
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"cannot read {path}: {_reason(error)}") from error
        self._data = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.value("general.architecture", "none"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path.name}: GGUF architecture '{self.architecture}' not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or the default when absent."""
        return self._metadata.get(key, default)

    def _body(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self.architecture}.{key}", default)

    def config(self) -> ModelConfig:
        """The model's shape, through the same reader as `config.json`.

        A file with `output.weight` has its own head: files of tied models carry the table twice, the head at higher
        precision. Both copies are used as the file has them (as llama.cpp does).
        """
        self._refuse_unknown()
        hf: dict[str, Any] = {"architectures": [ARCHITECTURES[self.architecture]], "vocab_size": self._vocab_size()}
        for key, name in _CONFIG_KEYS.items():
            if (found := self._body(key)) is not None:
                hf[name] = found
        hf["tie_word_embeddings"] = "output.weight" not in self._data
        hf["bos_token_id"] = self.value("tokenizer.ggml.bos_token_id")
        stops = (self.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        hf["eos_token_id"] = [token for token in stops if token is not None]
        hf["rope_scaling"] = self._rope_scaling()
        config = ModelConfig.from_hf(hf)
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._body(key, config.head_dim) != config.head_dim:
                raise ValueError(f"{self.architecture}.{key} {self._body(key)} differs from head_dim {config.head_dim}")
        return config

    def _vocab_size(self) -> int:
        """Rows of the embedding: the metadata often counts without padding, or not at all."""
        if "token_embd.weight" not in self._data:
            raise ValueError(f"{self.path.name}: missing tensor token_embd.weight")
        return int(self._data["token_embd.weight"].shape[-1])  # GGUF writes the fastest dimension first

    def _refuse_unknown(self) -> None:
        prefix = self.architecture + "."
        for key in self._metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _CONFIG_KEYS.keys() | _OTHER_KEYS:
                raise ValueError(f"{self.path.name}: GGUF key '{key}' is not supported, nobody reads it")
        if self._body("expert_count", 0):
            raise ValueError(f"{self.path.name}: mixture of experts ({prefix}expert_count) not supported")

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._body("rope.scaling.type", "none")
        if _ROPE_FREQS in self._data:
            return _llama3_scaling(self._tensor(_ROPE_FREQS), self._body("rope.freq_base", 10000.0))
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.path.name}: rope scaling '{kind}' is not supported (known: none, linear, yarn)")
        scaling = {"rope_type": kind, "factor": self._body("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._body("rope.scaling.original_context_length")
        return scaling

    def _tensor(self, name: str) -> np.ndarray:
        """Dequantised float32, in checkpoint orientation [out, in]."""
        tensor = self._data[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path.name}: tensor {name} has type {kind}, which is not supported") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, as (Hugging Face name, float32 [out, in]); a name without a rule stays as it is."""
        config = self.config()
        for name in self._data:
            if name == _ROPE_FREQS:
                continue  # read by _rope_scaling
            values = np.require(self._tensor(name), dtype=np.float32, requirements="W")  # float32 ones are read-only
            if self.architecture == "llama" and (match := re.search(r"\.attn_([qk])\.(?:weight|bias)$", name)):
                values = _unpermute(values, config.num_heads if match[1] == "q" else config.num_kv_heads)
            yield checkpoint_name(name), torch.from_numpy(values)

    def tokenizer(self) -> HFTokenizer:
        """The byte-level BPE tokenizer of this file, equal to the model's `tokenizer.json`.

        Raises ValueError for a tokenizer model or pre-tokenizer that we do not know.
        """
        model, pre = self.value("tokenizer.ggml.model", "none"), self.value("tokenizer.ggml.pre", "none")
        if model != "gpt2":
            raise ValueError(f"{self.path.name}: tokenizer model '{model}' not supported, only gpt2 (byte-level BPE)")
        if pre not in _PRE_TYPES:
            raise ValueError(
                f"{self.path.name}: pre-tokenizer '{pre}' not supported (known: {', '.join(_PRE_TYPES)}); "
                "use a model directory with tokenizer.json"
            )
        tokens, kinds = self.value("tokenizer.ggml.tokens"), self.value("tokenizer.ggml.token_type")
        vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
        merges = [_split_merge(merge) for merge in self.value("tokenizer.ggml.merges")]
        tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        _set_pre_tokenizer(tokenizer, pre)
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, kinds, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
        self._set_bos(tokenizer, tokens, default=pre == "llama-bpe")
        return tokenizer

    def _set_bos(self, tokenizer: HFTokenizer, tokens: list[str], default: bool) -> None:
        for key in ("add_eos_token", "add_space_prefix"):
            if self.value(f"tokenizer.ggml.{key}", False):
                raise ValueError(f"{self.path.name}: tokenizer.ggml.{key} true is not supported")
        if self.value("tokenizer.ggml.add_bos_token", default):
            bos = self.value("tokenizer.ggml.bos_token_id")
            if bos is None:
                raise ValueError(f"{self.path.name}: add_bos_token is true but bos_token_id is absent")
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, unk_token and pad_token as text, where the file names them."""
        tokens, names = self.value("tokenizer.ggml.tokens", []), {"unknown": "unk", "padding": "pad"}
        found = {}
        for kind in ("bos", "eos", "unknown", "padding"):
            token = self.value(f"tokenizer.ggml.{kind}_token_id")
            if token is not None:
                found[f"{names.get(kind, kind)}_token"] = tokens[token]
        return found

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, if the file has one."""
        return self.value("tokenizer.chat_template")


def checkpoint_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name comes back as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        block, part, kind = match.groups()
        return f"model.layers.{block}.{_BLOCK_NAMES[part]}.{kind}" if part in _BLOCK_NAMES else name
    return _GLOBAL_NAMES.get(name, name)


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the converter's interleaving of each head's two rotary halves (public llama.cpp, `permute`)."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Recovers llama3 scaling from the frequency divisors that stand for it; raises ValueError for any other kind.

    The converter keeps no parameters, only the divisors; every public Llama 3.x has the low, high and original values
    below, and the factor is the divisor of the longest wave. Accepted only if they reproduce the divisors.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    exponent = np.arange(factors.shape[0], dtype=np.float64) / factors.shape[0]
    wavelength = 2 * np.pi * float(theta) ** exponent
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise ValueError(f"{_ROPE_FREQS} does not come from llama3 rope scaling: not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _set_pre_tokenizer(tokenizer: HFTokenizer, pre: str) -> None:
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT if pre == "qwen2" else _LLAMA3_SPLIT), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])


def _reason(error: Exception) -> str:
    text = str(error)
    if "GGMLQuantizationType" in text:
        return f"a tensor has a GGUF type that is not known ({text})"
    if "magic" in text or "version" in text:
        return f"not a GGUF file of a known version ({text})"
    return f"the file is cut short or damaged, fetch it again ({text})"
