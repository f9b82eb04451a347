# Owns: the engine's loop under load: rows that come, go, yield and share beginnings, and asyncio callers.
# Promises: whatever the neighbours, pages and run-ahead, a request's text is the one it has alone.
# Never: trusts the loop's own plain decoding as an oracle where a dense one exists.
from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from ratoon.core.request import RequestOutput, SamplingParams
from ratoon.runtime.engine import Engine
from ratoon.runtime.pages import PagePool
from ratoon.runtime.prefix import PrefixCache
from ratoon.runtime.scheduler import Scheduler
from tests.cpu.engines import FREE, METHODS, NUM, PROMPTS, Maker, check_idle, check_texts, text_of
from tests.cpu.toy import Text, assert_same_text

PENALISED = SamplingParams(
    max_tokens=NUM, ignore_eos=True, temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.4
)


def squeeze(engine: Engine, rows: float, patch: pytest.MonkeyPatch) -> None:
    """Gives the idle engine pages for `rows` of the longest request here, and a fresh cache over them."""
    limits = engine.limits
    longest = -(-(max(map(len, PROMPTS)) + NUM + limits.scratch) // limits.page_size)
    sizes, enabled = engine._loop.scheduler.sizes, engine.settings.enable_prefix_caching
    cache = PrefixCache(PagePool(1 + int(rows * longest)), limits.page_size, enabled)
    patch.setattr(engine._loop, "scheduler", Scheduler(sizes, cache))


# ---- pages that run out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=["tree", "chain", "ar"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_rows_that_yield_go_on_with_their_text(
    make: Maker, method: dict, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seats over pages that two rows outgrow."""
    engine = make(run_ahead=run_ahead)
    squeeze(engine, 1.8, monkeypatch)
    outputs = engine.generate(PROMPTS, replace(FREE, **method))
    check_texts(outputs)
    assert engine.counters()["preemptions"] > 0
    assert all(output.ttft_s > 0 and len(output.token_ids) == NUM for output in outputs)
    check_idle(engine)


def test_what_was_emitted_before_yielding_stays_output_for_penalties_and_seed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(run_ahead=1)
    params = [replace(PENALISED, seed=seed) for seed in range(len(PROMPTS))]
    squeeze(engine, 3, monkeypatch)
    alone = [engine.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert not engine.counters()["preemptions"]
    squeeze(engine, 1.8, monkeypatch)
    together = engine.generate(PROMPTS, params)
    assert engine.counters()["preemptions"] > 0
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


# ---- shared beginnings --------------------------------------------------------------------------------------


def shared_prompts() -> list[tuple[int, ...]]:
    beginning = PROMPTS[2]
    return [(*beginning, 31, last) for last in range(6)]


def test_a_shared_beginning_is_computed_once_with_and_without_a_drafter(make: Maker) -> None:
    hits, taus = {}, {}
    for name, settings in (("tree", {}), ("plain", {"drafter": "none", "method": "ar"}), ("cold", {})):
        engine = make.new(**settings, enable_prefix_caching=name != "cold", **({} if settings else {"budget": 7}))
        with engine:
            outputs = [engine.generate([prompt], FREE)[0] for prompt in shared_prompts()]
            for prompt, output in zip(shared_prompts(), outputs, strict=True):
                assert_same_text(text_of(prompt), Text(tokens=list(output.token_ids)), f"{name} {prompt}")
            check_idle(engine)
            hits[name] = engine.counters()["prefix_hit_tokens"]
            taus[name] = [output.accepted for output in outputs]
    assert hits["tree"] == hits["plain"] > 0 and hits["cold"] == 0
    assert taus["tree"] == taus["cold"], "a hit carries the drafter's context too"


def test_a_request_that_goes_on_from_an_answer_finds_it(make: Maker) -> None:
    engine = make(run_ahead=1, page_size=4)
    [first] = engine.generate([PROMPTS[2]], FREE)
    before = engine.counters()["prefix_hit_tokens"]
    again = (*PROMPTS[2], *first.token_ids)
    engine.generate([again], replace(FREE, max_tokens=4))
    found = engine.counters()["prefix_hit_tokens"] - before
    assert found == (len(again) - 1) // 4 * 4
    check_idle(engine)


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_prefill_that_was_cut_off_is_found_by_nobody(
    make: Maker, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make.new(run_ahead=1)
    real = engine.runner.prefill

    def interrupted(*args: Any) -> None:
        if not early:
            real(*args)
        raise KeyboardInterrupt

    with engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.runner, "prefill", interrupted)
            engine.generate(PROMPTS[2], FREE)
        check_idle(engine)
        check_texts(engine.generate(PROMPTS[2], FREE), [PROMPTS[2]])
        assert engine.counters()["prefix_hit_tokens"] == 0


# ---- everything at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_random_joins_leaves_and_budgets(
    make: Maker, run_ahead: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come and are aborted at random, over a pool that two rows outgrow; memory ends as it began."""
    engine, rng = make(run_ahead=run_ahead, enable_prefix_caching=cached), random.Random(run_ahead)
    squeeze(engine, 1.8, monkeypatch)
    loop, live, finished = engine._loop, [], 0
    for _ in range(40):
        prompt = PROMPTS[rng.randrange(len(PROMPTS))]
        params = replace(FREE, budget=rng.choice((0, 1, 3, 7, 31, "auto")), max_tokens=rng.randint(1, NUM))
        [row] = engine._intake.rows([prompt], params, priority=rng.randrange(2))
        loop.submit(row)
        live.append(row)
        for _ in range(rng.randrange(5)):
            for done, event in loop.turn():
                if event.output is not None and event.finish_reason != "abort":
                    finished += 1
                    check_beginning(done.prompt, event.output)
        if rng.random() < 0.2:
            loop.abort(live[rng.randrange(len(live))])
        loop.scheduler.check()
    while loop.busy:
        for done, event in loop.turn():
            if event.output is not None and event.finish_reason != "abort":
                finished += 1
                check_beginning(done.prompt, event.output)
    assert finished > 20 and engine.counters()["preemptions"] > 0
    check_idle(engine)


def check_beginning(prompt: tuple[int, ...], output: RequestOutput) -> None:
    whole, tokens = text_of(prompt), list(output.token_ids)
    assert_same_text(replace(whole, tokens=whole.tokens[: len(tokens)]), Text(tokens=tokens), f"prompt {prompt}")


def test_a_deadline_ends_a_request_and_no_other(make: Maker) -> None:
    engine = make(run_ahead=1)
    [late] = engine._intake.rows([PROMPTS[0]], FREE, timeout_s=1e-9)
    [fine] = engine._intake.rows([PROMPTS[1]], FREE)
    for row in (late, fine):
        engine._loop.submit(row)
    reasons = {}
    while engine._loop.busy:
        reasons |= {row.prompt: event.finish_reason for row, event in engine._loop.turn() if event.output}
    assert reasons == {PROMPTS[0]: "abort", PROMPTS[1]: "length"}
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        engine.generate(PROMPTS[0], FREE, timeout_s=0)
    check_idle(engine)


# ---- asyncio ------------------------------------------------------------------------------------------------


async def collect(engine: Engine, prompt: tuple[int, ...], params: SamplingParams = FREE) -> RequestOutput:
    tokens: list[int] = []
    async for event in engine.stream_async(prompt, params):
        tokens += event.token_ids
        if event.output is not None:
            assert tuple(tokens) == event.output.token_ids
            return event.output
    raise AssertionError("a stream ends with its output")


def check_idle_soon(engine: Engine) -> None:
    """The last round in flight is read after its callers have left."""
    until = time.monotonic() + 20
    while engine._loop.busy and time.monotonic() < until:
        time.sleep(0.01)
    check_idle(engine)


def test_many_tasks_share_one_engine(make: Maker) -> None:
    async def all_of_them(engine: Engine) -> list[RequestOutput]:
        return await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))

    with make.new(run_ahead=1) as engine:
        check_texts(asyncio.run(all_of_them(engine)))
        with pytest.raises(RuntimeError, match="serves asyncio callers"):
            engine.generate(PROMPTS[0], FREE)
        check_idle_soon(engine)


