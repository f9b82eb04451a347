# Owns: simulated acceptance: the table, its lots, what the walk makes of them.
# Promises: the published taus come out of the numpy tree exactly and out of the tensor form within its noise.
# Never: takes an expected value from the code under test.
"""Simulated acceptance (METHOD section 5). R: rows, L: depths, K: candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.ops.simulate import force, true_tokens
from ratoon.ops.tree import build_trees, pack, walk
from ratoon.spec.ddtree import build_tree, expected_tau
from ratoon.spec.simulate import OUTSIDE, AcceptanceTable, Simulation, draw_ranks

VOCAB, CAP = 100, 16
# Block, nodes, cap, tau: METHOD section 5.
PUBLISHED = [(16, 15, 1, 4.727), (16, 15, 16, 4.836), (16, 31, 16, 5.303), (16, 63, 16, 5.764), (8, 63, 16, 5.375)]


def candidates(rows: int, depths: int, ranks: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Distinct random ids of each row and depth, [R, L, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, depths, vocab, generator=generator).argsort(dim=2)[:, :, :ranks].contiguous()


def committed(simulation: Simulation, block: int, nodes: int, cap: int, rows: int, rounds: int) -> Tensor:
    """Tokens that each row commits in each round, [rounds, R], by the round's own tree operations."""
    depths, ranks = block - 1, min(CAP, nodes)
    seat_R, seed_S = torch.arange(rows), torch.arange(rows) * 7919
    start_S, counts = torch.arange(rows) % 50, []
    for number in range(rounds):
        token_RLK = candidates(rows, depths, ranks, seed=number)
        logprob_RLK = simulation.logprobs(torch.log_softmax(torch.zeros(rows, depths, ranks), dim=2))
        budget_R, cap_R = torch.full((rows,), nodes), torch.full((rows,), cap)
        trees = build_trees(logprob_RLK, token_RLK, budget_R, cap_R, nodes)
        places = pack(trees, trees.num_nodes, torch.zeros(rows, dtype=torch.int64), rows * (nodes + 1))
        truth_RL = simulation.truth(seat_R, start_S, seed_S, token_RLK)
        drawn_T = force(torch.full_like(places.token, VOCAB), places, truth_RL)
        accepted_R, _, _ = walk(places, drawn_T, min(nodes, depths))
        counts.append(accepted_R + 1)
        start_S = start_S + counts[-1]
    return torch.stack(counts)


# ---- the table --------------------------------------------------------------------------------------------


def test_the_table_is_the_published_one() -> None:
    p_LK = AcceptanceTable().probabilities(15, 20)
    assert p_LK[:7, 0] == pytest.approx([0.854, 0.803, 0.794, 0.783, 0.775, 0.759, 0.729], abs=1e-12)
    assert p_LK[:7].sum(1) == pytest.approx([0.995, 0.973, 0.948, 0.926, 0.908, 0.894, 0.878], abs=1e-12)
    assert p_LK[:, 2] == pytest.approx(p_LK[:, 1] * 2**-1.3) and p_LK[:, 15] == pytest.approx(p_LK[:, 1] * 15**-1.3)
    assert np.array_equal(p_LK[7:], np.repeat(p_LK[6:7], 8, axis=0))
    assert not p_LK[:, 16:].any() and np.isneginf(AcceptanceTable().logprobs(3, 17)[:, 16]).all()


@pytest.mark.parametrize(("block", "nodes", "cap", "tau"), PUBLISHED)
def test_published_taus_follow_from_the_table(block: int, nodes: int, cap: int, tau: float) -> None:
    logprob_LK = AcceptanceTable().logprobs(block - 1, CAP)
    tree = build_tree(logprob_LK, np.zeros((block - 1, CAP)), nodes, cap)
    assert expected_tau(tree) == pytest.approx(tau, abs=0.0006)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first": (0.9,)}, "a first and a total for each depth"),
        ({"first": (0.9,), "total": (0.8,)}, "0 <= first <= total <= 1"),
        ({"first": (0.1,), "total": (0.9,)}, "rank 2 is likelier"),
        ({"num_ranks": 1}, "at least 2 ranks"),
    ],
)
def test_what_is_no_table_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AcceptanceTable(**changes)


# ---- lots -------------------------------------------------------------------------------------------------


def test_lots_have_the_tables_frequencies_and_depths_are_independent() -> None:
    p_LK = AcceptanceTable().probabilities(9, 16)
    rank_NL = draw_ranks(p_LK, seed=3)
    assert torch.equal(rank_NL, draw_ranks(p_LK, seed=3)) and not torch.equal(rank_NL, draw_ranks(p_LK, seed=4))
    num = rank_NL.shape[0]
    for depth in range(9):
        ranks = rank_NL[:, depth]
        want = np.append(p_LK[depth], 1 - p_LK[depth].sum())
        seen = torch.bincount(ranks.where(ranks < OUTSIDE, torch.tensor(16)), minlength=17).numpy() / num
        assert np.all(np.abs(seen - want) < 5 * np.sqrt(want / num) + 1e-9)
    hits = (rank_NL == 0).double()
    assert (torch.corrcoef(hits.T) - torch.eye(9)).abs().max() < 5 / math.sqrt(num)


