# Owns: the draft tree in numpy and its picture, against brute force and the reference's trees and walks.
# Promises: float32 scores, tie order, cap, spine and shares are each pinned by a test.
# Never: imports torch.
from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.tree import Tree, draw
from ratoon.spec.ddtree import accept, ancestor_bits, build_tree, expected_tau, rank_candidates, share

PARITY = Path(__file__).parents[1] / "data" / "parity"
COLUMNS = ("token", "parent", "depth", "rank", "score")
# Few values, so that sums collide; the tiny steps vanish in some float32 sums and not in others.
STEPS = [0.0, -0.25, -0.5, -1.0, -1.0 - 2**-23, -2.0, -3.0, -16.0, -16.0 - 2**-19, -np.inf]


@st.composite
def candidates(draw_value: Any, max_depths: int = 4, max_ranks: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(logprob, token) [L, K] with many ties."""
    num_depths = draw_value(st.integers(0, max_depths))
    num_ranks = draw_value(st.integers(1, max_ranks))
    row = st.lists(st.sampled_from(STEPS), min_size=num_ranks, max_size=num_ranks)
    steps = [sorted(draw_value(row), reverse=True) for _ in range(num_depths)]
    logprob = np.array(steps, dtype=np.float32).reshape(num_depths, num_ranks)
    token = np.arange(num_depths * num_ranks, dtype=np.int64)[::-1].reshape(num_depths, num_ranks)
    return logprob, token


def brute_force(logprob: np.ndarray, budget: int, spine: int = 0) -> list[tuple[int, int, int, np.float32]]:
    """(depth, rank, parent, score) by looking at every child of every node, again for each node."""
    nodes = [(0, 0, -1, np.float32(0))]
    while len(nodes) <= budget:
        offers = [
            (-(score + logprob[depth, rank]), depth + 1, rank, parent)
            for parent, (depth, _, _, score) in enumerate(nodes)
            if depth < logprob.shape[0]
            for rank in range(logprob.shape[1])
            if score + logprob[depth, rank] > -np.inf
        ]
        taken = {node[:3] for node in nodes}
        offers = [offer for offer in offers if offer[1:] not in taken]
        if len(nodes) <= spine:
            offers = [offer for offer in offers if offer[1:] == (len(nodes), 0, len(nodes) - 1)] or offers
        if not offers:
            break
        minus_score, *place = min(offers)
        nodes.append((place[0], place[1], place[2], -minus_score))
    return nodes[1:]


def rows_of(tree: Tree) -> list[tuple[int, int, int, np.float32]]:
    return list(zip(tree.depth.tolist(), tree.rank.tolist(), tree.parent.tolist(), tree.score, strict=True))


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(0, 24), st.integers(0, 5), st.integers(0, 4))
def test_heap_equals_brute_force(data: tuple[np.ndarray, np.ndarray], budget: int, cap: int, spine: int) -> None:
    logprob, token = data
    tree = build_tree(logprob, token, budget, cap, spine)
    assert rows_of(tree) == brute_force(logprob[:, : cap or None], budget, spine)
    assert tree.token.tolist() == token[tree.depth - 1, tree.rank].tolist()
    assert tree.score.dtype == np.float32


@settings(max_examples=40, deadline=None)
@given(candidates(max_depths=3, max_ranks=2), st.integers(0, 5))
def test_no_prefix_closed_set_has_more_mass(data: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    logprob, token = data
    prefixes = [p for depth in range(1, len(logprob) + 1) for p in itertools.product((0, 1), repeat=depth)]
    prefixes = [p for p in prefixes if max(p) < logprob.shape[1]]
    mass = {p: float(np.exp(sum(logprob[i, rank] for i, rank in enumerate(p)))) for p in prefixes}
    best = max(
        sum(mass[p] for p in chosen)
        for chosen in itertools.combinations(prefixes, min(budget, len(prefixes)))
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen)
    )
    assert expected_tau(build_tree(logprob, token, budget, 0)) == pytest.approx(1 + best, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(candidates(max_depths=6), st.integers(0, 12))
def test_tree_is_never_worse_than_its_chain(data: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    chain = build_tree(*data, budget, topk_cap=1)
    assert chain.parent.tolist() == list(range(chain.num_nodes))
    assert expected_tau(build_tree(*data, budget)) >= expected_tau(chain) - 1e-9


def tree_of(steps: list[list[float]], budget: int, **options: int) -> Tree:
    logprob = np.array(steps, dtype=np.float32)
    return build_tree(logprob, np.arange(logprob.size).reshape(logprob.shape), budget, **options)


def test_ties_by_depth_then_rank_then_parent() -> None:
    tree = tree_of([[-1, -1, -2], [0, -1, -1]], 12)
    assert list(zip(tree.depth.tolist(), tree.rank.tolist(), tree.parent.tolist(), strict=True)) == [
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (2, 0, 2),
        (1, 2, 0),
        (2, 0, 5),
        (2, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
        (2, 2, 2),
        (2, 1, 5),
        (2, 2, 5),
    ]


def test_scores_are_float32_sums() -> None:
    # In float64 the second child of the first node beats the first child of the second; in float32 they tie.
    below, step = float(np.nextafter(np.float32(-20), np.float32(-21))), -13 - 2.0**-20
    tree = tree_of([[-20, below], [-13, step]], 6)
    assert -20 + step > below - 13
    assert list(zip(tree.rank.tolist(), tree.parent.tolist(), strict=True))[2:5] == [(0, 1), (0, 2), (1, 1)]
    assert set(tree.score[2:5].tolist()) == {-33.0}


def test_impossible_tokens_and_small_blocks_leave_the_budget_unfilled() -> None:
    assert tree_of([[-1, -np.inf], [-np.inf, -np.inf]], 9).token.tolist() == [0]
    assert tree_of([[-np.inf, -np.inf]], 9).num_nodes == 0
    full = tree_of([[-1, -2], [-1, -2]], 99)
    assert full.num_nodes == 6
    assert tree_of([[-1, -2], [-1, -2]], 0).num_nodes == 0
    assert build_tree(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.int64), 5).num_nodes == 0


def test_default_cap_is_sixteen() -> None:
    logprob = np.full((1, 40), -3.5, dtype=np.float32)
    token = np.arange(40).reshape(1, 40)
    sizes = [build_tree(logprob, token, 40, **cap).num_nodes for cap in ({}, {"topk_cap": 0}, {"topk_cap": 5})]
    assert sizes == [16, 40, 5]


@pytest.mark.parametrize("steps", [[[0.5]], [[np.nan]], [[-2.0, -1.0]]])
def test_bad_log_probabilities_are_refused(steps: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="log-probabilities"):
        tree_of(steps, 3)


@pytest.mark.parametrize("options", [{"budget": -1}, {"budget": 1, "topk_cap": -1}, {"budget": 1, "spine": -1}])
def test_negative_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        tree_of([[-1.0]], **options)


def test_ranks_by_logit_then_token_over_the_whole_vocabulary() -> None:
    logits = np.array([[1, 3, 3, -np.inf, 3, 2], [0, 0, 0, 0, 0, 0]], dtype=np.float32)
    token, logprob = rank_candidates(logits, 4)
    assert token.tolist() == [[1, 2, 4, 5], [0, 1, 2, 3]]
    total = np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert logprob.dtype == np.float32
    np.testing.assert_allclose(logprob[0], [3 - total, 3 - total, 3 - total, 2 - total], atol=3e-7)
    np.testing.assert_allclose(logprob[1], np.log(1 / 6), atol=3e-7)
    assert rank_candidates(logits, 99)[0].shape == (2, 6)
    assert rank_candidates(np.array([[0, 1000.0]]), 1)[1].tolist() == [[0.0]]


def test_ancestor_bits_up_to_bit_63() -> None:
    chain = ancestor_bits(np.arange(64))
    assert chain.shape == (65, 2) and chain.dtype == np.int64
    assert chain[0].tolist() == [1, 0]
    assert chain[63].tolist() == [-1, 0]
    assert chain[64].tolist() == [-1, 1]
    star = ancestor_bits(np.zeros(63, dtype=np.int64))
    assert star.shape == (64, 1)
    assert star[63, 0] == np.iinfo(np.int64).min + 1


def test_share_gives_places_to_the_surest_rows() -> None:
    sure, unsure = tree_of([[-0.1, -3]] * 4, 6), tree_of([[-2.0, -2.0]] * 4, 6)
    assert share([sure, unsure], 2 + 4) == [4, 0]
    assert share([sure, unsure], 2 + 6) == [4, 2]
    assert share([sure, unsure], 99) == [6, 6]
    assert share([sure, unsure], 2) == [0, 0]
    with pytest.raises(ValueError, match="roots"):
        share([sure, unsure], 1)


def test_share_ties_by_depth_then_row() -> None:
    twin = tree_of([[0, -1], [0, -1]], 4)
    assert twin.depth.tolist() == [1, 2, 1, 2]
    assert [share([twin, twin], 2 + extra) for extra in range(1, 5)] == [[1, 0], [1, 1], [2, 1], [2, 2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(candidates(), min_size=1, max_size=4), st.integers(0, 20))
def test_share_takes_the_best_nodes_of_all(rows: list[tuple[np.ndarray, np.ndarray]], extra: int) -> None:
    trees = [build_tree(*row, 8) for row in rows]
    counts = share(trees, len(trees) + extra)
    everything = [(-t.score[i], t.depth[i], row) for row, t in enumerate(trees) for i in range(t.num_nodes)]
    taken = [(-t.score[i], t.depth[i], row) for row, t in enumerate(trees) for i in range(counts[row])]
    assert sorted(taken) == sorted(everything)[:extra]


def test_accept_follows_the_draws() -> None:
    tree = Tree(
        token=np.array([0, 7, 0, 7]),
        parent=np.array([0, 0, 1, 2]),
        depth=np.array([1, 1, 2, 2]),
        rank=np.array([0, 1, 0, 0]),
        score=np.zeros(4, np.float32),
    )
    assert accept(tree, [5, 0, 0, 0, 0]) == ([0], 5)
    assert accept(tree, [0, 7, 9, 9, 9]) == ([0, 1], 7)
    assert accept(tree, [0, 0, 9, 3, 9]) == ([0, 1, 3], 3)
    assert accept(tree, [7, 9, 7, 9, 0]) == ([0, 2, 4], 0)


def test_a_tree_is_checked_when_made() -> None:
    good = tree_of([[-1, -2], [-1, -2]], 4)
    with pytest.raises(ValueError, match="before their children"):
        replace(good, parent=np.array([0, 2, 1, 1]))
    with pytest.raises(ValueError, match="before their children"):
        replace(good, parent=np.array([0, -1, 1, 1]))
    with pytest.raises(ValueError, match="depth"):
        replace(good, depth=good.depth + 1)
    with pytest.raises(ValueError, match="one length"):
        replace(good, rank=good.rank[:2])


def test_drawing_marks_the_accepted_path() -> None:
    tree = Tree(
        token=np.array([0, 1, 2, 3, 4, 5, 6]),
        parent=np.array([0, 1, 1, 1, 2, 3, 6]),
        depth=np.array([1, 2, 2, 2, 3, 3, 4]),
        rank=np.zeros(7, np.int64),
        score=np.zeros(7, np.float32),
    )
    text = ["def", " a", " b", "\n", "(", "", "\x1b"]
    assert draw(tree, [0, 1, 3, 6], text.__getitem__) == [
        "●━def",
        "┠─·a─(",
        "┡━·b━∅─\\x1b",
        "└─↵",
    ]
    assert draw(tree, [0], text.__getitem__, root="x") == ["x─def", "├─·a─(", "├─·b─∅─\\x1b", "└─↵"]
    forked = replace(tree, parent=np.array([0, 0, 1, 1, 3, 4, 6]), depth=np.array([1, 1, 2, 2, 3, 3, 4]))
    assert draw(forked, [0, 1, 4], text.__getitem__) == [
        "●",
        "┡━def",
        "│ ┠─·b─(",
        "│ ┗━↵─∅─\\x1b",
        "└─·a",
    ]
    assert draw(forked, [0, 2], text.__getitem__)[1:3] == ["┠─def", "┃ ├─·b─("]
    assert draw(tree_of([[-1.0]], 0), [0], str) == ["●"]


def test_drawing_names_every_node_once() -> None:
    tree = tree_of([[-0.5, -1, -3]] * 6, 63)
    lines = "".join(draw(tree, [0, 1, 2], lambda _: "N"))
    assert lines.count("N") == 63


BUILD = np.load(PARITY / "tree_build.npz")
ACCEPT = np.load(PARITY / "tree_accept.npz")


@pytest.mark.parametrize("case", range(len(BUILD["budget"])))
def test_reference_trees(case: int) -> None:
    start, stop = BUILD["logits_offset"][case : case + 2]
    logits = BUILD["logits"][start:stop].reshape(BUILD["depth_limit"][case], BUILD["vocab"][case])
    budget, num_nodes = int(BUILD["budget"][case]), int(BUILD["n_nodes"][case])
    token, logprob = rank_candidates(logits, budget)
    tree = build_tree(logprob, token, budget, topk_cap=0)
    assert tree.num_nodes == num_nodes
    for column in COLUMNS[:4]:
        assert getattr(tree, column).tolist() == BUILD[column][case, :num_nodes].tolist(), column
    np.testing.assert_allclose(tree.score, BUILD["score"][case, :num_nodes], rtol=0, atol=1e-5)
    bits = ancestor_bits(tree.parent)
    expected = BUILD["ancestors"][case, : num_nodes + 1].view(np.int64)
    assert np.array_equal(bits, expected[:, : bits.shape[1]]) and not expected[:, bits.shape[1] :].any()


@pytest.mark.parametrize("case", range(len(ACCEPT["n_nodes"])))
def test_reference_walks(case: int) -> None:
    num_places, path_len = int(ACCEPT["n_nodes"][case]), int(ACCEPT["path_len"][case])
    parent = ACCEPT["parent"][case, 1:num_places].astype(np.int64)
    depth = np.zeros(num_places, dtype=np.int64)
    for node in range(1, num_places):
        depth[node] = depth[parent[node - 1]] + 1
    tree = Tree(
        token=ACCEPT["token"][case, 1:num_places].astype(np.int64),
        parent=parent,
        depth=depth[1:],
        rank=np.zeros(num_places - 1, np.int64),
        score=np.zeros(num_places - 1, np.float32),
    )
    path, next_token = accept(tree, ACCEPT["posterior"][case])
    assert path == ACCEPT["path"][case, :path_len].tolist()
    assert next_token == int(ACCEPT["next_token"][case])
