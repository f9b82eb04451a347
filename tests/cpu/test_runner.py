# Owns: speculative = autoregressive, and graph = static, through the real runner.
# Promises: every text is held against one that no page, tree, seat or batch had a part in, and that one against HF.
# Never: trusts one mode as the oracle of another's tokens.
"""All four modes over a toy pair whose drafter is right often enough for every shape of accepted path."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratoon.core.request import SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.ops import sample
from ratoon.runtime import prefill as prefill_module
from ratoon.runtime.costs import measure_costs, measure_rounds
from ratoon.runtime.graphs import first_difference
from ratoon.runtime.prefill import chunk_sizes, chunks
from ratoon.runtime.runner import Mode
from ratoon.spec.state import RoundShape
from tests.cpu import toy
from tests.cpu.toy import Ask, Bench, Prophet, Text, assert_same_text, dense_text

BUDGETS, CAPS = (0, 1, 7, 15, 31, 63), (1, 4, 8, 0)
PROMPTS = ((5, 6, 7), (9,), tuple(range(10, 30)), (3, 1, 4, 1, 5, 9, 2, 6))
BLOCK = 16


@functools.cache
def target() -> Decoder:
    return toy.make_target()


@functools.cache
def text_of(prompt: tuple[int, ...], num: int = 24) -> Text:
    return dense_text(target(), Ask(prompt, num))


@functools.cache
def prophet(block_size: int = BLOCK, anchor_first: bool = False) -> Prophet:
    made = toy.make_prophet(block_size=block_size, anchor_first=anchor_first)
    for prompt in PROMPTS:
        made.learn(prompt + tuple(text_of(prompt).tokens))
    return made


def asks_of(pairs: Sequence[tuple[int, int]]) -> list[Ask]:
    """One ask per (budget, cap), over the prompts in turn."""
    return [Ask(PROMPTS[i % len(PROMPTS)], budget=n, cap=cap) for i, (n, cap) in enumerate(pairs)]


def check(asks: Sequence[Ask], texts: Sequence[Text], what: str) -> None:
    for ask, text in zip(asks, texts, strict=True):
        assert_same_text(text_of(ask.prompt, ask.num), text, f"{what}, {ask}")
        assert sum(text.accepted) + len(text.accepted) == len(text.tokens)
        assert max(text.num_nodes) <= ask.budget


PAIRS = list(itertools.product(BUDGETS, CAPS))
# Each batch holds four budgets and four caps; over the batches every pair meets.
BATCHES = [[PAIRS[(start + 7 * i) % len(PAIRS)] for i in range(4)] for start in range(0, len(PAIRS), 4)]
BATCHES += [[(63, 0)], [(15, 8), (31, 4)], [(7, 1), (0, 8), (1, 4)], [(0, 1), (0, 0)], [(1, 1)]]


@functools.cache
def bench(mode: Mode, page_size: int) -> Bench:
    captured = [(4, 63, "argmax"), (4, 15, "argmax"), (4, 0, "argmax")]
    return Bench(target(), prophet(), mode, page_size=page_size, captured=captured)


@pytest.fixture(scope="module", autouse=True)
def _wide_groups() -> Iterator[None]:
    """The sampler's groups are sized for real vocabularies; of a toy's they would be thousands. No bit changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "_CPU_ROWS", 32)
        yield


@pytest.fixture(scope="module", autouse=True)
def _free_benches() -> Iterator[None]:
    yield
    bench.cache_clear()


# ---- speculative = autoregressive -------------------------------------------------------------------------


def test_pairs_are_covered() -> None:
    assert {pair for batch in BATCHES for pair in batch} == set(PAIRS)
    assert {len(batch) for batch in BATCHES} == {1, 2, 3, 4}


def hugging_face(ours: Decoder) -> LlamaForCausalLM:
    """The same weights in `transformers`' Llama."""
    names = {key: toy.TARGET[key] for key in toy.TARGET if key not in ("architectures", "model_type")}
    theirs = LlamaForCausalLM(LlamaConfig(**names, attn_implementation="eager")).eval()  # type: ignore[arg-type]
    theirs.generation_config.eos_token_id = None
    theirs.load_state_dict(toy.hf_weights(ours))
    return theirs


