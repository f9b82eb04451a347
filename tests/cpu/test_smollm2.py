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

# The published config.json.
PUBLISHED = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
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
    theirs = LlamaForCausalLM(PUBLISHED)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    # The head is tied, so the file has no tensor for it.
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
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
    prompt_len, attend, logits, taps, ids = len(given), DenseCausal(30), [], [], given
    with torch.no_grad():
        for step in range(17):
            new = torch.tensor(ids[-1:] if step else ids)
            h_TH, taps_TX = model(new, torch.arange(len(ids) - len(new), len(ids)), attend, (1, 14, 28))
            logits.append(model.logits(h_TH))
            taps.append(taps_TX)
            ids = [*ids, int(logits[-1][-1].argmax())]
        # One pass over prompt and answer: greedy decoding gives this answer if each token is the argmax before it.
        expected = oracle(torch.tensor([ids[:-1]]), output_hidden_states=True)
    assert expected.logits[0].argmax(-1)[prompt_len - 1 :].tolist() == ids[prompt_len:]
    assert (torch.cat(logits) - expected.logits[0]).abs().max() < 1e-3
    reference = torch.cat([expected.hidden_states[i + 1][0] for i in (1, 14, 28)], dim=-1)
    assert (torch.cat(taps) - reference).abs().max() < 1e-4 * reference.abs().max()


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