# ---- truth and force --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_the_true_token_is_the_candidate_of_its_rank_or_none(ranks: int) -> None:
    rows, depths, vocab = 40, 6, 20
    token_RLK = candidates(rows, depths, ranks, vocab)
    rank_NL = torch.randint(0, 24, (64, depths + 2), generator=torch.Generator().manual_seed(1))
    seat_R = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    seed_S, start_S = torch.arange(rows) - 5, torch.arange(rows) * 3
    truth_RL = true_tokens(seat_R, start_S, seed_S, rank_NL, token_RLK)
    assert truth_RL.shape == (rows + 1, depths + 1)
    assert (truth_RL[-1] == -1).all() and (truth_RL[:, -1] == -1).all()
    inside = outside = 0
    for row in range(rows):
        seed, start = int(seed_S[seat_R[row]]), int(start_S[seat_R[row]])
        mixed = (seed * 0x369DEA0F31A53F85 + start) * 0x2545F4914F6CDD1D % 2**64
        ranks_L = rank_NL[(mixed >> 40) % 64]
        for depth in range(depths):
            known, rank = token_RLK[row, depth].tolist(), int(ranks_L[depth])
            if rank < ranks:
                assert truth_RL[row, depth] == known[rank]
                inside += 1
            else:
                assert truth_RL[row, depth] == min(set(range(vocab)) - set(known))
                outside += 1
    assert inside and outside


def test_a_lot_depends_on_seed_and_start_alone() -> None:
    simulation = Simulation.of_table(7, "cpu")
    token_RLK = candidates(1, 7, 16).expand(200, -1, -1)
    start_S, seed_S = torch.arange(200), torch.full((200,), -12345)
    seat_R = torch.arange(200).flip(0)
    first = simulation.truth(seat_R, start_S, seed_S, token_RLK)
    assert torch.equal(first[:3][:, :7], simulation.truth(seat_R[:3], start_S, seed_S, token_RLK[:3])[:3, :7])
    shorter = simulation.truth(seat_R, start_S, seed_S, token_RLK[:, :3].contiguous())
    assert torch.equal(first[:200, :3], shorter[:200, :3]), "the block's length changes nothing"
    distinct = {tuple(row) for row in first[:200].tolist()}
    assert len(distinct) > 100, "starts of one row get lots of their own"
    other = simulation.truth(seat_R, start_S, seed_S + 1, token_RLK)
    assert (other[:200] != first[:200]).any(1).float().mean() > 0.5


def test_only_places_that_the_truth_speaks_of_are_forced() -> None:
    token_RLK = candidates(2, 3, 2)
    trees = build_trees(
        torch.log(torch.tensor([0.6, 0.3])).expand(2, 3, -1), token_RLK, torch.tensor([4, 2]), torch.zeros(2).long(), 4
    )
    places = pack(trees, trees.num_nodes, torch.tensor([7, 8]), 12)
    truth_RL = torch.arange(100, 112).view(3, 4)
    truth_RL[-1], truth_RL[:, -1] = -1, -1
    drawn_T = force(torch.arange(12), places, truth_RL)
    for place in range(12):
        row, depth = int(places.row_of[place]), int(places.depth[place])
        want = place if row == 2 or depth == 3 else 100 + 4 * row + depth
        assert drawn_T[place] == want


@pytest.mark.parametrize(("block", "nodes", "cap", "tau"), PUBLISHED)
def test_rounds_commit_the_published_mean(block: int, nodes: int, cap: int, tau: float) -> None:
    counts = committed(Simulation.of_table(block - 1, "cpu"), block, nodes, cap, rows=512, rounds=6).double()
    sigma = float(counts.std()) / math.sqrt(counts.numel())
    assert sigma < 0.09 and abs(float(counts.mean()) - tau) < 4 * sigma


# ---- fixed mean -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 4.0, 6.5, 16.0])
def test_a_fixed_mean_commits_its_two_neighbours(tau: float) -> None:
    simulation = Simulation.of_tau(tau, 15, "cpu")
    counts = committed(simulation, 16, 15, 1, rows=256, rounds=4)
    assert set(counts.unique().tolist()) == {math.floor(tau), math.ceil(tau)}
    assert float(counts.double().mean()) == pytest.approx(tau, abs=4 * 0.5 / math.sqrt(counts.numel()))


def test_a_fixed_mean_is_refused_where_it_means_nothing() -> None:
    simulation = Simulation.of_tau(6.5, 15, "cpu")
    simulation.check("chain", 6)
    simulation.check("ar", None)
    simulation.check("tree", 0)
    for method, budget in (("chain", 5), ("chain", None), ("tree", 63)):
        with pytest.raises(ValueError, match="needs method chain with a fixed budget of at least 6"):
            simulation.check(method, budget)
    for tau in (0.5, 16.5):
        with pytest.raises(ValueError, match="from 1 to 16"):
            Simulation.of_tau(tau, 15, "cpu")
    Simulation.of_table(15, "cpu").check("tree", None)
