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
from ratoon.runtime.engine import Engine
from ratoon.runtime.kv import specs_of
from ratoon.runtime.pages import PagePool
from ratoon.runtime.plan import MemoryPlan, fit_pages, memory_remedy, page_bytes
from ratoon.runtime.prefix import PrefixCache
from ratoon.runtime.scheduler import Scheduler
from ratoon.runtime.setup import Options, limits_for
from ratoon.runtime.shapes import MAX_SHAPES, Estimate, auto_buckets, padded_shapes
from ratoon.spec.state import RoundShape
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
        ({"budget": 128}, "limit of 127, or 'auto', got 128"),
        ({"budget": "7"}, "budget must be"),
        ({"budget": -1, "drafter": "none"}, "budget must be from 0"),
        ({"topk_cap": -1}, "topk_cap must be a whole number from 0 to 127"),
        ({"topk_cap": 128}, "topk_cap must be a whole number from 0 to 127"),
        ({"method": "guess"}, "method 'guess' is unknown"),
        ({"mode": "lazy"}, "mode 'lazy' is unknown"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"device": "mps"}, "device 'mps' is not supported"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"run_ahead": -1}, "run_ahead must be at least 0"),
        ({"birth_test": "slow"}, "birth_test 'slow' is unknown"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be above 0"),
        ({"method": "chain", "drafter": "none"}, "method 'chain' needs a drafter, and there is none"),
        ({"method": "tree", "drafter": None}, "method 'tree' needs a drafter, and there is none"),
        ({"max_model_len": 1}, "max_model_len must be from 2"),
        ({"max_model_len": 513}, "max_model_len must be from 2 to the model's 512"),
    ],
)
def test_bad_settings_are_refused(make: Maker, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make.new(**settings)


def test_sizes_hold_a_whole_row_and_a_whole_tree() -> None:
    config, few = target().config, Options(max_rows=3, max_model_len=60, page_size=7)
    limits = limits_for(config, prophet().config, few, run_ahead=1)
    assert (limits.scratch, limits.context) == (128, 189)  # 60 + 128, in pages of 7
    assert (limits.max_depth, limits.max_ranks, limits.max_nodes) == (toy.BLOCK - 1, 16, 127)
    assert limits.num_pages - 1 == 3 * limits.pages_per_row
    many = limits_for(config, None, Options(max_rows=999, max_model_len=500))
    assert (many.max_nodes, many.max_block, many.scratch) == (0, 0, 1)
    assert many.context <= (many.num_pages - 1) * 16 < 999 * many.context, "requests wait for pages"
    assert limits_for(config, None, Options()).max_model_len == 512
    long = replace(config, max_position=9999)
    assert limits_for(long, None, Options(), padded_on_cpu=True).max_model_len == 1024
    assert limits_for(config, None, Options(max_rows=9, cache_tokens=1600)).num_pages == 101
    least = limits_for(config, None, Options(cache_tokens=1))
    assert least.num_pages - 1 == least.pages_per_row


def test_automatic_buckets_start_with_the_smaller_block() -> None:
    buckets = auto_buckets(prophet().config, torch.device("cpu"))
    assert [block for block, _ in buckets] == sorted(block for block, _ in buckets)
    assert {block for block, _ in buckets} == {toy.BLOCK // 2, toy.BLOCK} and len(set(buckets)) == len(buckets)


def test_settings_and_memory_are_described(make: Maker) -> None:
    engine = make(run_ahead=1)
    found = {name.strip(): value.strip() for name, value in (x.split(":", 1) for x in engine.describe().splitlines())}
    memory, limits = engine.memory, engine.limits
    slots = limits.num_pages * limits.page_size
    assert found["weights"].endswith("GB") and memory.total > memory.beside_pages > 0
    assert memory.weights == sum(t.nbytes for t in target().state_dict().values())
    assert memory.pages == slots * toy.LAYERS * 2 * 2 * 8 * 4, "layers, key and value, heads, head dim, float32"
    assert memory.drafter_weights > 0 and memory.drafter_pages == engine.runner.table["draft_cache"].nbytes
    assert found["budget"] == "31" and found["run_ahead"] == "1" and found["mode"] == "eager"
    assert "auto" in make(budget="auto").describe()


def test_the_method_follows_the_drafter(make: Maker) -> None:
    assert make().settings.method == make(method="auto").settings.method == "tree"
    assert make(drafter="none").settings.method == "ar"


def test_a_request_may_ask_for_an_automatic_budget(make: Maker) -> None:
    engine = make()
    before = engine.counters().get("bucket_0x0", 0)
    check_texts(engine.generate(PROMPTS[:2], replace(FREE, budget="auto")), PROMPTS[:2])
    buckets = sum(count for name, count in engine.counters().items() if name.startswith("bucket_"))
    assert buckets > before


def test_an_engine_over_parts_reads_and_gives_ids() -> None:
    with Engine.from_parts(target(), prophet(), budget=7, max_rows=2, max_model_len=MAX_LEN) as engine:
        outputs = engine.generate(PROMPTS[:3], FREE)
        check_texts(outputs, PROMPTS[:3])
        assert {output.text for output in outputs} == {""} and engine.vocab_size == toy.VOCAB
        with pytest.raises(ValueError, match="has no tokenizer: give prompts"):
            engine.generate("the ant")
        with pytest.raises(ValueError, match="sees no stop strings"):
            engine.generate([(9,)], replace(FREE, stop=("x",)))
        with pytest.raises(ValueError, match="has no tokenizer"):
            engine.tokenizer  # noqa: B018


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
    scheduler = engine._loop.scheduler
    pool = PrefixCache(PagePool(1 + need + need // 2), engine.limits.page_size)
    monkeypatch.setattr(engine._loop, "scheduler", Scheduler(scheduler.sizes, pool, worst_case=True))
    most = 0
    outputs: dict[int, RequestOutput] = {}
    for event in engine.stream(PROMPTS, FREE):
        most = max(most, engine.statistics().num_running)
        if event.output:
            outputs[event.index] = event.output
    check_texts([outputs[i] for i in range(len(PROMPTS))])
    assert most == 1 and pool.num_available == need + need // 2
    engine._loop.scheduler.check()


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


# ---- a GPU's memory ---------------------------------------------------------------------------------------

PLAN = MemoryPlan(weights=700, drafter_weights=0, pages=0, drafter_pages=0, buffers=60, logits=20, graphs=20)
LIMITS = limits_for(target().config, None, Options(max_rows=4, max_model_len=31))  # two pages a row


@pytest.mark.parametrize(("free", "pages"), [(9_000, 8), (1_280, 8), (1_279, 7), (1_160, 2)])
def test_pages_fill_the_share_of_memory_that_may_be_used(free: int, pages: int) -> None:
    """Of 10,000 bytes 90 % may be used, and 100 go to buffers and graphs; pages of 20 bytes, page 0 beside them."""
    assert fit_pages(LIMITS, PLAN, 20, (free, 10_000), 0.9).num_pages == 1 + pages


def test_one_row_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(MemoryError, match=r"one row: 31 tokens .* lower max_model_len .* gpu_memory_utilization"):
        fit_pages(LIMITS, PLAN, 20, (1_159, 10_000), 0.9)


def test_running_out_of_memory_is_one_message() -> None:
    with pytest.raises(MemoryError, match="out of GPU memory while capturing: lower max_rows"):
        with memory_remedy("capturing", "lower max_rows"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")


def test_bytes_of_a_page_are_those_of_its_buffers() -> None:
    configs = (target().config, prophet().config)
    specs = {spec.name: spec for spec in specs_of(LIMITS, *configs, torch.bfloat16)}
    cached = specs["cache"].nbytes + specs["draft_cache"].nbytes
    assert page_bytes(configs, LIMITS.page_size, torch.bfloat16) * LIMITS.num_pages == cached


# ---- a GPU's shapes ---------------------------------------------------------------------------------------

GPU = torch.device("cuda")


def gpu_shapes(max_rows: int, budget: int | None = None) -> list[RoundShape]:
    config = replace(prophet().config, block_size=16)
    options = Options(max_rows=max_rows, max_model_len=60)
    limits = limits_for(target().config, config, options, forecast=auto_buckets(config, GPU))
    return padded_shapes(limits, budget, GPU, Estimate(0.2))


@pytest.mark.parametrize("max_rows", [1, 5, 8, 32, 128, 300])
def test_few_shapes_are_captured_and_every_batch_has_one(max_rows: int) -> None:
    shapes = gpu_shapes(max_rows)
    assert len(shapes) == len(set(shapes)) <= MAX_SHAPES
    for sampler in ("argmax", "general"):
        mine = [shape for shape in shapes if shape.sampler == sampler]
        counts = {shape.rows for shape in mine}
        assert counts == {1 << n for n in range(9) if 1 << n < max_rows} | {max_rows}
        for rows in counts:
            assert RoundShape(rows, rows, 0, 0, sampler) in mine, "plain decoding"
            assert any(shape.block for shape in mine if shape.rows == rows), "and a tree"


def test_small_batches_get_large_trees_and_large_batches_short_blocks() -> None:
    trees = [shape for shape in gpu_shapes(128) if shape.block and shape.sampler == "argmax"]
    best = {rows: [shape for shape in trees if shape.rows == rows] for rows in (1, 128)}
    assert {shape.places for shape in best[1]} >= {64} and min(shape.block for shape in best[1]) >= 8
    assert max(shape.places for shape in best[128]) <= 1024 and min(shape.block for shape in best[128]) == 2


def test_a_fixed_budget_gets_its_bucket_alone() -> None:
    shapes = gpu_shapes(8, budget=15)
    assert {(shape.block, shape.places // shape.rows - 1) for shape in shapes} == {(0, 0), (16, 15)}
    assert {shape.block for shape in gpu_shapes(8, budget=0)} == {0}
    assert {shape.nodes for shape in shapes if shape.rows == 1 and shape.block} == {15}
