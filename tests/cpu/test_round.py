# Owns: the round invariant (METHOD section 1): what commit leaves in state, target cache and draft cache.
# Promises: after every round both caches are held against one dense pass over the committed tokens.
# Never: looks at text alone: a wrong slot may stay silent for a while.
"""The round, seen from its state. S: slots, L: layers, K: heads, D: head dim, X: taps wide, R: rows, B: block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash, visible
from ratoon.models.layers import Apart
from ratoon.ops.tree import TreeBatch, forecast_mass
from ratoon.runtime.runner import Mode
from tests.cpu import toy
from tests.cpu.toy import Ask, Bench, Prophet, Seat, Text, assert_same_text, dense_text
from tests.dense import DenseCausal

PROMPTS = ((5, 6, 7), (9,), tuple(range(10, 27)), (3, 1, 4, 1, 5, 9, 2, 6))
NUM = 28


@functools.cache
def target() -> Decoder:
    return toy.make_target()


@functools.cache
def greedy(prompt: tuple[int, ...]) -> Text:
    return dense_text(target(), Ask(prompt, NUM))


@functools.cache
def prophet() -> Prophet:
    """Right at any rank, so that the accepted nodes are seldom the first ones."""
    made = toy.make_prophet(lots=(0.6, 0.2, 0.1, 0.05, 0.05))
    for prompt in PROMPTS:
        made.learn(prompt + tuple(greedy(prompt).tokens))
    return made


def asks(budgets: Sequence[int] = (31, 15, 7, 0), num: int = NUM) -> list[Ask]:
    return [Ask(prompt, num, budget) for prompt, budget in zip(PROMPTS, budgets, strict=False)]


# ---- the invariant ----------------------------------------------------------------------------------------


def slots_of(bench: Bench, seat: Seat, length: int) -> list[int]:
    size = bench.limits.page_size
    return [seat.pages[i // size] * size + i % size for i in range(length)]


def dense_caches(target: Decoder, drafter: DFlash | None, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """[layers, S, 2, K, D] of the target and of the drafter's context, for these tokens and nothing else."""
    cache = DenseCausal(target.config.num_layers)
    position = torch.arange(len(ids))
    _, taps = target(torch.tensor(ids), position, cache, drafter.config.target_layer_ids if drafter else ())
    keys = torch.stack([k for k in cache.keys if k is not None])
    values = torch.stack([v for v in cache.values if v is not None])
    if drafter is None or taps is None:
        return torch.stack((keys, values), dim=2), None
    context = drafter.context_kv(drafter.context_feature(taps), position)
    return torch.stack((keys, values), dim=2), torch.stack(context, dim=2)


def check_invariant(bench: Bench, seat: Seat) -> None:
    """Tokens 0..start are committed, number `start` is the anchor, both caches hold 0..start-1."""
    state, row = bench.runner.state, seat.number
    committed = [*seat.ask.prompt, *seat.text.tokens]
    start = int(state.start_S[row])
    assert start == len(committed) - 1
    assert int(state.anchor_S[row]) == committed[-1]
    assert bool(state.done_S[row]) == seat.text.done
    counts = torch.bincount(torch.tensor(seat.text.tokens, dtype=torch.int64), minlength=toy.VOCAB)
    assert torch.equal(state.sampler.output_count_SV[row].long(), counts)
    if not start:
        return
    drafter = bench.runner.round.drafter
    want, want_draft = dense_caches(target(), drafter, committed[:start])
    slots = slots_of(bench, seat, start)
    torch.testing.assert_close(bench.runner.table["cache"][:, slots], want, atol=2e-4, rtol=1e-4)
    if want_draft is not None:
        torch.testing.assert_close(bench.runner.table["draft_cache"][:, slots], want_draft, atol=2e-4, rtol=1e-4)


def check_rows(bench: Bench, seats: Sequence[Seat]) -> None:
    for seat in seats:
        check_invariant(bench, seat)


def check_dummies(bench: Bench) -> None:
    """Seat 0 and page 0 after any number of rounds."""
    state = bench.runner.state
    assert bool(state.done_S[0]) and int(state.start_S[0]) == 0 and not state.page_table_SP[0].any()
    assert not state.sampler.output_count_SV[0].any()
    bench.runner.table.check_dummies()
    bench.runner.table.check_canaries()


