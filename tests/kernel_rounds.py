# Owns: whole rounds by kernels, held against dense texts of the references; the interpreter and the GPU both run them.
# Promises: several rows, trees of all shapes, sampled rows, scattered pages, rows that end at different times.
# Never: compares kernels with kernels.
"""Toy rounds on Triton kernels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ratoon.core.request import SamplingParams
from ratoon.ops.launch import use_kernels
from ratoon.runtime.runner import Mode
from tests.cpu import toy
from tests.cpu.toy import Ask, Bench, assert_same_text, dense_text

# tl.dot takes no head of 8.
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.2)


def asks(num: int, sampled: bool) -> list[Ask]:
    """Rows of different prompts, budgets and caps; the first is plain decoding."""
    prompts = ((5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 11, 12), (17,), (3, 3, 4, 21, 30, 31, 2))
    budgets, caps = (0, 13, 5, 7), (1, 0, 3, 1)
    return [
        Ask(prompt, num + row, budget, cap, SAMPLED if sampled and row != 1 else SamplingParams(), seed=row)
        for row, (prompt, budget, cap) in enumerate(zip(prompts, budgets, caps, strict=True))
    ]


def check_texts(device: torch.device, mode: Mode, *, num: int, sampled: bool = False, num_rows: int = 4) -> None:
    """Every row's text by kernels equals its dense text (float32), whatever its neighbours."""
    target = toy.make_target(**WIDE)
    oracle = toy.make_prophet(**WIDE)
    rows = asks(num, sampled)[:num_rows]
    texts = [dense_text(target, ask.ar()) for ask in rows]
    for ask, text in zip(rows, texts, strict=True):
        oracle.learn([*ask.prompt, *text.tokens])
    target, oracle = copy.deepcopy(target).to(device), copy.deepcopy(oracle).to(device)
    use_kernels("triton")
    try:
        bench = Bench(
            target,
            oracle,
            mode,
            nodes=15,
            page_size=4,
            max_len=48,
            max_ranks=8,
            captured=[(4, 13, "general"), (4, 13, "argmax")] if mode in ("graph", "staged") else (),
        )
        got = bench.run([replace(ask) for ask in rows])
    finally:
        use_kernels("auto")
    for row, (want, text) in enumerate(zip(texts, got, strict=True)):
        assert_same_text(want, text, f"row {row}")
    assert sum(sum(text.accepted) for text in got) >= num // 2, "no draft was accepted: the trees tell nothing"
