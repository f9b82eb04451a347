# Owns: the embedded model end to end: weights, tokenizer and template against Hugging Face.
# Promises: the GGUF is read twice, by us and by transformers, and both say the same.
# Never: looks at speed or drafts.
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ratoon.models.decoder import Decoder
from ratoon.models.hub import resolve
from ratoon.models.weights import load_model
from ratoon.runtime.text import Tokenizer
from tests.dense import DenseCausal

CHAT = [{"role": "user", "content": "Write one line of Python that adds 12 and 30."}]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def model(path: Path) -> Decoder:
    return load_model(path, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def oracle(path: Path) -> LlamaForCausalLM:
    """transformers' own reading of the file (its from_pretrained would ask for one more package)."""
    with torch.device("meta"):
        shape = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape)
    theirs = LlamaForCausalLM(LlamaConfig(**read["config"]))
    # The head is tied, so the file has no tensor for it.
    missing, unexpected = theirs.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return theirs.eval()


def test_the_embedded_model_is_what_we_think(model: Decoder) -> None:
    config = model.config
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.eos_ids) == (30, 576, 49152, (2,))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


@pytest.mark.parametrize("prompt", ["def fibonacci(n):\n    ", None], ids=["code", "chat"])
def test_greedy_tokens_logits_and_taps_equal_hugging_face(
    model: Decoder, oracle: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str | None
) -> None:
    given = tokenizer.encode(prompt) if prompt else tokenizer.encode_chat(CHAT)
    ids, attend = torch.tensor(given), DenseCausal(30)
    with torch.no_grad():
        expected = oracle(ids[None], output_hidden_states=True)
        h_TH, taps_TX = model(ids, torch.arange(len(ids)), attend, (1, 14, 28))
        assert taps_TX is not None
        reference = torch.cat([expected.hidden_states[i + 1][0] for i in (1, 14, 28)], dim=-1)
        assert (taps_TX - reference).abs().max() < 1e-4 * reference.abs().max()
        assert (model.logits(h_TH) - expected.logits[0]).abs().max() < 1e-3
        tokens = []
        for _ in range(16):
            tokens.append(int(model.logits(h_TH[-1:]).argmax()))
            h_TH, _ = model(torch.tensor(tokens[-1:]), torch.tensor([attend.length]), attend)
        theirs = oracle.generate(ids[None], max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert tokens == theirs[0, len(ids) :].tolist()


def test_tokenizer_and_template_equal_hugging_face(path: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in ("def f(x):\n    return x ** 2  # é \U0001f600\n", "It's 3.14, isn't it? 日本語", "<|im_start|>user\n"):
        assert tokenizer.encode(text) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    chat = [*CHAT, {"role": "assistant", "content": "print(12 + 30)"}, {"role": "user", "content": "Thanks."}]
    assert tokenizer.apply_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    rendered = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert tokenizer.encode_chat(chat) == rendered["input_ids"]


def test_digits_stand_alone_as_in_the_published_tokenizer(tokenizer: Tokenizer) -> None:
    """The published tokenizer.json splits digits first; transformers' GGUF reader forgets it, so this has no oracle."""
    newlines, one = tokenizer.token_id("ĊĊ"), tokenizer.token_id("1")
    assert tokenizer.encode("\n\n11") == [newlines, one, one]
