# Owns: what the target is asked: openings of the texts it writes itself, prompts of a user's file.
# Promises: seeds fix the draw; a bad line of a file is named before any text is written.
# Never: answers, reads a benchmark's prompts, needs torch.
"""Prompts of the training text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

QUOTES = '"""'


class Encoder(Protocol):
    """What this file needs of runtime/text.py's Tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def apply_chat(self, messages: Any, **kwargs: Any) -> str: ...


CHAT_OPENINGS = (
    "", "", "", "", "", "", "", "Write a", "Write an email", "Write a short story about", "Compose a", "Draft a",
    "Describe", "Explain", "Explain how", "What is", "What are the", "How do I", "How does", "Why", "Can you",
    "Could you", "Imagine you are", "Pretend to be", "You are a", "Act as", "Give me", "List", "Compare",
    "Summarize the following", "Extract", "Identify", "Classify", "Translate", "Rewrite", "Edit the following",
    "Given the following", "Suppose", "If", "A train", "Solve", "Calculate", "Find the", "Prove that",
    "Write a Python function", "Write a function", "Write a program", "Implement", "Write a SQL", "Fix the bug",
    "Create a", "Design a", "Plan a", "Suggest", "Discuss", "Analyze", "Provide", "Please", "I have a", "I am",
    "Tell me", "Who", "When did", "Which", "In what", "Is it", "Do you", "Help me",
)  # fmt: skip
# No opening ends with a blank: the token that follows would then lack its own, which real code never shows.
CODE_OPENINGS = (
    "def", "def", "def", "def", "def", "def", "from typing import List\n\n\ndef",
    "from typing import List\n\n\ndef", "from typing import List, Tuple\n\n\ndef",
    "from typing import List, Optional\n\n\ndef", "from typing import Dict, List\n\n\ndef", "\ndef", "\n\ndef",
    "import math\n\n\ndef", "import math\n\ndef", "import re\n\ndef", "import random\n\n\ndef", "def is_",
    "def find_", "def count_", "def get_", "def sum_", "def max_", "def min_", "def sort_", "def remove_",
    "def string_", "def list_", "def check_", "def make_", "def to_", "def add_", "def words_", "def digits_",
    "def prime_", "def solve(", "def solution(", "def add(", "def filter_", "def largest_", "def even_",
    "def same_", "def encode_",
)  # fmt: skip
FILE_OPENINGS = (
    "import", "import numpy as np\n", "import os\nimport sys\n", "from", "class", "\"\"\"",
    "#!/usr/bin/env python\n", "#", "#include <", "function", "const", "package", "public class", "SELECT",
    "<html>\n", "@", "if __name__ ==", "x =", "import unittest\n\n\nclass", "import pytest\n\n\ndef test_", "def",
    "def", "def", "\ndef",
)  # fmt: skip
TEXT_OPENINGS = ("The", "In", "#", "##", "A", "Chapter 1", "Once upon a time", "This", "Question:", "1.", "Abstract:")


@dataclass(frozen=True)
class Seed:
    """How one row begins: forced prefix, sampled prompt up to `prompt_limit` or an end mark, forced suffix, answer."""

    kind: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    prompt_limit: int
    num_quotes: int
    temperature: float


def self_asked(
    tokenizer: Encoder,
    seed: int,
    mix: dict[str, float] | None = None,
    max_prompt: int = 224,
    heads: Sequence[str] = (),
) -> Iterator[Seed]:
    """Endless seeds: chat questions, function heads with docstrings, other source files, plain text.

    `mix` weighs the kinds chat, docstring, file, text. `heads` (of `write_heads`) open the docstrings; without them
    the target writes its heads too, and few of them have one. Four answers of five are greedy, the rest at 0.7 to 1.
    """
    mix = mix or {"chat": 0.45, "docstring": 0.38, "file": 0.13, "text": 0.04}
    rng = np.random.default_rng(seed)
    hole = "\x00"
    before, after = tokenizer.apply_chat([{"role": "user", "content": hole}], add_generation_prompt=True).split(hole)
    chat_suffix = tuple(tokenizer.encode(after, add_special=False))
    newline = tuple(tokenizer.encode("\n", add_special=False))
    openings = {"docstring": heads or CODE_OPENINGS, "file": FILE_OPENINGS, "text": TEXT_OPENINGS}
    kinds, weights = list(mix), np.array(list(mix.values())) / sum(mix.values())
    cache: dict[str, tuple[int, ...]] = {}
    while True:
        kind = str(rng.choice(kinds, p=weights))
        choices = CHAT_OPENINGS if kind == "chat" else openings[kind]
        text = str(choices[int(rng.integers(len(choices)))])
        text = before + text if kind == "chat" else text
        if text not in cache:
            cache[text] = tuple(tokenizer.encode(text, add_special=False))
        low, high = {"chat": (max_prompt, max_prompt), "docstring": (128, max_prompt)}.get(kind, (12, 96))
        limit = int(rng.integers(low, high + 1))
        suffix = chat_suffix if kind == "chat" else newline if kind == "docstring" else ()
        temperature = 0.0 if rng.random() < 0.8 else float(rng.uniform(0.7, 1.0))
        num_quotes = max(0, 2 - text.count(QUOTES)) if kind == "docstring" else 0
        yield Seed(kind, cache[text], suffix, limit, num_quotes, temperature)


def given_prompts(tokenizer: Encoder, path: Path, seed: int) -> Iterator[Seed]:
    """Seeds of a file that `read_prompts` takes, answered greedily, in a seeded order, repeated never."""
    questions = read_prompts(path)
    for place in np.random.default_rng(seed).permutation(len(questions)):
        question = questions[place]
        if isinstance(question, str):
            ids = tokenizer.encode(question)
        else:
            text = tokenizer.apply_chat(question, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special=False)
        if ids:
            yield Seed("given", tuple(ids), (), len(ids), 0, 0.0)


def read_prompts(path: Path) -> list[str | list[dict[str, str]]]:
    """Texts and chats of a JSONL file, one {"prompt": str} or {"messages": [...]} a line; other keys are not read.

    Raises FileNotFoundError, or ValueError naming the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"prompts '{path}': no such file (give a .jsonl file)")
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    questions = [_question(raw, f"{path}, line {number}") for number, raw in lines if raw.strip()]
    if not questions:
        raise ValueError(f"{path} holds no prompt")
    return questions


def _question(raw: bytes, where: str) -> str | list[dict[str, str]]:
    try:
        entry = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON in UTF-8 ({error})") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"{where}: give either 'prompt' or 'messages'")
    text, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(text, str) and text:
        return text
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return messages
    raise ValueError(f"{where}: 'prompt' must be a text, 'messages' a list of objects with 'role' and 'content'")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= set(value)