def poison_beyond(bench: Bench, seats: Sequence[Seat]) -> None:
    """NaN in every slot but page 0's and the committed ones: free pages, tails of pages, old scratch."""
    size = bench.limits.page_size
    kept = [*range(size)]
    for seat in seats:
        kept += slots_of(bench, seat, int(bench.runner.state.start_S[seat.number]))
    for name in bench.runner.table.names("kv"):
        cache = bench.runner.table[name]
        saved = cache[:, kept].clone()
        cache.fill_(float("nan"))
        cache[:, kept] = saved


@pytest.mark.parametrize(("mode", "page_size"), [("eager", 1), ("eager", 16), ("static", 1), ("static", 5)])
def test_both_caches_hold_the_committed_tokens_after_every_round(mode: Mode, page_size: int) -> None:
    bench = Bench(target(), prophet(), mode, nodes=31, page_size=page_size)
    bench.runner.trace = True
    seats = [bench.join(ask) for ask in asks()]
    check_rows(bench, seats)
    moved, straight = 0, 0
    while not all(seat.text.done for seat in seats):
        poison_beyond(bench, seats)
        launch = bench.launch(seats, bench.shape(4, 31, "argmax"))
        bench.read(seats, launch)
        for _, path in bench.runner.trees(launch).values():
            moved += list(path) != list(range(len(path)))
            straight += len(path) > 2 and list(path) == list(range(len(path)))
        check_rows(bench, seats)
        check_dummies(bench)
    for seat in seats:
        assert_same_text(greedy(seat.ask.prompt), seat.text, f"{mode}, pages of {page_size}")
    assert moved > 8 and straight > 2, "paths that move slots and paths that do not must both occur"


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_plain_rounds_project_the_taps_too(mode: Mode) -> None:
    """Else a page that was filled without drafting would lack draft K/V."""
    bench = Bench(target(), prophet(), mode, nodes=15, page_size=4)
    seats = [bench.join(ask) for ask in asks((0, 0, 0, 0), num=6)]
    bench.finish(seats, after=partial(check_rows, bench))
    assert {count for seat in seats for count in seat.text.num_nodes} == {0}


@pytest.mark.parametrize("order", ["neighbours", "reversed", "a gap later", "neighbours from page 9"])
def test_a_lone_row_is_read_wherever_its_pages_lie(order: str) -> None:
    """Neighbour pages are used in place, others gathered, and a row may go from one to the other as it grows."""
    bench = Bench(target(), prophet(), nodes=31, page_size=4, spare_pages=40)
    pages = bench.pool.take(bench.limits.num_pages - 1)
    if order == "neighbours from page 9":
        pages = pages[8:]
    if order == "reversed":
        pages.reverse()
    if order == "a gap later":
        pages[10:] = pages[11:]
    for prompt in (PROMPTS[2], PROMPTS[1]):
        seat = bench.join(Ask(prompt, NUM, 31), pages=pages[: bench.limits.pages_per_row])
        while not seat.text.done:
            poison_beyond(bench, [seat])
            bench.read([seat], bench.launch([seat]))
            check_invariant(bench, seat)
        assert_same_text(greedy(prompt), seat.text, order)
        bench.free.append(seat.number)


def test_a_prompt_of_one_token_drafts_without_any_context() -> None:
    bench = Bench(target(), prophet(), nodes=15)
    seat = bench.join(Ask((9,), NUM, 15))
    assert int(bench.runner.state.start_S[seat.number]) == 0
    poison_beyond(bench, [seat])
    bench.read([seat], bench.launch([seat]))
    assert seat.text.num_nodes == [15] and seat.text.tokens[0] == greedy(seat.ask.prompt).tokens[0]


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_shared_by_two_rows_is_read_by_both_and_written_by_none(mode: Mode, page_size: int) -> None:
    prefix = tuple(range(10, 27))
    pair = [Ask(prefix + tail, 20, 31) for tail in ((30, 31, 32), (40,))]
    made = toy.make_prophet(lots=(0.6, 0.2, 0.1, 0.05, 0.05))
    for ask in pair:
        made.learn(ask.prompt + tuple(dense_text(target(), ask).tokens))
    bench = Bench(target(), made, mode, rows=2, nodes=31, page_size=page_size)
    first = bench.join(pair[0])
    # At most floor((P - 1) / page size) full pages may be matched: the anchor's own slot is written.
    num_shared = min(len(prefix), len(pair[1].prompt) - 1) // page_size
    shared = first.pages[:num_shared]
    bench.pool.share(shared)
    own = bench.pool.take(bench.limits.pages_per_row - num_shared)
    second = bench.join(pair[1], pages=shared + own, computed=num_shared * page_size)
    slots = slots_of(bench, first, num_shared * page_size)
    frozen = {name: bench.runner.table[name][:, slots].clone() for name in ("cache", "draft_cache")}
    live = [first, second]
    while live:
        poison_beyond(bench, live)
        bench.read(live, bench.launch(live, bench.shape(2, 31, "argmax") if mode == "static" else None))
        check_rows(bench, live)
        for name, before in frozen.items():
            assert torch.equal(bench.runner.table[name][:, slots], before)
        live = [seat for seat in live if not seat.text.done]
    for seat in (first, second):
        assert_same_text(dense_text(target(), seat.ask), seat.text, "shared prefix")
    bench.pool.check()
    bench.leave(first)
    assert set(shared) <= bench.pool._holders.keys()
    bench.leave(second)
    assert bench.pool.num_free == bench.limits.num_pages - 1