def test_the_dense_text_is_hugging_faces_greedy_text() -> None:
    theirs = hugging_face(target())
    for prompt in PROMPTS:
        ids = theirs.generate(  # type: ignore[operator]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        want = ids[0, len(prompt) :].tolist()
        assert_same_text(text_of(prompt), Text(tokens=want), f"Hugging Face, {prompt}")
    assert len({token for prompt in PROMPTS for token in text_of(prompt).tokens}) > 20


@pytest.mark.parametrize("page_size", [1, 16])
def test_eager_gives_the_dense_text(page_size: int) -> None:
    accepted: set[int] = set()
    for batch in BATCHES:
        asks = asks_of(batch)
        texts = bench("eager", page_size).run(asks)
        check(asks, texts, f"eager, pages of {page_size}")
        accepted |= {count for text in texts for count in text.accepted}
    bench("eager", page_size).pool.check()
    assert accepted >= set(range(9)), "the drafter must be right for any number of tokens"


@pytest.mark.parametrize(("mode", "page_size"), [("static", 1), ("static", 16), ("graph", 16), ("staged", 1)])
def test_padded_modes_give_the_dense_text(mode: Mode, page_size: int) -> None:
    used = bench(mode, page_size)
    for batch in BATCHES[page_size % 2 :: 2 if mode == "static" else 3]:
        asks = asks_of(batch)
        most = max(budget for budget, _ in batch)
        bucket = next(nodes for nodes in (0, 15, 63) if nodes >= most)
        check(asks, used.run(asks, shape=used.shape(4, bucket, "argmax")), f"{mode}, pages of {page_size}")
    used.pool.check()


def test_a_chain_is_a_tree_of_cap_1_and_a_budget_is_filled_as_far_as_it_goes() -> None:
    asks = asks_of([(63, 1), (5, 1), (63, 2), (20, 0)])
    texts = bench("eager", 16).run(asks)
    check(asks, texts, "filled")
    assert [max(text.num_nodes) for text in texts] == [BLOCK - 1, 5, 63, 20]
    assert max(texts[0].accepted) > 5 and max(texts[1].accepted) == 5


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_trees_of_more_than_one_word_of_bits(mode: Mode) -> None:
    used = Bench(target(), prophet(), mode, nodes=127, page_size=4)
    asks = asks_of([(127, 0), (63, 8), (64, 0), (100, 4)])
    texts = used.run(asks, shape=used.shape(4, 127, "argmax") if mode == "static" else None)
    check(asks, texts, mode)
    assert [max(text.num_nodes) for text in texts] == [127, 63, 64, 100]


def test_the_drafter_pays() -> None:
    """A wire cut anywhere in draft, build or walk would show here first."""
    rounds = [len(text.accepted) for text in bench("eager", 16).run(asks_of([(0, 1), (15, 1), (15, 0), (63, 0)]))]
    plain, chain, tree, big = rounds
    assert plain == 24 and chain < 14 and tree < 10 and big <= tree


@pytest.mark.parametrize(
    "drafter",
    [
        toy.make_drafter(block_size=16),
        toy.make_drafter(3, block_size=4, layer_types=["sliding_attention", "full_attention"], sliding_window=3,
                         use_sliding_window=True),
        toy.make_drafter(4, anchor_first=True),
    ],
    ids=["full", "sliding", "anchor_first"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_drafter_that_knows_nothing_changes_nothing(drafter: DFlash, mode: Mode) -> None:
    used = Bench(target(), drafter, mode, nodes=31, page_size=4)
    asks = asks_of([(31, 0), (3, 1), (16, 8), (0, 1)])
    check(asks, used.run(asks), mode)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_anchor_first_drafts_one_token_more(mode: Mode) -> None:
    drafter = prophet(4, True)
    used = Bench(target(), drafter, mode, nodes=15, page_size=4)
    asks = asks_of([(15, 0), (4, 1), (15, 1), (0, 1)])
    texts = used.run(asks)
    check(asks, texts, mode)
    assert max(texts[2].num_nodes) == 4 and max(texts[2].accepted) == 4


def test_without_a_drafter_there_are_only_roots() -> None:
    used = Bench(target(), None, "eager")
    asks = asks_of([(0, 1)] * 4)
    check(asks, used.run(asks), "no drafter")
    assert "draft_cache" not in used.runner.table and used.limits.max_nodes == 0


@pytest.mark.parametrize("nodes", [1, 6, 14])
def test_a_shape_smaller_than_the_budgets_shares_its_places(nodes: int) -> None:
    used = bench("static", 16)
    asks = asks_of([(63, 0), (15, 8), (7, 4), (31, 0)])
    shape = replace(used.shape(4, 15, "argmax"), places=4 + nodes, nodes=nodes)
    texts = used.run(asks, shape=shape)
    check(asks, texts, f"{nodes} nodes for all")
    for counts in itertools.zip_longest(*(text.num_nodes for text in texts), fillvalue=0):
        assert sum(counts) <= nodes
    assert sum(map(sum, (text.num_nodes for text in texts))) > 0


def test_a_smaller_block_drafts_less_deep() -> None:
    used = bench("static", 16)
    asks = asks_of([(63, 0), (15, 1), (31, 4), (63, 1)])
    texts = used.run(asks, shape=replace(used.shape(4, 63, "argmax"), block=4))
    check(asks, texts, "block 4")
    assert max(max(text.accepted) for text in texts) == 3


# ---- graph = static ---------------------------------------------------------------------------------------


def differences(one: Bench, other: Bench) -> list[str]:
    """Everything that outlives a round, without seat 0 and page 0."""
    found = []
    for name in one.runner.table.names("state", "kv"):
        spec = one.runner.table.spec(name)
        parts = [spec.live_part(bench.runner.table[name]) for bench in (one, other)]
        found.append(first_difference(name, *parts))
    return [str(each) for each in found if each is not None]


MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=1.1, top_k=12, min_p=0.02),
    SamplingParams(frequency_penalty=0.5, logit_bias={3: 2.0, 0: -1.0}),
)


@pytest.mark.parametrize("mode", ["graph", "staged"])
def test_a_replay_is_the_static_round_bit_for_bit(mode: Mode) -> None:
    drafter = prophet(8)
    shapes = [(4, 15, "general"), (4, 7, "argmax"), (4, 0, "argmax"), (2, 3, "argmax")]
    pair = [
        Bench(target(), drafter, each, nodes=15, page_size=4, captured=shapes, forecast=((4, 3), (8, 15)))
        for each in ("static", mode)
    ]
    plain = asks_of([(15, 0), (15, 4), (9, 1), (0, 1)])
    asks = [replace(ask, params=params, seed=7) for ask, params in zip(plain, MIXED, strict=True)]
    seats = [[bench.join(ask) for ask in asks] for bench in pair]
    late = Ask((30, 31, 32, 33), num=9, budget=7, cap=2)
    for number, bucket in enumerate([0, 0, 0, 1, 2, 0, 0, 3, 1, 1, 2, 0]):
        if number == 5:  # one leaves, another takes its seat and its pages
            for bench, row in zip(pair, seats, strict=True):
                bench.leave(row.pop(1))
                row.append(bench.join(late))
        if number == 7:
            for row in seats:
                del row[2:]
        results = []
        for bench, row in zip(pair, seats, strict=True):
            launch = bench.launch(row, bench.shape(*shapes[bucket]))
            results.append(bench.runner.read(launch))
            for seat, result in zip(row, results[-1], strict=True):
                seat.text.add(result)
        assert results[0] == results[1], f"round {number}"
        assert any(result.tokens for result in results[0])
        assert not differences(*pair), f"round {number}"
    assert max(seats[0][0].text.accepted) > 3
    assert pair[1].runner.graphs is not None and not pair[0].runner.graphs


def test_a_difference_would_be_seen() -> None:
    pair = [Bench(target(), prophet(8), "static", nodes=7, page_size=4) for _ in range(2)]
    for bench in pair:
        bench.join(Ask(PROMPTS[0]))
    assert not differences(*pair)
    pair[1].runner.table["draft_cache"][1, 4] += 1
    pair[1].runner.table["seat.start_S"][2] += 1
    assert [each.split("'")[1] for each in differences(*pair)] == ["seat.start_S", "draft_cache"]


# ---- joins ------------------------------------------------------------------------------------------------

TENANTS = (
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.1, seed=2**64 - 3, sample_index=2),
    SamplingParams(repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=0.25, logit_bias={3: 2.5, 0: -1.0}),
    SamplingParams(),
)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_record_writes_what_a_request_is(mode: Mode) -> None:
    """Each tenant after another one on the same seat, held against the sampler's own writer."""
    used = Bench(target(), prophet(), mode, nodes=15, page_size=4)
    state, vocab = used.runner.state, target().config.vocab_size
    for params in (*TENANTS, *reversed(TENANTS)):
        seed, prompt, pages = params.seed or 5, (7, 7, 3, 47), [9, 4, 11]
        used.runner.join(2, prompt, pages, params, (4, 40), seed, 30, 6, 3)
        want = sample.SamplerState.allocate(1, vocab, state.sampler.bias_token_SB.shape[1], penalties=True)
        sample.write_seat(want, 0, params, torch.tensor(prompt), seed)
        if not params.has_penalties:
            want.prompt_seen_SV.zero_()  # nobody reads it
        for field in fields(want):
            found = getattr(state.sampler, field.name)[2]
            assert torch.equal(found, getattr(want, field.name)[0]), f"{field.name} of {params}"
        scalars = (state.start_S, state.anchor_S, state.limit_S, state.budget_S, state.topk_cap_S, state.done_S)
        assert [x[2].item() for x in scalars] == [3, 47, 30, 6, 3, False]
        assert state.stop_id_SE[2, :3].tolist() == [4, 40, -1]
        assert state.page_table_SP[2, :4].tolist() == [9, 4, 11, 0]
        assert bool(state.done_S[[0, 1, 3, 4]].all()), "nobody else was seated"
        state.sampler.output_count_SV[2, 5] = 9  # what rounds leave behind
        used.runner.stop(2)
        assert bool(state.done_S[2])


