# Owns: the tests of ops/filters.py and ops/penalties.py.
# Promises: each filter and penalty is held against an oracle written by others or in plain Python.
# Never: needs a model.
"""Penalties, filters, and near-ties at the edges of filters."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from transformers.generation import logits_process as hf

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops import penalties, sample
from ratoon.ops.sample import SamplerState
from tests.cpu.sampling import (
    ALL_FILTERS,
    FILTER_CASES,
    hugging_face,
    label,
    over_seeds,
    places,
    random_logits,
    state_for,
)


@pytest.mark.parametrize("params", FILTER_CASES, ids=label)
def test_filters_equal_hugging_face(params: SamplingParams) -> None:
    x_TV = random_logits(24, 501, seed=5)
    seat_T, _, path_TD = places(24)
    ours_TV = sample.process_logits(x_TV, state_for(501, [params] * 24), seat_T, path_TD)
    assert torch.equal(ours_TV, hugging_face(x_TV, params))


def test_filters_differ_per_row_and_greedy_rows_keep_all() -> None:
    rows = [*FILTER_CASES, SamplingParams(top_k=3, top_p=0.1, min_p=0.5)]
    x_TV = random_logits(len(rows), 501, seed=6)
    seat_T, _, path_TD = places(len(rows))
    ours_TV = sample.process_logits(x_TV, state_for(501, rows), seat_T, path_TD)
    for row, params in enumerate(FILTER_CASES):
        assert torch.equal(ours_TV[row : row + 1], hugging_face(x_TV[row : row + 1], params))
    assert torch.equal(ours_TV[-1], x_TV[-1])


@pytest.mark.parametrize(
    ("options", "survivors"),
    [
        ({"top_k": 3}, [1, 2, 3]),  # 1 is best; 2, 3, 5, 6 tie: the lower ids stay
        ({"top_k": 4}, [1, 2, 3, 5]),
        ({"top_p": 0.4}, [1]),  # of 18 parts 1 has 8, the four 2 each, 0 and 4 one each
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.6}, [1, 2, 3]),
        ({"top_p": 0.85}, [1, 2, 3, 5, 6]),
        ({"top_p": 0.9}, [0, 1, 2, 3, 5, 6]),
        ({"min_p": 0.2}, [1, 2, 3, 5, 6]),
        ({"top_k": 3, "top_p": 0.7}, [1, 2]),  # of 12 parts now
        ({"top_k": 3, "top_p": 0.9}, [1, 2, 3]),
    ],
)
def test_ties_at_a_filter_edge(options: dict[str, float], survivors: list[int]) -> None:
    x_V = torch.tensor([1.0, 8.0, 2.0, 2.0, 1.0, 2.0, 2.0]).log()
    state = state_for(7, [SamplingParams(temperature=1.0, **options)])  # type: ignore[arg-type]
    kept_TV = sample.process_logits(x_V.unsqueeze(0), state, *places(1)[::2])
    assert kept_TV[0].isfinite().nonzero().flatten().tolist() == survivors


def test_a_broken_row_spoils_no_other() -> None:
    """A NaN has no order: the row may keep anything, the others what they keep alone."""
    rows = [SamplingParams(temperature=1.0, top_k=9, top_p=0.8, min_p=0.1)] * 3
    x_TV = random_logits(3, 50)
    x_TV[0, 7] = math.nan
    x_TV[1] = -math.inf
    seat_T, position_T, path_TD = places(3)
    ours_TV = sample.process_logits(x_TV, state_for(50, rows), seat_T, path_TD)
    assert torch.equal(ours_TV[2:], hugging_face(x_TV[2:], rows[2]))
    kinds: tuple[SamplerKind, ...] = ("nucleus", "narrow", "general")
    for kind in kinds:
        token_T = sample.draw(x_TV, state_for(50, rows), seat_T, position_T, kind).token_T
        assert ((token_T >= 0) & (token_T < 50)).all()


# ---- penalties ---------------------------------------------------------------------------------------------


def test_repetition_penalty_equals_hugging_face() -> None:
    vocab, history = 50, [3, 3, 7, 20, 41]
    state = SamplerState.allocate(2, vocab, 0, True)
    for penalty in (1.3, 0.7):
        penalties.write_seat(state, 1, SamplingParams(repetition_penalty=penalty), torch.tensor(history[:3]), 0)
        penalties.count_tokens(state, torch.tensor([1]), torch.tensor([history[3:]]))
        x_TV = random_logits(1, vocab)
        theirs = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), x_TV)  # type: ignore[arg-type]
        assert torch.equal(penalties.penalise(x_TV, state, *places(1)[::2]), theirs)


def test_presence_and_frequency_count_output_only_and_bias_adds() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 2.0, 4: -3.0})
    state = SamplerState.allocate(3, 6, 3, True)
    penalties.write_seat(state, 1, params, torch.tensor([5, 1]), 0)
    penalties.write_seat(state, 2, SamplingParams(), torch.tensor([5, 1]), 0)
    penalties.count_tokens(state, torch.tensor([1, 2]), torch.tensor([[1, 1, 2, -1], [1, 1, 2, -1]]))
    x_TV = random_logits(2, 6)
    ours_TV = penalties.penalise(x_TV, state, *places(2)[::2])
    delta = torch.tensor([2.0, -1.0, -0.75, 0.0, -3.0, 0.0])
    torch.testing.assert_close(ours_TV[0], x_TV[0] + delta)
    assert torch.equal(ours_TV[1], x_TV[1])


def test_path_tokens_equal_sequential_commits() -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4)
    x_TV = random_logits(4, 12, seed=3)
    path_TD = torch.tensor([[-1, -1, -1], [2, -1, -1], [2, 2, -1], [0, 9, 0]])
    state = SamplerState.allocate(2, 12, 0, True)
    penalties.write_seat(state, 1, params, torch.tensor([9]), 0)
    penalties.count_tokens(state, torch.tensor([1]), torch.tensor([[7]]))
    seat_T = torch.ones(4, dtype=torch.int64)
    tree_TV = penalties.penalise(x_TV, state, seat_T, path_TD)
    assert int(state.output_count_SV.sum()) == 1  # the path is not committed
    for row in range(4):
        penalties.write_seat(state, 1, params, torch.tensor([9]), 0)
        penalties.count_tokens(state, torch.tensor([1]), torch.tensor([[7, *path_TD[row].tolist()]]))
        alone_TV = penalties.penalise(x_TV[row : row + 1], state, seat_T[:1], path_TD[:1])
        assert torch.equal(tree_TV[row], alone_TV[0])
    assert not torch.equal(tree_TV[0], tree_TV[1] - x_TV[1] + x_TV[0])


def test_counts_go_to_their_seat_and_padding_to_nobody() -> None:
    state = SamplerState.allocate(3, 5, 0, True)
    penalties.count_tokens(state, torch.tensor([2, 1]), torch.tensor([[4, 4, -1], [0, -1, -1]]))
    assert state.output_count_SV.tolist() == [[0] * 5, [1, 0, 0, 0, 0], [0, 0, 0, 0, 2]]


def test_a_seat_forgets_its_last_tenant() -> None:
    state = SamplerState.allocate(2, 8, 2, True)
    first = SamplingParams(
        temperature=0.5,
        top_k=2,
        top_p=0.5,
        min_p=0.5,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={1: 1.0, 2: 1.0},
        sample_index=4,
    )
    fresh = SamplerState.allocate(2, 8, 2, True)
    penalties.write_seat(state, 1, first, torch.tensor([1, 2]), 2**64 - 1)
    assert int(state.seed_S[1]) == -1
    penalties.count_tokens(state, torch.tensor([1]), torch.tensor([[1]]))
    for each in fields(SamplerState):
        before, after = getattr(fresh, each.name), getattr(state, each.name)
        assert not torch.equal(before, after), each.name
    penalties.write_seat(state, 1, SamplingParams(), torch.zeros(0, dtype=torch.int64), 0)
    for each in fields(SamplerState):
        assert torch.equal(getattr(fresh, each.name), getattr(state, each.name)), each.name


def test_a_state_refuses_what_it_was_not_made_for() -> None:
    state = SamplerState.allocate(2, 8, 1, False)
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="without penalties"):
        penalties.write_seat(state, 1, SamplingParams(presence_penalty=1.0), empty, 0)
    with pytest.raises(ValueError, match="logit_bias has 2 entries, this engine takes 1"):
        penalties.write_seat(state, 1, SamplingParams(logit_bias={0: 1.0, 1: 1.0}), empty, 0)


# ---- near-ties ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "token", "edge_token", "edge_gap"),
    [
        ([0.0, 1.0, 2.0, 0.0, 3.0], 1, 2, 0.02),  # 2 comes in and wins
        ([1.0, 0.0, 0.0, 2.0, 3.0], 0, 3, 0.03),  # 2 would lose, 3 comes in and wins
        ([2.0, 0.0, 0.0, 0.0, 3.0], 0, 2, 0.12),  # none wins: 0 would have to leave for 2
    ],
)
def test_top_k_edge(noise: list[float], token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[5.0, 4.9, 4.88, 4.87, -9.0]])
    state = state_for(5, [SamplingParams(temperature=2.0, top_k=2)])
    drawn = sample._filtered(
        x_TV, torch.arange(5).unsqueeze(0), torch.tensor([noise]), state, torch.tensor([1]), True, True
    )
    assert (int(drawn.token_T), int(drawn.runner_up_T), int(drawn.edge_token_T)) == (token, 1 - token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize(
    ("top_p", "noise", "token", "edge_token", "edge_gap"),
    [
        (0.79, [0.0, 0.0, 9.0, 0.0], 0, 2, log_odds(0.8) - log_odds(0.79)),  # .5 and .3 suffice, just
        (0.81, [0.0, 0.0, 9.0, 0.0], 2, 3, log_odds(0.81) - log_odds(0.8)),  # .15 is needed, just, and drawn
        (0.81, [9.0, 0.0, 0.0, 0.0], 0, 3, math.log(0.5 / 0.15) + log_odds(0.81) - log_odds(0.8)),  # 0 would be last
    ],
)
def test_top_p_edge(top_p: float, noise: list[float], token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    state = state_for(4, [SamplingParams(temperature=1.0, top_p=top_p)])
    drawn = sample._filtered(
        x_TV, torch.arange(4).unsqueeze(0), torch.tensor([noise]), state, torch.tensor([1]), False, True
    )
    assert (int(drawn.token_T), int(drawn.edge_token_T)) == (token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


@pytest.mark.parametrize(("noise", "token", "edge_token", "edge_gap"), [(9.0, 0, 2, 0.05), (0.0, 1, 2, 0.05)])
def test_min_p_edge(noise: float, token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[0.0, math.log(0.5) + 0.2, math.log(0.5) - 0.05]])
    noise_TV = torch.tensor([[noise, 5.0, 20.0]])
    state = state_for(3, [SamplingParams(temperature=1.0, min_p=0.5)])
    drawn = sample._filtered(x_TV, torch.arange(3).unsqueeze(0), noise_TV, state, torch.tensor([1]), False, True)
    assert (int(drawn.token_T), int(drawn.edge_token_T)) == (token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


@pytest.mark.parametrize("params", [*FILTER_CASES, ALL_FILTERS], ids=label)
def test_every_divergence_under_rounding_is_a_near_tie(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves each logit by at most e: a changed token must be the runner-up or edge token within 2 e."""
    monkeypatch.setattr(sample, "_CPU_ROWS", 2000)
    num, vocab, e = 2000, 60, 0.02
    state, row_T = over_seeds(state_for(vocab, [params]), num), torch.arange(num)
    x_TV = random_logits(num, vocab, seed=4, scale=2.0)
    moved_TV = x_TV + (torch.rand(num, vocab, generator=torch.Generator().manual_seed(5)) * 2 - 1) * e
    ours = sample.draw(x_TV, state, row_T, row_T, "general", edges=True)
    theirs = sample.draw(moved_TV, state, row_T, row_T, "general").token_T
    second_T = (ours.gap_T <= 2 * e) & (theirs == ours.runner_up_T)
    tie_T = second_T | ((ours.third_gap_T <= 2 * e) & (theirs == ours.third_T))
    edge_T = (ours.edge_gap_T <= 2 * e) & ((theirs == ours.runner_up_T) | (theirs == ours.edge_token_T))
    differs_T = theirs != ours.token_T
    assert int(differs_T.sum()) > 0
    unexplained = int((differs_T & ~(tie_T | edge_T)).sum())
    assert unexplained <= 1  # four scores within 2 e, or a filter edge among three: the last won
    assert float((edge_T | (ours.gap_T <= 2 * e)).double().mean()) < 0.15  # and not by calling all a near-tie
