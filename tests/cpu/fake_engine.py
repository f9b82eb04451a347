# Owns: an engine that answers by rote, for tests of what stands above the engine.
# Promises: the same attributes and events as the real one; every call is written down.
# Never: computes.
"""`FakeEngine`: three words a round when drafting, one without; a word is a token."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ratoon.cli import app
from ratoon.core.request import RequestOutput, SamplingParams
from ratoon.core.tree import Tree

WORDS = "the shoot that a plant sends up after it was cropped".split()  # noqa: SIM905


@dataclass(frozen=True)
class StreamEvent:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    output: RequestOutput | None = None
    tree: Tree | None = None
    path: tuple[int, ...] = ()


class FakeTokenizer:
    chat_template: str | None = "template"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [900, *range(len(text.split()))]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [901] * len(messages)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return " ".join(WORDS[i % len(WORDS)] for i in ids)


class FakePlan:
    def describe(self) -> str:
        return "weights: 2 GB"


class FakeEngine:
    """`made` lists every engine of the test; `behaviour` is called with each prompt before it is answered."""

    made: list[FakeEngine]
    behaviour: Any = staticmethod(lambda ids: None)
    wrong_token: int | None = None
    loops = False

    def __init__(self, model: str, **settings: Any) -> None:
        self.model, self.settings = model, settings
        self.drafter = settings.get("drafter", "auto")
        self.dtype, self.mode, self.device, self.memory = "float32", "eager", "cpu", FakePlan()
        self.tokenizer, self.vocab_size = FakeTokenizer(), 100
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []
        self.closed = self.trace_trees = False
        self._rounds = 0
        type(self).made.append(self)
        for done in range(1, 4):
            settings.get("progress", lambda *_: None)("capture", done, 3)

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[StreamEvent]:
        self.calls.append((prompts, params))
        step = 1 if params.method == "ar" or self.drafter == "none" else 3
        for index, ids in enumerate(prompts):
            self.behaviour(ids)
            yield from self._answer(index, ids, params, step)

    def _answer(self, index: int, ids: list[int], params: SamplingParams, step: int) -> Iterator[StreamEvent]:
        tokens = list(range(min(params.max_tokens, len(WORDS)))) if not self.loops else [0, 1] * params.max_tokens
        tokens = tokens[: params.max_tokens]
        if step > 1 and self.wrong_token is not None:
            tokens[self.wrong_token] += 1
        rounds = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        self._rounds += len(rounds)
        for chunk in rounds:
            tree, path = (draft(chunk), tuple(range(len(chunk)))) if self.trace_trees and step > 1 else (None, ())
            yield StreamEvent(index, self.tokenizer.decode(chunk) + " ", tuple(chunk), tree=tree, path=path)
        output = RequestOutput(
            prompt_token_ids=tuple(ids),
            token_ids=tuple(tokens),
            text=self.tokenizer.decode(tokens),
            finish_reason="length",
            rounds=len(rounds),
            accepted=tuple(len(chunk) - 1 for chunk in rounds),
            gaps=(1.0,) * len(tokens),
            runner_ups=(0,) * len(tokens),
            third_gaps=(math.inf,) * len(tokens),
            thirds=(-1,) * len(tokens),
            top_logits=(10.0,) * len(tokens),
            ttft_s=0.01,
            decode_s=0.09 * len(rounds) / len(tokens),
        )
        yield StreamEvent(index, "", (), "length", output)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return [event.output for event in self.stream(prompts, params) if event.output]

    def counters(self) -> dict[str, float]:
        return {"rounds": self._rounds, "ms_verify": 2.0 * self._rounds, "fallback_eager": 0}

    def describe(self) -> str:
        return f"{self.model} with {self.drafter}\n{self.memory.describe()}"

    def close(self) -> None:
        self.closed = True


def draft(chunk: list[int]) -> Tree:
    """A spine of the chunk's tokens, and a second child of the root."""
    spine = len(chunk)
    return Tree(
        token=np.array([*chunk, 7]),
        parent=np.array([*range(spine), 0]),
        depth=np.array([*range(1, spine + 1), 1]),
        rank=np.array([0] * spine + [1]),
        score=np.zeros(spine + 1, dtype=np.float32),
    )


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """Puts a fresh fake in the place of ratoon.runtime.engine.Engine, and an embedded model that needs no file."""
    fake = type("Engine", (FakeEngine,), {"made": []})
    module: Any = types.ModuleType("ratoon.runtime.engine")
    module.Engine, module.StreamEvent = fake, StreamEvent
    monkeypatch.setitem(sys.modules, "ratoon.runtime.engine", module)
    monkeypatch.setattr("ratoon.models.hub.resolve", lambda model, progress=None: model)
    return fake


def ratoon(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """One call of the command line, in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)
