# Owns: the tests of ops/sample.py and ops/order.py.
# Promises: draws are held against distributions and orders written by others or in plain Python.
# Never: needs a model.
"""Order, draws, and the loop over groups of places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import logits_process as hf

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops import order, sample
from ratoon.ops.sample import Draw, SamplerState
from ratoon.runtime.emulator import EmulatorBackend
from tests.cpu.sampling import (
    ALL_FILTERS,
    KINDS,
    assert_same,
    by_value_then_id,
    chi_square,
    hugging_face,
    over_seeds,
    places,
    random_logits,
    state_for,
)


@pytest.mark.parametrize(("vocab", "k"), [(7, 3), (97, 97), (1024, 5), (1031, 6), (5000, 1), (5000, 30)])
def test_top_ordered_breaks_ties_by_id(vocab: int, k: int) -> None:
    x_TV = random_logits(4, vocab, scale=2.0).round()
    x_TV[1] = -0.0
    x_TV[1, vocab // 2] = 0.0
    x_TV[2] = -math.inf
    value_Tk, id_Tk = order.top_ordered(x_TV, k)
    for row in range(4):
        assert id_Tk[row].tolist() == by_value_then_id(x_TV[row], k)
    assert torch.equal(value_Tk, x_TV.gather(1, id_Tk))


@pytest.mark.parametrize("vocab", [5, 128, 1000, 1024])
def test_greedy_is_argmax_with_gap_and_runner_up(vocab: int) -> None:
    x_TV = random_logits(6, vocab, scale=2.0)
    x_TV[1] = x_TV[1].round()
    x_TV[2] = 1.5
    x_TV[3, vocab - 1] = x_TV[3, 2] = 9.0
    x_TV[4] = -math.inf
    x_TV[4, 0] = 1.0
    x_TV[5, vocab - 2 :] = torch.tensor([20.0, 19.0])
    drawn = sample.greedy(x_TV)
    for row in (0, 1, 2, 3, 5):
        best, second, third = by_value_then_id(x_TV[row], 3)
        assert [int(each[row]) for each in (drawn.token_T, drawn.runner_up_T, drawn.third_T)] == [best, second, third]
        assert float(drawn.gap_T[row]) == float(x_TV[row, best] - x_TV[row, second])
        assert float(drawn.third_gap_T[row]) == float(x_TV[row, best] - x_TV[row, third])
        assert float(drawn.top_logit_T[row]) == float(x_TV[row, best])
    assert (int(drawn.token_T[4]), int(drawn.runner_up_T[4]), float(drawn.gap_T[4])) == (0, -1, math.inf)
    assert (int(drawn.third_T[4]), float(drawn.third_gap_T[4])) == (-1, math.inf)
    assert drawn.edge_gap_T.isinf().all() and (drawn.edge_token_T == -1).all()


@pytest.mark.parametrize("vocab", [1, 2])
def test_a_tiny_vocabulary_has_no_third(vocab: int) -> None:
    drawn = sample.greedy(torch.tensor([[3.0, 4.0]])[:, :vocab])
    assert (int(drawn.token_T), int(drawn.runner_up_T)) == ((0, -1) if vocab == 1 else (1, 0))
    assert (int(drawn.third_T), float(drawn.third_gap_T)) == (-1, math.inf)


# ---- draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_a_batch(kind: SamplerKind) -> None:
    rows = [SamplingParams(temperature=0.5 + 0.1 * row, top_k=20, top_p=0.9, min_p=0.01) for row in range(5)]
    x_TV = random_logits(5, 3001)
    state, (seat_T, position_T, _) = state_for(3001, rows), places(5)
    batch = sample.draw(x_TV, state, seat_T, position_T, kind, edges=True)
    for row in range(5):
        at = slice(row, row + 1)
        assert_same(sample.draw(x_TV[at], state, seat_T[at], position_T[at], kind, edges=True), batch, at)
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = sample.draw(x_TV[order], state, seat_T[order], position_T[order], kind)
    assert torch.equal(shuffled.token_T, batch.token_T[order]) and torch.equal(shuffled.gap_T, batch.gap_T[order])


def test_kinds_agree_where_they_overlap() -> None:
    num, vocab = 64, 777
    seat_T, position_T, _ = places(num)
    x_TV = random_logits(num, vocab, seed=2)

    def tokens(kind: SamplerKind, params: SamplingParams) -> Draw:
        return sample.draw(x_TV, state_for(vocab, [params] * num), seat_T, position_T, kind, edges=True)

    free = SamplingParams(temperature=1.0)
    assert_same(tokens("plain", free), tokens("general", free))
    nucleus = SamplingParams(temperature=1.0, top_p=0.7, min_p=0.02)
    assert_same(tokens("nucleus", nucleus), tokens("general", nucleus))
    narrow, general = tokens("narrow", ALL_FILTERS), tokens("general", ALL_FILTERS)
    for name in ("token_T", "gap_T", "runner_up_T", "top_logit_T", "third_T", "third_gap_T"):
        assert torch.equal(getattr(narrow, name), getattr(general, name)), name
    for kind in KINDS:
        assert_same(sample.greedy(x_TV), tokens(kind, SamplingParams(top_k=2, top_p=0.1, min_p=0.9)))


def test_greedy_and_sampled_rows_mix() -> None:
    x_TV = random_logits(4, 300)
    rows = [SamplingParams(), ALL_FILTERS, SamplingParams(top_k=1), SamplingParams(temperature=1.0, top_k=50)]
    seat_T, position_T, _ = places(4)
    mixed = sample.draw(x_TV, state_for(300, rows), seat_T, position_T, "general")
    assert mixed.token_T[::2].tolist() == x_TV[::2].argmax(1).tolist()
    sampled = sample.draw(x_TV[1:2], state_for(300, rows), seat_T[1:2], position_T[1:2], "general")
    assert int(mixed.token_T[1]) == int(sampled.token_T[0])


def test_a_draw_is_the_best_perturbed_score_and_its_gap_is_in_logits() -> None:
    params = SamplingParams(temperature=1.6, seed=11)
    x_TV = random_logits(1, 40)
    seat_T, position_T, _ = places(1)
    drawn = sample.draw(x_TV, state_for(40, [params]), seat_T, position_T, "plain")
    noise_TV = sample.gumbel_noise(torch.tensor([11]), torch.tensor([0]), position_T, 40)
    value, ranking = (x_TV / 1.6 + noise_TV).sort(dim=1, descending=True)
    assert [int(each) for each in (drawn.token_T, drawn.runner_up_T, drawn.third_T)] == ranking[0, :3].tolist()
    assert float(drawn.gap_T) == pytest.approx(1.6 * float(value[0, 0] - value[0, 1]), rel=1e-5)
    assert float(drawn.third_gap_T) == pytest.approx(1.6 * float(value[0, 0] - value[0, 2]), rel=1e-5)
    assert float(drawn.top_logit_T) == float(x_TV.max())


def test_sample_index_and_position_change_the_noise() -> None:
    rows = [SamplingParams(temperature=1.0, seed=5, sample_index=index) for index in range(40)]
    x_TV = torch.zeros(40, 1000)
    seat_T = torch.arange(1, 41)
    state = state_for(1000, rows)
    by_index = sample.draw(x_TV, state, seat_T, torch.full((40,), 9), "plain").token_T
    by_position = sample.draw(x_TV, state, torch.ones(40, dtype=torch.int64), torch.arange(40), "plain").token_T
    assert len(set(by_index.tolist())) > 30 and len(set(by_position.tolist())) > 30


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("plain", SamplingParams(temperature=1.2)),
        ("nucleus", SamplingParams(temperature=1.2, top_p=0.9, min_p=0.02)),
        ("narrow", SamplingParams(temperature=1.2, top_k=7, top_p=0.95, min_p=0.02)),
        ("general", SamplingParams(temperature=1.2, top_k=7, top_p=0.95, min_p=0.02)),
    ],
)
def test_draws_follow_the_exact_distribution_over_seeds(
    kind: SamplerKind, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_CPU_ROWS", 6000)
    num, x_V = 6000, random_logits(11, seed=8, scale=1.5)
    state = over_seeds(state_for(11, [params]), num)
    drawn = sample.draw(x_V.expand(num, 11), state, torch.arange(num), torch.full((num,), 77), kind)
    statistic, bound = chi_square(drawn.token_T, hugging_face(x_V.unsqueeze(0), params).softmax(1)[0])
    assert statistic < bound


def test_penalised_draws_follow_the_exact_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_CPU_ROWS", 6000)
    num, x_V = 6000, random_logits(11, seed=9, scale=1.5)
    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={1: 1.5},
    )
    state = state_for(11, [params], penalties=True, max_bias=1)
    sample.write_seat(state, 1, params, torch.tensor([3, 4]), 0)
    sample.count_tokens(state, torch.tensor([1]), torch.tensor([[4, 5]]))
    path_TD = torch.tensor([[5, 6]]).expand(num, 2)
    expected_V = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 4, 5, 6]]), x_V.unsqueeze(0))[0]  # type: ignore[arg-type]
    expected_V = expected_V - 0.2 * torch.tensor([0, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0])
    expected_V = expected_V - 0.4 * torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
    expected_V[1] += 1.5
    state, row_T = over_seeds(state, num), torch.arange(num)
    logits_TV = sample.penalise(x_V.expand(num, 11), state, row_T, path_TD)
    drawn = sample.draw(logits_TV, state, row_T, torch.full((num,), 5), "nucleus")
    statistic, bound = chi_square(drawn.token_T, hugging_face(expected_V.unsqueeze(0), params).softmax(1)[0])
    assert statistic < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_of_scores_goes_to_the_lower_id(kind: SamplerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TV = random_logits(1, 200)
    monkeypatch.setattr(sample, "gumbel_noise", lambda *_: -x_TV)
    monkeypatch.setattr(sample, "gumbel_at", lambda seed, index, position, token_TK: -x_TV.gather(1, token_TK))
    params = SamplingParams(temperature=1.0) if kind == "plain" else SamplingParams(temperature=1.0, top_k=5)
    seat_T, position_T, _ = places(1)
    drawn = sample.draw(x_TV, state_for(200, [params]), seat_T, position_T, kind)
    best = range(200) if kind in ("plain", "nucleus") else by_value_then_id(x_TV[0], 5)
    assert [int(drawn.token_T), int(drawn.runner_up_T)] == sorted(best)[:2]
    assert float(drawn.gap_T) == 0.0


# ---- groups, masks, rounding -------------------------------------------------------------------------------


class Head:
    """A head in float32, and the same one rounded to bf16."""

    def __init__(self, vocab: int, hidden: int) -> None:
        self.weight_VH = random_logits(vocab, hidden, seed=1, scale=1.0)

    def exact(self, hidden_TH: Tensor) -> Tensor:
        return (hidden_TH.unsqueeze(1) * self.weight_VH).sum(-1)

    def rounded(self, hidden_TH: Tensor) -> Tensor:
        return self.exact(hidden_TH).bfloat16().float()

    def rescore(self, hidden_TH: Tensor, token_TK: Tensor) -> Tensor:
        return self.exact(hidden_TH).gather(1, token_TK)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_groups_do_not_change_a_draw(kind: SamplerKind) -> None:
    head, rows = Head(200, 8), 7
    greedy = kind in ("argmax", "greedy")
    params = SamplingParams(
        temperature=0.0 if greedy else 0.9,
        top_k=10,
        top_p=0.9,
        repetition_penalty=1.0 if kind == "argmax" else 1.4,
    )
    state = state_for(200, [params] * rows, penalties=kind != "argmax")
    seat_T, position_T, path_TD = places(rows)
    path_TD = torch.randint(-1, 200, path_TD.shape, generator=torch.Generator().manual_seed(3))
    hidden_TH = random_logits(rows, 8, seed=2, scale=1.0)
    common = (hidden_TH, head.exact, state, seat_T, position_T, path_TD, kind)
    whole = sample.sample_places(*common, group=rows)
    for group in (1, 3, 100):
        assert_same(sample.sample_places(*common, group=group), whole)
    logits_TV = head.exact(hidden_TH)
    if kind != "argmax":
        logits_TV = sample.penalise(logits_TV, state, seat_T, path_TD)
    assert_same(sample.draw(logits_TV, state, seat_T, position_T, kind), whole)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "general"])
def test_rescoring_undoes_the_rounding(kind: SamplerKind) -> None:
    head, rows = Head(400, 64), 300
    params = SamplingParams(temperature=0.0 if kind in ("argmax", "greedy") else 0.3, top_k=5)
    state, (seat_T, position_T, path_TD) = state_for(400, [params] * rows), places(rows)
    hidden_TH = random_logits(rows, 64, seed=2, scale=3.0)
    common = (state, seat_T, position_T, path_TD, kind)
    exact = sample.sample_places(hidden_TH, head.exact, *common, group=50)
    rounded = sample.sample_places(hidden_TH, head.rounded, *common, group=50)
    rescored = sample.sample_places(hidden_TH, head.rounded, *common, group=50, rescore=head.rescore)
    assert not torch.equal(rounded.token_T, exact.token_T)
    assert torch.equal(rescored.token_T, exact.token_T)
    assert torch.equal(rescored.gap_T, exact.gap_T) and torch.equal(rescored.runner_up_T, exact.runner_up_T)


def test_rescored_ties_go_to_the_lower_id() -> None:
    x_TV = torch.tensor([[1.0, 4.0, 2.0, 4.0, 3.0]])
    drawn = sample.greedy_rescored(x_TV, x_TV, lambda _, token_TK: torch.full(token_TK.shape, 7.0))
    assert (int(drawn.token_T), int(drawn.runner_up_T), float(drawn.gap_T)) == (0, 1, 0.0)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_a_mask_bans_tokens(kind: SamplerKind) -> None:
    head, rows = Head(90, 8), 30
    params = SamplingParams(temperature=0.0 if kind in ("argmax", "greedy") else 1.5, top_k=40)
    state, (seat_T, position_T, path_TD) = state_for(90, [params] * rows), places(rows)
    mask_TV = torch.full((rows, 90), -math.inf)
    mask_TV.scatter_(1, torch.arange(rows).unsqueeze(1), 0.0)
    hidden_TH = random_logits(rows, 8, seed=2)
    common = (hidden_TH, head.rounded, state, seat_T, position_T, path_TD, kind)
    drawn = sample.sample_places(*common, group=8, mask_TV=mask_TV, rescore=head.rescore)
    assert drawn.token_T.tolist() == list(range(rows))


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_nothing_is_read_on_the_host(kind: SamplerKind) -> None:
    """Fake tensors have no values, so a read or a data-dependent shape raises."""
    with FakeTensorMode():
        state = SamplerState.allocate(4, 500, 2, True)
        seat_T, position_T = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
        path_TD = torch.ones(3, 2, dtype=torch.int64)
        drawn = sample.sample_places(
            torch.ones(3, 8),
            lambda hidden_GH: hidden_GH.new_ones(len(hidden_GH), 500),
            state,
            seat_T,
            position_T,
            path_TD,
            kind,
            group=2,
            rescore=lambda hidden_GH, token_GK: hidden_GH.new_ones(token_GK.shape),
            edges=True,
        )
        sample.count_tokens(state, seat_T, path_TD)
        assert drawn.token_T.shape == drawn.edge_gap_T.shape == (3,)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_a_replay_draws_from_new_values(kind: SamplerKind) -> None:
    """Captured for one batch, replayed for another: no value is baked."""
    head = Head(300, 8)
    greedy = kind in ("argmax", "greedy")
    params = SamplingParams(temperature=0.0 if greedy else 1.1, top_k=20, top_p=0.9, presence_penalty=0.5)
    state = state_for(300, [params] * 3, penalties=True, max_bias=2)
    hidden_TH, (seat_T, position_T, path_TD) = random_logits(3, 8, scale=0.5), places(3)
    out = [torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3)]

    def step() -> None:
        drawn = sample.sample_places(
            hidden_TH, head.rounded, state, seat_T, position_T, path_TD, kind, group=2, rescore=head.rescore
        )
        for target, source in zip(out, (drawn.token_T, drawn.gap_T, drawn.edge_gap_T), strict=True):
            target.copy_(source)
        sample.count_tokens(state, seat_T, drawn.token_T.unsqueeze(1))

    backend = EmulatorBackend(allow_undeclared=True)
    graph = backend.capture(step, {})
    counts = torch.zeros_like(state.output_count_SV)
    for turn in range(2):
        hidden_TH.copy_(random_logits(3, 8, seed=turn + 5, scale=0.5))
        position_T.add_(7)
        state.output_count_SV.copy_(counts)
        backend.replay(graph)
        replayed, counts_after = [each.clone() for each in out], state.output_count_SV.clone()
        state.output_count_SV.copy_(counts)
        step()
        for ours, theirs in zip(replayed, out, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(state.output_count_SV, counts_after)
        counts = counts_after
    assert int(counts.sum()) == 6