# ---- where a row ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_stop_id_ends_the_row_wherever_it_is_on_the_path(mode: Mode) -> None:
    bench = Bench(target(), prophet(), mode, nodes=31, page_size=4)
    places_in_path = set()
    for prompt in PROMPTS[:3]:
        whole = greedy(prompt).tokens
        for index in range(len(whole)):
            if whole[index] in whole[:index] or index % 2:
                continue
            unused = next(token for token in range(toy.VOCAB) if token not in whole)
            seat = bench.join(Ask(prompt, NUM, 31, stop_ids=(unused, whole[index])))
            bench.finish([seat], after=partial(check_rows, bench))
            assert seat.text.tokens == whole[: index + 1]
            places_in_path.add(seat.text.accepted[-1])
    assert places_in_path >= {0, 1, 2, 3}


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_limit_ends_the_row_wherever_it_is_on_the_path(mode: Mode) -> None:
    bench = Bench(target(), prophet(), mode, nodes=31, page_size=4)
    for num in range(1, 10):
        seats = [bench.join(ask) for ask in asks((31, 15, 7, 31), num)]
        bench.finish(seats, after=partial(check_rows, bench))
        for seat in seats:
            assert seat.text.tokens == greedy(seat.ask.prompt).tokens[:num]
            assert sum(seat.text.accepted) + len(seat.text.accepted) == num


def test_a_stop_id_beyond_the_limit_is_not_reached() -> None:
    whole = greedy(PROMPTS[0]).tokens
    last = next(i for i in range(6, NUM) if whole[i] not in whole[:i])
    bench = Bench(target(), prophet(), nodes=31)
    seat = bench.join(Ask(PROMPTS[0], last, 31, stop_ids=(whole[last],)))
    bench.finish([seat])
    assert seat.text.tokens == whole[:last]


def test_every_stop_id_of_a_full_set_counts() -> None:
    whole = greedy(PROMPTS[2]).tokens
    others = tuple(token for token in range(toy.VOCAB) if token not in whole)[:7]
    first = [whole.index(token) for token in set(whole)]
    at = sorted(first)[5]
    bench = Bench(target(), prophet(), nodes=31)
    seat = bench.join(Ask(PROMPTS[2], NUM, 31, stop_ids=(*others, *[t for t in others], whole[at])))
    bench.finish([seat])
    assert seat.text.tokens == whole[: at + 1]


def test_only_a_row_that_meets_a_nan_is_bad() -> None:
    spoilt = toy.make_target()
    spoilt.embed.weight.data[33] = float("nan")
    bench = Bench(spoilt, None)
    seats = [bench.join(Ask(prompt, 4)) for prompt in ((5, 6), (33,), (7,))]
    results = bench.runner.read(bench.launch(seats))
    assert [result.bad for result in results] == [False, True, False]
    bench.runner.table.check_dummies()


# ---- the draft pass ---------------------------------------------------------------------------------------


