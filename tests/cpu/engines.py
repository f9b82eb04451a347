# Owns: engines over a toy pair on disk, and what their texts must be.
# Promises: the drafter is right often enough; an engine that is not idle after a test is found.
# Never: trusts an engine's own autoregressive mode as an oracle.
"""Toy engines for tests of the engine room."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.request import RequestOutput, SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.runtime import engine as engine_module
from ratoon.runtime.engine import Engine
from tests.cpu import toy
from tests.cpu.toy import Ask, Prophet, Text, assert_same_text, dense_text

PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 6, 7), (9,), tuple(range(10, 30)), (3, 1, 4, 1, 5, 9), (40, 5, 36, 44), (20, 20), (11, 46, 30, 8, 8, 8, 0),
)  # fmt: skip
NUM, MAX_LEN = 24, 60
FREE = SamplingParams(max_tokens=NUM, ignore_eos=True)
METHODS: tuple[dict[str, Any], ...] = ({"budget": 31}, {"method": "chain", "budget": 7}, {"method": "ar"})


@functools.cache
def target() -> Decoder:
    return toy.make_target()


@functools.cache
def text_of(prompt: tuple[int, ...], num: int = NUM) -> Text:
    """Greedy, no stop."""
    return dense_text(target(), Ask(prompt, num))


def prophet() -> Prophet:
    """A fresh one: an eager engine readies its networks in a way that graphs do not take."""
    made = toy.make_prophet()
    for prompt in PROMPTS:
        made.learn(prompt + tuple(text_of(prompt, 40).tokens))
    return made


class Maker:
    """Engines by their settings, one of each for the whole module."""

    def __init__(self, model: Path, drafter: Path) -> None:
        self.model, self.drafter = model, drafter
        self.made: dict[str, Engine] = {}

    def __call__(self, **settings: Any) -> Engine:
        key = repr(sorted(settings.items()))
        if key not in self.made:
            self.made[key] = self.new(**settings)
        return self.made[key]

    def new(self, **settings: Any) -> Engine:
        sizes = {"dtype": "float32", "max_rows": 3, "max_model_len": MAX_LEN, "page_size": 4, "budget": 31}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "load_drafter", lambda *_: prophet())
            return Engine(str(self.model), **{"drafter": str(self.drafter), "topk_cap": 0, **sizes, **settings})


def check_idle(engine: Engine) -> None:
    scheduler = engine._loop.scheduler
    scheduler.check()
    statistics = engine.statistics()
    assert statistics.available_pages == statistics.num_pages
    assert statistics.num_running == statistics.num_waiting == 0 and not engine._loop.busy
    assert bool(engine.runner.state.done_S.all())


def check_texts(outputs: Sequence[RequestOutput], prompts: Sequence[tuple[int, ...]] = PROMPTS) -> None:
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert_same_text(text_of(prompt), Text(tokens=list(output.token_ids)), f"prompt {prompt}")