# ---- prefill in chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4,), (4, 16), (3, 8, 32)])
def test_chunks_cover_every_position_once_and_stay_in_the_context(sizes: tuple[int, ...]) -> None:
    for begin, end, context in itertools.product(range(0, 40, 3), range(1, 50, 4), (50, 61)):
        made = list(chunks(begin, end, sizes, context))
        covered = [position for chunk in made for position in range(max(chunk.base, begin), chunk.end)]
        assert sorted(set(covered)) == list(range(begin, end))
        for chunk in made:
            assert chunk.size in sizes and 0 <= chunk.base < chunk.end <= chunk.base + chunk.size <= context
        assert sum(chunk.size for chunk in made) <= max(1.5 * (end - begin), 0) + sizes[0], "little is surplus"


def test_chunk_sizes_are_those_that_a_prompt_can_fill() -> None:
    assert chunk_sizes(100, 160) == (128,) and chunk_sizes(129, 300) == (128,)
    assert chunk_sizes(600, 700) == (128, 512) and chunk_sizes(4096, 4224) == (128, 512, 2048)
    assert chunk_sizes(40, 48) == (), "no chunk fits: prefill goes in exact sizes"


@pytest.mark.parametrize("mode", ["static", "graph"])
def test_padded_prefill_is_exact_prefill(mode: Mode) -> None:
    """Prompts that need several chunks, the last of which would reach past the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_module, "CHUNKS", (8, 32))
        padded = Bench(target(), prophet(), mode, nodes=7, page_size=4, max_len=60)
    exact = Bench(target(), prophet(), nodes=7, page_size=4, max_len=60)
    assert padded.runner.chunks == (8, 32) and exact.runner.chunks == ()
    for length in (1, 2, 9, 31, 44, 59):
        ask = Ask(tuple((5 * i + 3) % 48 for i in range(length)), num=1)
        seats = [bench.join(ask) for bench in (padded, exact)]
        for name in ("cache", "draft_cache"):
            slots = [page * 4 + slot for page in seats[0].pages for slot in range(4)][: length - 1]
            found, want = (bench.runner.table[name][:, slots] for bench in (padded, exact))
            torch.testing.assert_close(found, want, atol=2e-5, rtol=1e-4)
        for bench, seat in zip((padded, exact), seats, strict=True):
            bench.leave(seat)
    padded.runner.table.check_dummies()


# ---- results under lag ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_rounds_run_ahead_of_their_results(run_ahead: int) -> None:
    used = Bench(target(), prophet(), run_ahead=run_ahead)
    seats = [used.join(ask) for ask in asks_of([(15, 0), (7, 1), (0, 1)])]
    shape, flying = used.shape(3, 15, "argmax"), []
    while not all(seat.text.done for seat in seats):
        while len(flying) <= run_ahead:
            flying.append(used.launch(seats, shape))
        used.read(seats, flying.pop(0))
    rest = [used.runner.read(launch) for launch in flying]
    assert all(result.done and not result.tokens and not result.accepted for results in rest for result in results)
    for seat in seats:
        assert seat.text.tokens == text_of(seat.ask.prompt).tokens


def test_a_result_that_was_overwritten_is_not_read() -> None:
    used = bench("eager", 16)
    seat = used.join(Ask(PROMPTS[0], budget=3))
    first = used.launch([seat])
    used.launch([seat])
    with pytest.raises(AssertionError, match="not"):
        used.runner.read(first)
    used.leave(seat)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_stopped_seat_commits_nothing_more(mode: Mode) -> None:
    used = Bench(target(), prophet(), mode, nodes=15)
    seats = [used.join(ask) for ask in asks_of([(15, 0), (15, 0)])]
    used.read(seats, used.launch(seats))
    used.runner.stop(seats[0].number)
    state = used.runner.state
    start, anchor = int(state.start_S[seats[0].number]), int(state.anchor_S[seats[0].number])
    count = state.sampler.output_count_SV[seats[0].number].clone()
    for _ in range(3):
        result, other = used.runner.read(used.launch(seats))
        assert result.done and result.tokens == () and result.accepted == 0 and other.tokens
        assert result.num_nodes == 0 < other.num_nodes, "places are for those who can use them"
    assert int(state.start_S[seats[0].number]) == start and int(state.anchor_S[seats[0].number]) == anchor
    assert torch.equal(state.sampler.output_count_SV[seats[0].number], count)


def test_a_new_tenant_finds_nothing_of_the_last_one() -> None:
    used = Bench(target(), prophet(), rows=1)
    params = SamplingParams(temperature=1.3, top_k=5, logit_bias={1: 9.0}, frequency_penalty=1.0)
    heard_later = text_of(PROMPTS[1]).tokens
    used.run([Ask(PROMPTS[2], 20, 31, 0, params, (heard_later[5], heard_later[0]), 5)])
    fresh = Ask(PROMPTS[1], budget=15)
    check([fresh], used.run([fresh]), "second tenant")


def test_measuring_costs_touches_the_dummy_alone() -> None:
    pair = [Bench(target(), prophet(8), nodes=15, page_size=4, forecast=((4, 3), (8, 15))) for _ in range(2)]
    seats = [bench.join(Ask(PROMPTS[2], budget=15)) for bench in pair]
    for bench, seat in zip(pair, seats, strict=True):
        bench.read([seat], bench.launch([seat]))
    table = measure_costs(pair[1].runner.round, [4, 8], 15, torch.device("cpu"), repeats=1)
    assert not differences(*pair)
    pair[1].runner.table.check_dummies()
    assert set(table.draft) == {4, 8} and table.verify.sizes == (1, 4, 8, 16) and table.draft[8].sizes == (1, 4)
    assert min(*table.verify.ms, *table.draft[4].ms, *table.draft[8].ms) > 0
    for bench, seat in zip(pair, seats, strict=True):
        bench.finish([seat])
        assert seat.text.tokens == text_of(PROMPTS[2]).tokens


def test_captured_rounds_are_measured_and_only_they_are_choices() -> None:
    shapes = [(1, 0, "argmax"), (1, 3, "argmax"), (4, 0, "argmax"), (4, 0, "general")]
    used = Bench(target(), prophet(8), "graph", nodes=15, page_size=4, forecast=((4, 3), (8, 3)), captured=shapes)
    seat = used.join(Ask(PROMPTS[0], budget=3))
    before = int(used.runner.state.round_number)
    table = measure_rounds(used.runner, "argmax", repeats=1)
    assert int(used.runner.state.round_number) == before
    assert 0 < table.round_ms(1, (8, 3)) < float("inf") and table.round_ms(3, (0, 0)) == table.round_ms(4, (0, 0)) > 0
    assert {table.round_ms(1, (4, 3)), table.round_ms(2, (8, 3))} == {float("inf")}
    assert measure_rounds(used.runner, "general", repeats=1).round_ms(1, (8, 3)) == float("inf")
    used.finish([seat])
    assert seat.text.tokens == text_of(PROMPTS[0]).tokens


def test_fall_backs_are_counted_by_name() -> None:
    shapes = [(1, 3, "argmax"), (1, 0, "argmax"), (4, 7, "general"), (4, 0, "general")]
    used = Bench(target(), prophet(8), "graph", nodes=15, page_size=4, captured=shapes)
    fit, count = used.runner.fit, used.runner.fallbacks
    count.clear()
    assert fit(RoundShape(1, 3, 8, 2, "argmax")).places == 4 and not +count
    assert fit(RoundShape(1, 3, 4, 2, "argmax")).block == 8 and +count == {"fallback_longer_block": 1}
    assert fit(RoundShape(1, 4, 8, 3, "plain")).rows == 4 and count["fallback_more_rows"] == 1
    assert fit(RoundShape(2, 8, 8, 3, "argmax")) == RoundShape(2, 8, 8, 6, "argmax")
    assert fit(RoundShape(1, 9, 4, 8, "argmax")).rows == 1 and count["fallback_no_graph"] == 2
    assert fit(RoundShape(1, 1, 0, 0, "argmax")).block == 0, "a plain round drafts nothing"


# ---- what the runner shows --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_trees_carry_the_accepted_path(mode: Mode) -> None:
    used = Bench(target(), prophet(8), mode, nodes=15)
    used.runner.trace = True
    seats = [used.join(ask) for ask in asks_of([(15, 0), (6, 1), (0, 1)])]
    longest = 0
    for _ in range(5):
        launch = used.launch(seats)
        results, trees = used.runner.read(launch), used.runner.trees(launch)
        for seat, result in zip(seats, results, strict=True):
            tree, path = trees[seat.number]
            assert tree.num_nodes == result.num_nodes <= seat.ask.budget
            # A row that is cut short ends in a drafted node.
            assert len(path) - 1 in (result.accepted, result.accepted + result.done)
            assert tuple(int(tree.token[node - 1]) for node in path[1:]) == result.tokens[: len(path) - 1]
            assert [0, *tree.parent[[node - 1 for node in path[1:]]].tolist()] == [0, *path[:-1]]
            longest = max(longest, len(path))
        assert used.runner.trees(launch) == {}
    assert longest > 3


def test_eager_rounds_count_their_stages() -> None:
    used = Bench(target(), prophet(8), nodes=15)
    used.run([Ask(PROMPTS[0], budget=7)])
    assert set(used.runner.stage_ms) == {"ms_draft_build", "ms_verify", "ms_accept_commit"}
    assert min(used.runner.stage_ms.values()) > 0


@pytest.mark.parametrize("seat", [0, 5])
def test_the_dummy_seat_and_seats_beyond_the_engine_are_not_joined(seat: int) -> None:
    with pytest.raises(AssertionError, match="not allocatable"):
        bench("eager", 16).runner.join(seat, (1,), [1], SamplingParams(), (), 0, 4, 0, 1)