def dense_draft(drafter: DFlash, target: Decoder, committed: Sequence[int]) -> Tensor:
    """Hidden of one block after these tokens (the last one is the anchor), by METHOD section 2 and nothing else."""
    config, start = drafter.config, len(committed) - 1
    block = torch.arange(start, start + config.block_size)
    cache = DenseCausal(target.config.num_layers)
    if start:
        _, taps = target(torch.tensor(committed[:-1]), torch.arange(start), cache, config.target_layer_ids)
        assert taps is not None
        keys, values = drafter.context_kv(drafter.context_feature(taps), torch.arange(start))
    else:
        keys = values = torch.zeros(config.num_layers, 0, config.num_kv_heads, config.head_dim)
    group = config.num_heads // config.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat(pair).repeat_interleave(group, 1) for pair in ((keys[layer], k), (values[layer], v)))
        where = torch.cat((torch.arange(start), block))
        seen = visible(block[:, None], where, config.windows[layer], config.causal[layer])
        score = torch.einsum("tnd,snd->nts", q, k) * config.head_dim**-0.5
        return torch.einsum("nts,snd->tnd", score.masked_fill(~seen, -torch.inf).softmax(-1), v)

    x = drafter.block_embeddings(target.embed.weight, torch.tensor([committed[-1]]), config.block_size)
    return drafter(x, block, Apart(attend))


VARIANTS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "use_sliding_window": True,
    },
    "bidirectional window": {"dflash_config_swa": 4},
    "anchor_first": {"anchor_first": True},
}


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_draft_hears_its_whole_context(variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the drafter computes over paged context equals the dense pass, row by row and round by round."""
    drafter = toy.make_drafter(5, **{k: v for k, v in VARIANTS[variant].items() if k != "dflash_config_swa"})
    if variant == "bidirectional window":
        config = replace(drafter.config, windows=(4, 4), causal=(False, False))
        drafter = toy.randomise(DFlash(config), 5, 1.0)
    heard: list[Tensor] = []
    real = DFlash.logits
    monkeypatch.setattr(DFlash, "logits", lambda self, h, head: heard.append(h.clone()) or real(self, h, head))
    bench = Bench(target(), drafter, mode, nodes=7, page_size=4)
    seats = [bench.join(ask) for ask in asks((7, 7, 7, 7), num=8)]
    for _ in range(4):
        heard.clear()
        committed = [[*seat.ask.prompt, *seat.text.tokens] for seat in seats]
        poison_beyond(bench, seats)
        bench.read(seats, bench.launch(seats, bench.shape(4, 7, "argmax")))
        got = heard[0].view(len(seats), drafter.config.num_drafts, -1)
        for row, tokens in enumerate(committed):
            want = dense_draft(drafter, target(), tokens)[drafter.config.first_prediction :]
            torch.testing.assert_close(got[row], want, atol=2e-4, rtol=1e-4)


# ---- small parts ------------------------------------------------------------------------------------------


def test_forecast_mass_sums_the_nodes_that_a_block_reaches() -> None:
    depth = torch.tensor([[1, 2, 1, 3, 2], [1, 1, 2, 1, 1]])
    p = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1], [0.6, 0.3, 0.1, 0.0, 0.0]])
    number = torch.zeros_like(depth)
    trees = TreeBatch(number, number, depth, number, p.log(), torch.tensor([5, 3]), 3)
    mass = forecast_mass(trees, ((2, 2), (3, 3), (3, 9), (4, 4), (8, 1)))
    torch.testing.assert_close(mass, torch.tensor([[0.8, 1.2, 1.3, 1.4, 0.5], [0.9, 1.0, 1.0, 1.0, 0.6]]))
    assert forecast_mass(trees, ()).shape == (2, 0)


def test_the_forecast_rides_with_the_result() -> None:
    sizes = ((4, 3), (8, 3), (8, 15))
    bench = Bench(target(), prophet(), nodes=15, forecast=sizes)
    seats = [bench.join(ask) for ask in asks((15, 3))]
    big, small = bench.runner.read(bench.launch(seats))
    assert 0 < big.mass[0] <= big.mass[1] < big.mass[2] and len(big.mass) == 3
    # A row of three nodes has no mass beyond them.
    assert small.mass[1] == pytest.approx(small.mass[2])


def test_sampled_rows_keep_the_invariant() -> None:
    params = SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.3)
    many = [replace(ask, params=params, seed=11 + i) for i, ask in enumerate(asks())]
    made = toy.make_prophet()
    for ask in many:
        made.learn(ask.prompt + tuple(dense_text(target(), ask).tokens))
    bench = Bench(target(), made, nodes=31, page_size=4)
    seats = [bench.join(ask) for ask in many]
    bench.finish(seats, after=partial(check_rows, bench))
    for seat in seats:
        assert_same_text(dense_text(target(), seat.ask), seat.text, "sampled")
    assert max(max(seat.text.accepted) for seat in seats) >= 5
