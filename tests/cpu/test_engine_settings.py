# Owns: the engine's settings, sizes and memory: what is resolved, what is refused, and by which words.
# Promises: every refusal is checked by what its message names.
# Never: needs a GPU: a GPU's memory is a pair of numbers here.
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.request import RequestOutput, SamplingParams
from ratoon.runtime import engine as engine_module
from ratoon.runtime.pages import PagePool
from ratoon.runtime.setup import limits_for
from ratoon.runtime.shapes import auto_buckets
from tests.cpu import toy
from tests.cpu.engines import FREE, MAX_LEN, METHODS, NUM, PROMPTS, Maker, check_idle, check_texts, prophet, target

# ---- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([()], FREE, "the prompt is empty"),
        ([(5,), ()], FREE, "the prompt is empty"),
        ([""], FREE, "the prompt is empty"),
        ([(5,) * MAX_LEN], FREE, f"{MAX_LEN} tokens, but the context holds {MAX_LEN}"),
        ([(5, 48)], FREE, "vocabulary of 48"),
        ([(-1, 5)], FREE, "vocabulary of 48"),
        ([(5,)], replace(FREE, budget=128), "limit of 127, got 128"),
        ([(5,)], replace(FREE, topk_cap=128), "at most 127"),
        ([(5,)], replace(FREE, stop_token_ids=(48,)), "names token 48"),
        ([(5,)], replace(FREE, logit_bias={99: 1.0}), "names token 99"),
        ([(5,)], replace(FREE, n=2), "n is 2"),
        ([(5,), (6,)], [FREE], "2 prompts but 1 sampling"),
        ([(5,)], [FREE, FREE], "1 prompts but 2 sampling"),
        (["\udcff"], FREE, "not valid UTF-8"),
    ],
)
def test_bad_requests_are_refused_before_any_runs(make: Maker, prompts: Any, params: Any, message: str) -> None:
    engine = make()
    before = engine.counters().get("rounds", 0)
    with pytest.raises(ValueError, match=message):
        engine.stream(prompts, params)
    assert engine.counters().get("rounds", 0) == before


def test_a_cap_beyond_the_engines_is_refused(make: Maker) -> None:
    engine = make(topk_cap=4)
    for cap in (0, 5):
        with pytest.raises(ValueError, match=f"topk_cap {cap} exceeds this engine's 4"):
            engine.generate((9,), replace(FREE, topk_cap=cap))
    for cap in (1, 4):
        check_texts(engine.generate((9,), replace(FREE, topk_cap=cap)), [(9,)])