def test_a_task_that_leaves_aborts_its_request_alone(make: Maker) -> None:
    async def leave_early(engine: Engine) -> None:
        async for event in engine.stream_async(PROMPTS[2], replace(FREE, budget=0)):
            if event.token_ids:
                return

    async def both(engine: Engine) -> RequestOutput:
        other, _ = await asyncio.gather(collect(engine, PROMPTS[1]), leave_early(engine))
        return other

    with make.new(run_ahead=1) as engine:
        output = asyncio.run(both(engine))
        check_texts([output], [PROMPTS[1]])
        check_idle_soon(engine)


def test_every_task_hears_of_a_failure_and_the_engine_goes_on(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(engine: Engine) -> list[object]:
        tasks = (collect(engine, prompt) for prompt in PROMPTS[:3])
        return await asyncio.gather(*tasks, return_exceptions=True)

    with make.new(run_ahead=1) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "read", lambda launch: 1 / 0)
            patch.setattr(engine._loop, "abort_all", lambda real=engine._loop.abort_all: (patch.undo(), real()))
            heard = asyncio.run(failing(engine))
        assert [type(one) for one in heard] == [ZeroDivisionError] * 3
        check_texts([asyncio.run(collect(engine, PROMPTS[0]))], [PROMPTS[0]])
        check_idle_soon(engine)


def test_an_engine_that_cannot_be_emptied_tells_everyone_and_takes_no_more(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a GPU's fault: whatever is asked of it fails."""

    async def ask(engine: Engine) -> list[object]:
        tasks = (collect(engine, prompt) for prompt in PROMPTS[:3])
        heard = await asyncio.gather(*tasks, return_exceptions=True)
        return [*heard, *await asyncio.gather(collect(engine, PROMPTS[3]), return_exceptions=True)]

    with make.new(run_ahead=1) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "read", lambda launch: 1 / 0)
            heard = asyncio.run(asyncio.wait_for(ask(engine), 30))
        assert [type(one) for one in heard] == [*[ZeroDivisionError] * 3, RuntimeError]
        assert str(heard[3]) == "the engine was closed"
        engine._background.close()  # pyright: ignore[reportOptionalMemberAccess]
        engine._loop.abort_all()
        check_idle(engine)


def test_an_engine_that_is_closed_says_so(make: Maker) -> None:
    async def closed_under(engine: Engine) -> None:
        async for _ in engine.stream_async(PROMPTS[0], FREE):
            engine._background.close()  # pyright: ignore[reportOptionalMemberAccess]

    engine = make.new(run_ahead=1)
    with engine, pytest.raises(RuntimeError, match="the engine was closed"):
        asyncio.run(closed_under(engine))
