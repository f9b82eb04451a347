# Owns: the engine: texts, ends, streams, run-ahead, aborts.
# Promises: every text equals the dense one, cut by rules written here; after every test all seats and pages are back.
# Never: trusts the engine's own autoregressive mode as an oracle.
"""Engine over a toy pair on disk; its drafter is swapped for one that is right often enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.core.request import SamplingParams, compare
from ratoon.ops import sample
from ratoon.runtime import chooser as chooser_module
from ratoon.runtime import engine as engine_module
from ratoon.runtime.engine import Engine, StreamEvent
from ratoon.runtime.staging import StagingRing
from ratoon.runtime.text import Detokenizer, Tokenizer
from ratoon.spec.budget import BudgetPolicy, CostTable, Curve
from tests.cpu import toy
from tests.cpu.engines import FREE, MAX_LEN, METHODS, NUM, PROMPTS, Maker, check_idle, check_texts, target, text_of
from tests.cpu.toy import Ask, Text, assert_same_text, dense_text


@pytest.fixture(scope="module", autouse=True)
def _wide_groups() -> Iterator[None]:
    """The sampler's groups are sized for real vocabularies; of a toy's they would be thousands. No bit changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "_CPU_ROWS", 32)
        yield


# ---- texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=["tree", "chain", "ar"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_more_prompts_than_seats(make: Maker, tokenizer: Tokenizer, run_ahead: int, method: dict[str, Any]) -> None:
    engine = make(run_ahead=run_ahead)
    outputs = engine.generate(PROMPTS, replace(FREE, **method))
    check_texts(outputs)
    for output in outputs:
        assert output.text == tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length" and len(output.token_ids) == NUM
        assert sum(output.accepted) + output.rounds == NUM and output.tau == NUM / output.rounds
        assert len(output.gaps) == len(output.runner_ups) == len(output.top_logits) == len(output.edge_gaps) == NUM
        assert output.ttft_s > 0 and output.decode_s > 0
    assert (max(output.tau for output in outputs) > 2) == ("budget" in method)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_rows_of_every_kind_share_a_batch(make: Maker, run_ahead: int) -> None:
    """Joins and ends at different times, methods, budgets and samplers: each text is its own."""
    engine = make(run_ahead=run_ahead)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5, ignore_eos=True)
    params, want = [], []
    for i, prompt in enumerate(PROMPTS):
        each = replace(sampled if i % 3 == 2 else FREE, max_tokens=5 + 3 * i, **METHODS[i % 2 or 2 * (i % 4 // 2)])
        params.append(each)
        want.append(dense_text(target(), Ask(prompt, each.max_tokens, params=each, seed=5)))
    for prompt, each, text, output in zip(PROMPTS, params, want, engine.generate(PROMPTS, params), strict=True):
        assert_same_text(text, Text(tokens=list(output.token_ids)), f"{prompt} {each}")


@pytest.mark.parametrize(("mode", "run_ahead"), [("static", 0), ("static", 2), ("graph", 1), ("staged", 0)])
def test_every_mode_gives_the_text(make: Maker, mode: str, run_ahead: int) -> None:
    engine = make.new(mode=mode, run_ahead=run_ahead, max_rows=2, max_model_len=48, budget=3)
    check_texts(engine.generate(PROMPTS[:3], FREE), PROMPTS[:3])
    check_texts(engine.generate(PROMPTS[:1], replace(FREE, method="ar")), PROMPTS[:1])
    check_idle(engine)
    engine.close()


def test_an_automatic_budget_gives_the_text_and_counts_its_choices(make: Maker) -> None:
    engine = make(budget="auto")
    assert engine.settings.budget is None
    check_texts(engine.generate(PROMPTS, FREE))
    mixed = [FREE, replace(FREE, budget=15), replace(FREE, method="ar")] * 2
    check_texts(engine.generate(PROMPTS[:6], mixed), PROMPTS[:6])
    counters = engine.counters()
    buckets = {name: count for name, count in counters.items() if name.startswith("bucket_")}
    assert engine._chooser.policy is not None
    assert sum(buckets.values()) == sum(engine._chooser.policy.decisions.values()) > 0
    assert counters["tokens"] == NUM * (len(PROMPTS) + 6)
    assert not engine._chooser.policy._seats, "a finished request leaves the policy"


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_the_policy_is_told_how_large_the_trees_were(make: Maker, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded round builds only what its shape holds; a live one builds for the largest bucket."""
    steep = CostTable({4: Curve((1,), (0.1,)), 8: Curve((1,), (0.2,))}, Curve((1, 2), (1.0, 1.3)))
    monkeypatch.setattr(chooser_module, "measure_costs", lambda *_: steep)
    engine = make.new(budget="auto", mode=mode, max_rows=1, max_model_len=48)
    told = []
    real = BudgetPolicy.observe
    monkeypatch.setattr(BudgetPolicy, "observe", lambda self, *args: told.append(args) or real(self, *args))
    check_texts([engine.generate(PROMPTS[0], FREE)[0]], PROMPTS[:1])
    assert {args[1] for args in told} <= set(engine.limits.forecast)
    largest = max(nodes for _, nodes in engine.limits.forecast)
    for _, bucket, mass, accepted, built in told:
        assert built == (largest if mode == "eager" else bucket[1]) and accepted <= bucket[1] < largest
        assert len(mass) == len(engine.limits.forecast)
    engine.close()


def test_a_real_drafter_from_disk(model: Path, drafter: Path) -> None:
    sizes = {"dtype": "float32", "max_rows": 2, "max_model_len": MAX_LEN, "page_size": 4, "budget": 15}
    with Engine(str(model), drafter=str(drafter), **sizes) as engine:
        assert engine.drafter is not None and engine.model == str(model)
        assert (engine.mode, engine.dtype, engine.device) == ("eager", "float32", "cpu")
        check_texts(engine.generate(PROMPTS[:4], FREE), PROMPTS[:4])
        assert engine.runner.round.drafter is not None


@pytest.mark.parametrize("none", ["none", None])
def test_without_a_drafter_it_is_autoregressive(model: Path, none: str | None) -> None:
    with Engine(str(model), drafter=none, dtype="float32", max_rows=2, max_model_len=MAX_LEN) as engine:
        assert engine.drafter is None and engine.settings.method == "ar"
        outputs = engine.generate(PROMPTS[:3], FREE)
        check_texts(outputs, PROMPTS[:3])
        assert {output.rounds for output in outputs} == {NUM}


def test_bfloat16_differs_at_near_ties_only(make: Maker) -> None:
    half = toy.make_target().to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "load_model", lambda *_: half)
        patch.setattr(engine_module, "load_drafter", lambda *_: toy.make_drafter().to(torch.bfloat16))
        engine = Engine(str(make.model), drafter=str(make.drafter), dtype="bfloat16", max_rows=3, budget=15)
    plain = engine.generate(PROMPTS, replace(FREE, method="ar"))
    for method in METHODS[:2]:
        verdicts = [
            compare(ours, theirs, "bfloat16").verdict
            for ours, theirs in zip(plain, engine.generate(PROMPTS, replace(FREE, **method)), strict=True)
        ]
        assert "mismatch" not in verdicts, verdicts
        assert verdicts.count("identical") >= 4
    engine.close()


# ---- prompts and parameters -------------------------------------------------------------------------------


def test_prompts_come_as_text_as_ids_and_alone(make: Maker, tokenizer: Tokenizer) -> None:
    engine = make()
    ids = tokenizer.encode("the ant")
    (by_text,) = engine.generate("the ant", FREE)
    (by_ids,) = engine.generate(ids, FREE)
    first, second = engine.generate(["the ant", (9,)], FREE)
    assert by_text.prompt_token_ids == tuple(ids)
    assert by_text.token_ids == by_ids.token_ids == first.token_ids
    check_texts([second], [(9,)])
    assert engine.generate([]) == []


def test_parameters_default_to_greedy(make: Maker) -> None:
    (output,) = make().generate((9,))
    want = dense_text(target(), Ask((9,), 128, stop_ids=(toy.EOS,))).tokens
    assert list(output.token_ids) == want[: MAX_LEN - 1]


def test_no_text_is_made_before_somebody_reads_it(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stop strings a request that is not streamed is detokenised once."""
    engine, calls = make(), []
    real = Detokenizer.put
    monkeypatch.setattr(Detokenizer, "put", lambda self, ids: calls.append(list(ids)) or real(self, ids))
    (output,) = engine.generate(PROMPTS[0], FREE)
    assert calls == [list(output.token_ids)] and output.text == engine.tokenizer.decode(output.token_ids)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_seed_gives_one_text_and_no_seed_many(make: Maker, run_ahead: int) -> None:
    engine = make(run_ahead=run_ahead)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)
    want = dense_text(target(), Ask((9,), 12, params=params, seed=3))
    mixed = engine.generate([(9,)] * 5, [params, replace(params, method="ar"), replace(params, seed=4), params, params])
    for index in (0, 1, 3, 4):
        assert_same_text(want, Text(tokens=list(mixed[index].token_ids)), f"copy {index}")
    assert mixed[2].token_ids != mixed[0].token_ids
    fresh = engine.generate([(9,)] * 3, replace(params, seed=None))
    assert len({output.token_ids for output in fresh}) == 3


# ---- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_the_models_stop_id_is_the_last_token_and_no_text(make: Maker, tokenizer: Tokenizer, run_ahead: int) -> None:
    engine = make(run_ahead=run_ahead)
    outputs = engine.generate(PROMPTS, replace(FREE, ignore_eos=False))
    stopped = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = text_of(prompt).tokens
        end = want.index(toy.EOS) + 1 if toy.EOS in want else NUM
        assert list(output.token_ids) == want[:end]
        assert output.finish_reason == ("stop" if toy.EOS in want else "length")
        assert output.text == tokenizer.decode(want[:end]) and "<eos>" not in output.text
        stopped += output.finish_reason == "stop"
    assert 0 < stopped < len(PROMPTS)


@pytest.mark.parametrize("method", METHODS, ids=["tree", "chain", "ar"])
def test_stop_ids_of_the_request_hold_even_without_eos(make: Maker, method: dict[str, Any]) -> None:
    for prompt in PROMPTS[:4]:
        want = text_of(prompt).tokens
        index = next(i for i in range(5, NUM) if want[i] not in want[:i])
        (output,) = make().generate(prompt, replace(FREE, stop_token_ids=(want[index],), **method))
        assert list(output.token_ids) == want[: index + 1] and output.finish_reason == "stop"
        assert output.rounds <= index + 1


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_max_tokens_is_exact(make: Maker, num: int, run_ahead: int) -> None:
    for output, prompt in zip(make(run_ahead=run_ahead).generate(PROMPTS, replace(FREE, max_tokens=num)), PROMPTS):  # noqa: B905
        assert list(output.token_ids) == text_of(prompt).tokens[:num] and output.finish_reason == "length"


def test_the_context_limit_is_exact(make: Maker) -> None:
    outputs = make().generate([PROMPTS[2], PROMPTS[0]], replace(FREE, max_tokens=1000))
    for output, prompt in zip(outputs, (PROMPTS[2], PROMPTS[0]), strict=True):
        room = MAX_LEN - len(prompt)
        assert list(output.token_ids) == text_of(prompt, room).tokens and output.finish_reason == "length"
    whole = PROMPTS[2] + tuple(text_of(PROMPTS[2], 40).tokens)
    (output,) = make().generate(whole[: MAX_LEN - 1], FREE)  # room for one token
    assert output.token_ids == whole[MAX_LEN - 1 : MAX_LEN] and output.finish_reason == "length"


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Text so far after each token, as long as characters are whole."""
    return [tokenizer.decode(tokens[: i + 1]).rstrip("\ufffd") for i in range(len(tokens))]


def cut(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[int], str]:
    """Tokens up to the first that completes a stop string, text up to its earliest stop string."""
    for count, text in enumerate(pieces(tokenizer, tokens), start=1):
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return list(tokens[:count]), text[: min(found)]
    return list(tokens), tokenizer.decode(tokens)


@pytest.mark.parametrize(("method", "run_ahead"), [(METHODS[0], 0), (METHODS[0], 2), (METHODS[1], 1), (METHODS[2], 0)])
def test_stop_strings_wherever_they_are(
    make: Maker, tokenizer: Tokenizer, method: dict[str, Any], run_ahead: int
) -> None:
    """Every stop string of two or three characters of a text: inside a token, across tokens, inside a path."""
    engine = make(run_ahead=run_ahead)
    asked, params = [], []
    for prompt in PROMPTS[:3]:
        text = tokenizer.decode(text_of(prompt).tokens)
        for begin in range(1, len(text) - 3, 3):
            asked.append(prompt)
            params.append(replace(FREE, stop=(text[begin : begin + 2 + begin % 2], "never"), **method))
    early = 0
    for prompt, each, output in zip(asked, params, engine.generate(asked, params), strict=True):
        tokens, text = cut(tokenizer, text_of(prompt).tokens, each.stop)
        assert (list(output.token_ids), output.text) == (tokens, text)
        assert output.finish_reason == "stop" and len(output.gaps) == len(tokens)
        assert sum(output.accepted) + output.rounds == len(tokens), "what is cut was not accepted"
        early += len(tokens) < NUM - 2
    assert early > len(asked) / 2


def test_the_earliest_of_several_stop_strings_wins(make: Maker, tokenizer: Tokenizer) -> None:
    want = text_of(PROMPTS[0]).tokens
    text = tokenizer.decode(want)
    stops = (text[9:11], text[4:6], text[5:8])
    (output,) = make().generate(PROMPTS[0], replace(FREE, stop=stops))
    assert output.text == text[: min(text.find(stop) for stop in stops)]


def test_a_stop_string_at_the_very_end_cuts_the_last_text(make: Maker, tokenizer: Tokenizer) -> None:
    want = text_of(PROMPTS[0]).tokens[:10]
    text = tokenizer.decode(want)
    stop = text[-2:]
    assert text.find(stop) == len(text) - 2
    (output,) = make().generate(PROMPTS[0], replace(FREE, max_tokens=10, stop=(stop,)))
    assert output.text == text[:-2] and output.finish_reason == "stop" and list(output.token_ids) == want


def test_half_a_character_waits_for_its_other_half(make: Maker, tokenizer: Tokenizer) -> None:
    first, second = toy.TOKENS.index("\u00c3"), toy.TOKENS.index("\u00a9")
    base = replace(FREE, max_tokens=6, method="ar")
    halves = [event.text for event in make().stream((9,), replace(base, logit_bias={first: 100.0}))]
    assert halves[:2] == ["", "\ufffd"] and "".join(halves) == "\ufffd" * 6
    (output,) = make().generate((9,), replace(base, logit_bias={first: 100.0, second: 100.0}))
    assert output.text == tokenizer.decode(output.token_ids)


# ---- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_stream_is_the_output_in_pieces(make: Maker, tokenizer: Tokenizer, run_ahead: int) -> None:
    engine = make(run_ahead=run_ahead)
    stop = tokenizer.decode(text_of(PROMPTS[0]).tokens)[9:12]
    params = [replace(FREE, stop=(stop,) if i == 0 else ("zzz", "the q")) for i in range(len(PROMPTS))]
    events: dict[int, list[StreamEvent]] = {}
    for event in engine.stream(PROMPTS, params):
        events.setdefault(event.index, []).append(event)
    assert sorted(events) == list(range(len(PROMPTS)))
    for index, mine in events.items():
        output = mine[-1].output
        assert output is not None and mine[-1].finish_reason == output.finish_reason
        assert all(event.output is None and event.finish_reason is None for event in mine[:-1])
        assert "".join(event.text for event in mine) == output.text
        assert tuple(token for event in mine for token in event.token_ids) == output.token_ids
        assert len(mine) == output.rounds if index else True
    text = "".join(event.text for event in events[0])
    assert stop not in text and text == tokenizer.decode(text_of(PROMPTS[0]).tokens).split(stop)[0]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("events", [1, 2, 7])
def test_closing_a_stream_aborts_what_is_left(make: Maker, run_ahead: int, events: int) -> None:
    engine = make(run_ahead=run_ahead)
    stream = engine.stream(PROMPTS, FREE)
    for _ in range(events):
        next(stream)
    stream.close()
    check_idle(engine)
    check_texts(engine.generate(PROMPTS[:2], FREE), PROMPTS[:2])


def test_a_stream_that_was_never_started_leaves_nothing(make: Maker) -> None:
    engine = make()
    stream = engine.stream(PROMPTS, FREE)
    check_idle(engine)
    del stream
    check_texts(engine.generate(PROMPTS[:1], FREE), PROMPTS[:1])


@pytest.mark.parametrize("step", ["launch", "read", "prefill", "join", "round.verify", "round.accept_commit"])
@pytest.mark.parametrize("run_ahead", [1])
@pytest.mark.parametrize("early", [True, False])
def test_ctrl_c_leaves_the_engine_usable(
    make: Maker, monkeypatch: pytest.MonkeyPatch, run_ahead: int, step: str, early: bool
) -> None:
    """An interrupt before or after any step of the device side, so also between a commit and its result."""
    engine = make(run_ahead=run_ahead)
    owner = engine.runner.round if "." in step else engine.runner
    step = step.removeprefix("round.")
    real, calls = getattr(owner, step), []

    def interrupted(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if early and len(calls) == 3:
            raise KeyboardInterrupt
        result = real(*args, **named)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, FREE)
    monkeypatch.undo()
    check_idle(engine)
    check_texts(engine.generate(PROMPTS[2:4], FREE), PROMPTS[2:4])


@pytest.mark.parametrize("mode", ["static", "graph"])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_ctrl_c_inside_a_fill_leaves_the_engine_usable(
    make: Maker, monkeypatch: pytest.MonkeyPatch, mode: str, number: int
) -> None:
    """Between the staging ring's `acquire` and `sent`: of a join, a round's seats, a later join."""
    engine = make(mode=mode, run_ahead=1, max_rows=2, max_model_len=48, budget=3, birth_test="off")
    real, calls = StagingRing.sent, []

    def interrupted(ring: StagingRing, index: int) -> None:
        calls.append(index)
        if len(calls) == number:
            raise KeyboardInterrupt
        real(ring, index)

    monkeypatch.setattr(StagingRing, "sent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:3], FREE)
    monkeypatch.undo()
    check_idle(engine)
    check_texts(engine.generate(PROMPTS[2:4], FREE), PROMPTS[2:4])


def test_two_streams_at_once_are_refused(make: Maker) -> None:
    engine = make()
    stream = engine.stream(PROMPTS[:2], FREE)
    next(stream)
    with pytest.raises(RuntimeError, match="stream is still open"):
        engine.generate(PROMPTS[2], FREE)
    rest = [event for event in stream if event.output]
    assert [event.index for event in rest] == [0, 1] or [event.index for event in rest] == [1, 0]
    for event in rest:
        assert event.output is not None
        check_texts([event.output], [PROMPTS[event.index]])


def test_events_carry_trees_while_asked_for(make: Maker) -> None:
    engine = make()
    engine.trace_trees = True
    longest = 0
    for event in engine.stream(PROMPTS[:2], FREE):
        assert event.tree is not None and event.path[0] == 0
        path = [int(event.tree.token[node - 1]) for node in event.path[1:]]
        assert path == list(event.token_ids[: len(path)])
        longest = max(longest, len(path))
    engine.trace_trees = False
    assert longest > 3
    assert all(event.tree is None for event in engine.stream(PROMPTS[:1], FREE))