def test_a_tree_without_a_drafter_is_refused(make: Maker) -> None:
    engine = make(drafter="none")
    for method in ("tree", "chain"):
        with pytest.raises(ValueError, match=f"method '{method}' needs a drafter"):
            engine.generate((9,), replace(FREE, method=method))
    check_texts(engine.generate((9,), FREE), [(9,)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": -1}, "budget must be from 0"),
        ({"budget": 128}, "limit of 127, got 128"),
        ({"budget": "7"}, "budget must be"),
        ({"budget": -1, "drafter": "none"}, "budget must be from 0"),
        ({"topk_cap": -1}, "topk_cap must be at least 0"),
        ({"topk_cap": 128}, "topk_cap must be at most 127"),
        ({"method": "guess"}, "method 'guess' is unknown"),
        ({"mode": "lazy"}, "mode 'lazy' is unknown"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"device": "mps"}, "device 'mps' is not supported"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"run_ahead": -1}, "run_ahead must be at least 0"),
        ({"max_model_len": 1}, "max_model_len must be from 2"),
        ({"max_model_len": 513}, "max_model_len must be from 2 to the model's 512"),
    ],
)
def test_bad_settings_are_refused(make: Maker, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make.new(**settings)


def test_sizes_hold_a_whole_row_and_a_whole_tree(make: Maker) -> None:
    config = target().config
    sizes: dict[str, Any] = {"max_rows": 3, "topk_cap": 16, "run_ahead": 1, "forecast": ()}
    limits = limits_for(config, prophet().config, max_model_len=60, page_size=7, padded_on_cpu=False, **sizes)
    assert (limits.scratch, limits.context) == (128, 189)  # 60 + 128, in pages of 7
    assert (limits.max_depth, limits.max_ranks, limits.max_nodes) == (toy.BLOCK - 1, 16, 127)
    assert limits.num_pages - 1 == 3 * limits.pages_per_row
    many = limits_for(config, None, max_model_len=500, page_size=16, padded_on_cpu=False, **{**sizes, "max_rows": 999})
    assert (many.max_nodes, many.max_block, many.scratch) == (0, 0, 1)
    assert many.context <= (many.num_pages - 1) * 16 < 999 * many.context, "requests wait for pages"
    assert limits_for(config, None, max_model_len=None, page_size=16, padded_on_cpu=False, **sizes).max_model_len == 512
    long = replace(config, max_position=9999)
    assert limits_for(long, None, max_model_len=None, page_size=16, padded_on_cpu=True, **sizes).max_model_len == 1024


def test_automatic_buckets_start_with_the_smaller_block() -> None:
    buckets = auto_buckets(prophet().config, torch.device("cpu"))
    assert [block for block, _ in buckets] == sorted(block for block, _ in buckets)
    assert {block for block, _ in buckets} == {toy.BLOCK // 2, toy.BLOCK} and len(set(buckets)) == len(buckets)


def test_settings_are_described(make: Maker) -> None:
    lines = make(run_ahead=1).describe().splitlines()
    found = {name.strip(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    assert found["budget"] == "31" and found["run_ahead"] == "1" and found["mode"] == "eager"
    assert "auto" in make(budget="auto").describe()


@pytest.mark.parametrize("prompt", [b"hi", None, 5, [[1.5, 2]], [[True]], [None], [{"role": "user"}]])
def test_what_is_no_prompt_is_refused(make: Maker, prompt: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        make().generate(prompt, SamplingParams(max_tokens=1))


def test_numpy_numbers_are_numbers(make: Maker) -> None:
    [plain] = make().generate([[5, 9, 1]], SamplingParams(max_tokens=3, budget=3))
    ids, three = np.array([5, 9, 1]), np.int64(3)
    for prompts in ([ids], ids):
        [other] = make().generate(prompts, SamplingParams(max_tokens=three, budget=three))  # pyright: ignore
        assert other.token_ids == plain.token_ids


# ---- memory -----------------------------------------------------------------------------------------------


def test_requests_wait_for_pages(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seats, but pages for one and a half rows: texts are the same, one after the other."""
    engine = make()
    need = -(-(len(PROMPTS[2]) + NUM + engine.limits.scratch) // engine.limits.page_size)
    monkeypatch.setattr(engine, "_pages", PagePool(1 + need + need // 2))
    most = 0
    outputs: dict[int, RequestOutput] = {}
    for event in engine.stream(PROMPTS, FREE):
        most = max(most, len(engine._rows))
        if event.output:
            outputs[event.index] = event.output
    check_texts([outputs[i] for i in range(len(PROMPTS))])
    assert most == 1
    check_idle(engine)


def test_a_nan_is_an_error_and_leaves_nothing_behind(make: Maker) -> None:
    spoilt = toy.make_target()
    spoilt.embed.weight.data[33] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "load_model", lambda *_: spoilt)
        engine = make.new()
    for method in METHODS:
        with pytest.raises(RuntimeError, match="the target gave a NaN"):
            engine.generate([PROMPTS[0], (8, 33, 4)], replace(FREE, **method))
        check_idle(engine)
    # On the pages that held the NaN; autoregressive, because a tree would draft the spoilt token.
    check_texts(engine.generate(PROMPTS[:2], replace(FREE, method="ar")), PROMPTS[:2])
    engine.close()
