# Owns: the tensor forms of rank, build, share, pack and walk against spec/ddtree.py and the reference's data.
# Promises: equality node for node, ties included, at word borders, with rows of different budgets.
# Never: compares a tensor form with itself alone.
from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.tree import Tree
from ratoon.ops import tree as ops
from ratoon.spec import ddtree

PARITY = Path(__file__).parents[1] / "data" / "parity"
BUILD = np.load(PARITY / "tree_build.npz")
ACCEPT = np.load(PARITY / "tree_accept.npz")
COLUMNS = ("token", "parent", "depth", "rank", "score")
# As in tests/null/test_ddtree.py: few values whose sums collide, steps that some float32 sums swallow.
STEPS = [0.0, -0.25, -0.5, -1.0, -1.0 - 2**-23, -2.0, -3.0, -16.0, -16.0 - 2**-19, -np.inf]


def candidates(
    rng: np.random.Generator, num_rows: int, num_depths: int, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """(logprob, token) [R, L, K], full of ties; siblings have distinct tokens, 0 among them."""
    logprob = rng.choice(np.array(STEPS, dtype=np.float32), size=(num_rows, num_depths, num_ranks))
    token = np.argsort(rng.random((num_rows, num_depths, num_ranks)), axis=2)
    return -np.sort(-logprob, axis=2), token


def build(logprob: Any, token: Any, budget: Any, cap: Any, max_nodes: int) -> ops.TreeBatch:
    tensors = [torch.as_tensor(value) for value in (logprob, token, budget, cap)]
    return ops.build_trees(*tensors, max_nodes=max_nodes)


def row_of(trees: ops.TreeBatch, row: int) -> Tree:
    count = int(trees.num_nodes[row])
    return Tree(**{column: getattr(trees, column)[row, :count].numpy() for column in COLUMNS})


def assert_same(tree: Tree, expected: Tree) -> None:
    for column in COLUMNS:
        assert getattr(tree, column).tolist() == getattr(expected, column).tolist(), column


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 4),
    num_depths=st.integers(0, 6),
    num_ranks=st.integers(1, 6),
    max_nodes=st.sampled_from([0, 1, 2, 3, 5, 8, 15, 31, 63, 64, 65, 127]),
)
def test_build_equals_the_heap(seed: int, num_rows: int, num_depths: int, num_ranks: int, max_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    logprob, token = candidates(rng, num_rows, num_depths, num_ranks)
    budget, cap = rng.integers(0, max_nodes + 3, num_rows), rng.integers(0, num_ranks + 2, num_rows)
    trees = build(logprob, token, budget, cap, max_nodes)
    assert trees.token.shape == trees.score.shape == (num_rows, max_nodes)
    for row in range(num_rows):
        limit = min(int(budget[row]), max_nodes)
        assert_same(row_of(trees, row), ddtree.build_tree(logprob[row], token[row], limit, int(cap[row])))
        assert (trees.score[row, int(trees.num_nodes[row]) :] == -torch.inf).all()


@pytest.mark.parametrize(("num_depths", "num_ranks", "max_nodes"), [(15, 16, 63), (15, 127, 127), (127, 2, 127)])
@pytest.mark.parametrize("grain", [0.0, 1.0])
def test_build_equals_the_heap_at_full_size(num_depths: int, num_ranks: int, max_nodes: int, grain: float) -> None:
    rng = np.random.default_rng(num_ranks)
    logits = rng.normal(scale=2, size=(3, num_depths, max(num_ranks, 40))).astype(np.float32)
    logits = np.round(logits / grain) * grain if grain else logits
    ranked = [ddtree.rank_candidates(row, num_ranks) for row in logits]
    token, logprob = (np.stack(part) for part in zip(*ranked, strict=True))
    budget = np.array([max_nodes, max_nodes // 2, max_nodes + 5])
    trees = build(logprob, token, budget, np.array([0, 4, 1]), max_nodes)
    for row, cap in enumerate((0, 4, 1)):
        limit = min(int(budget[row]), max_nodes)
        assert_same(row_of(trees, row), ddtree.build_tree(logprob[row], token[row], limit, cap))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logprob, token = candidates(np.random.default_rng(0), 5, 6, 4)
    every = build(logprob, token, [20] * 5, [0] * 5, 31)
    for row in range(5):
        alone = build(logprob[row : row + 1], token[row : row + 1], [20], [0], 31)
        assert_same(row_of(alone, 0), row_of(every, row))


def test_not_a_number_is_never_a_node() -> None:
    logprob = np.full((1, 2, 2), -1.0, dtype=np.float32)
    logprob[0, 1] = np.nan
    assert row_of(build(logprob, np.array([[[1, 2], [3, 4]]]), [9], [0], 9), 0).token.tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [1, 5, 64, 200, 1000, 4096, 4097, 9001])
@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_equals_numpy(vocab: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab + k)
    logits = torch.randn(6, vocab).to(dtype)
    logits[1] = logits[1].round()  # many equals, across every border
    logits[2] = 0
    logits[3] = -torch.inf
    logits[3, -1] = 1.0
    logits[4] = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)
    logits[5, : vocab // 2] = logits[5].float().max().to(dtype) + 1
    token, logprob = ops.rank_candidates(logits, k)
    expected_token, expected_logprob = ddtree.rank_candidates(logits.float().numpy(), k)
    assert token.tolist() == expected_token.tolist()
    assert logprob.dtype == torch.float32 and (logprob <= 0).all()
    torch.testing.assert_close(logprob, torch.from_numpy(expected_logprob), rtol=0, atol=2e-6)


def test_rank_of_a_broken_row_stays_in_its_row() -> None:
    logits = torch.zeros(3, 4096)
    logits[1, 77] = torch.nan
    token, logprob = ops.rank_candidates(logits, 4)
    assert logprob.isnan().tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert token[0].tolist() == token[2].tolist() == [0, 1, 2, 3]


def test_an_equal_beyond_the_last_rank_stays_out() -> None:
    logits = torch.zeros(1, 8192)
    logits[0, [17, 70, 4000, 4001, 8191]] = torch.tensor([2.0, 3.0, 2.0, 2.0, 2.0])
    assert ops.rank_candidates(logits, 3)[0].tolist() == [[70, 17, 4000]]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 5), max_nodes=st.integers(0, 20), data=st.data())
def test_share_equals_numpy(seed: int, num_rows: int, max_nodes: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    budget, cap = rng.integers(0, max_nodes + 1, num_rows), rng.integers(0, 4, num_rows)
    trees = build(*candidates(rng, num_rows, 4, 3), budget, cap, max_nodes)
    places = data.draw(st.integers(num_rows, num_rows * (max_nodes + 2)))
    counts = ops.share_places(trees.score, trees.depth, trees.num_nodes, places)
    expected = ddtree.share([row_of(trees, row) for row in range(num_rows)], places)
    assert counts.tolist() == expected
    # What stands behind a row's last node is nobody's business.
    score_RM = trees.score.masked_fill(trees.score == -torch.inf, 0.0)
    assert ops.share_places(score_RM, trees.depth, trees.num_nodes, places).tolist() == expected


def test_share_refuses_what_it_cannot_hold() -> None:
    trees = ops.no_trees(3, 1 << 15, torch.device("cpu"))
    with pytest.raises(ValueError, match="roots of 3 rows"):
        ops.share_places(trees.score, trees.depth, trees.num_nodes, 2)
    with pytest.raises(ValueError, match="32-bit"):
        ops.share_places(trees.score, trees.depth, trees.num_nodes, 9)


def check_places(places: ops.Places, rows: list[Tree], anchors: list[int], num_places: int, num_words: int) -> None:
    """Every place of every row by its definition, then the surplus places."""
    start = 0
    for row, tree in enumerate(rows):
        stop = start + tree.num_nodes + 1
        assert places.row_start[row] == start
        assert places.row_of[start:stop].tolist() == [row] * (stop - start)
        assert places.local[start:stop].tolist() == list(range(stop - start))
        assert places.token[start:stop].tolist() == [anchors[row], *tree.token.tolist()]
        assert places.parent[start:stop].tolist() == [start, *(tree.parent + start).tolist()]
        assert places.depth[start:stop].tolist() == [0, *tree.depth.tolist()]
        bits = ddtree.ancestor_bits(tree.parent)
        assert places.bits[start:stop, : bits.shape[1]].tolist() == bits.tolist()
        assert not places.bits[start:stop, bits.shape[1] :].any()
        start = stop
    assert places.row_start[len(rows) :].tolist() == [start, num_places]
    surplus = list(range(start, num_places))
    assert places.row_of[start:].tolist() == [len(rows)] * len(surplus)
    assert places.parent[start:].tolist() == surplus
    assert places.token[start:].tolist() == places.depth[start:].tolist() == [0] * len(surplus)
    assert places.local[start:].tolist() == [i % (64 * num_words) for i in range(len(surplus))]
    for place in surplus:
        word, bit = divmod(int(places.local[place]), 64)
        only_self = np.zeros(num_words, dtype=np.uint64)
        only_self[word] = np.uint64(1) << np.uint64(bit)
        assert places.bits[place].tolist() == only_self.view(np.int64).tolist()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 4),
    num_depths=st.integers(0, 5),
    max_nodes=st.sampled_from([0, 1, 4, 5, 15, 62, 63, 64, 65, 127]),
    surplus=st.sampled_from([0, 1, 7, 130]),
)
def test_pack_and_walk_equal_numpy(seed: int, num_rows: int, num_depths: int, max_nodes: int, surplus: int) -> None:
    rng = np.random.default_rng(seed)
    budget, cap = rng.integers(0, max_nodes + 2, num_rows), rng.integers(0, 5, num_rows)
    trees = build(*candidates(rng, num_rows, num_depths, 4), budget, cap, max_nodes)
    count = torch.from_numpy(rng.integers(0, trees.num_nodes.numpy() + 1))
    rows = []
    for row in range(num_rows):
        cut = {column: getattr(trees, column)[row, : count[row]].numpy() for column in COLUMNS}
        rows.append(Tree(**cut))
    anchors = rng.integers(0, 4, num_rows).tolist()
    num_places = num_rows + int(count.sum()) + surplus
    places = ops.pack(trees, count, torch.tensor(anchors), num_places)
    check_places(places, rows, anchors, num_places, max_nodes // 64 + 1)

    # The walk goes deep: most draws follow a child, if there is one.
    choice = rng.integers(0, 5, num_places)
    for place in range(num_places):
        if places.parent[place] != place and rng.random() < 0.7:
            choice[int(places.parent[place])] = int(places.token[place])
    accepted, path, next_token = ops.walk(places, torch.from_numpy(choice), num_depths)
    assert path.shape == (num_rows, num_depths + 1)
    for row, tree in enumerate(rows):
        start = int(places.row_start[row])
        expected, following = ddtree.accept(tree, choice[start : start + tree.num_nodes + 1])
        assert accepted[row] == len(expected) - 1
        tail = [expected[-1]] * (num_depths + 1 - len(expected))
        assert path[row].tolist() == [start + node for node in expected + tail]
        assert next_token[row] == following


@pytest.mark.parametrize("length", [62, 63, 64, 65, 127])
def test_long_chains_across_words(length: int) -> None:
    logprob = np.zeros((2, length, 1), dtype=np.float32)
    token = np.zeros((2, length, 1), dtype=np.int64)
    trees = build(logprob, token, [length, length - 1], [1, 1], length)
    places = ops.pack(trees, trees.num_nodes, torch.tensor([0, 0]), 2 * length + 3)
    last = places.bits[length].numpy().view(np.uint64)
    assert sum(int(word) << 64 * i for i, word in enumerate(last)) == 2 ** (length + 1) - 1
    choice = torch.zeros(2 * length + 3, dtype=torch.int64)
    accepted, path, next_token = ops.walk(places, choice, length)
    assert accepted.tolist() == [length, length - 1] and next_token.tolist() == [0, 0]
    assert path[0].tolist() == list(range(length + 1))
    choice[length - 1] = 9
    accepted, path, next_token = ops.walk(places, choice, length)
    assert accepted.tolist() == [length - 1, length - 1] and next_token.tolist() == [9, 0]


def test_rows_without_trees_commit_one_token() -> None:
    trees = ops.no_trees(3, 0, torch.device("cpu"))
    places = ops.pack(trees, trees.num_nodes, torch.tensor([4, 0, 5]), 4)
    assert places.token.tolist() == [4, 0, 5, 0] and places.bits.tolist() == [[1]] * 4
    # The surplus place draws its own token and still belongs to nobody.
    accepted, path, next_token = ops.walk(places, torch.tensor([0, 0, 8, 0]), 3)
    assert accepted.tolist() == [0, 0, 0]
    assert path.tolist() == [[0] * 4, [1] * 4, [2] * 4] and next_token.tolist() == [0, 0, 8]


@pytest.mark.parametrize("surplus", [0, 1, 130])
def test_rows_without_room_for_nodes_are_packed_as_rows_without_nodes(surplus: int) -> None:
    anchor_R, cpu = torch.tensor([4, 0, 5]), torch.device("cpu")
    none, some = ops.no_trees(3, 0, cpu), ops.no_trees(3, 2, cpu)
    mine, other = (ops.pack(trees, trees.num_nodes, anchor_R, 3 + surplus) for trees in (none, some))
    for field in fields(ops.Places):
        assert torch.equal(getattr(mine, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("case", range(len(BUILD["budget"])))
def test_reference_trees(case: int) -> None:
    start, stop = BUILD["logits_offset"][case : case + 2]
    logits = BUILD["logits"][start:stop].reshape(BUILD["depth_limit"][case], BUILD["vocab"][case])
    budget, num_nodes = int(BUILD["budget"][case]), int(BUILD["n_nodes"][case])
    token, logprob = ops.rank_candidates(torch.from_numpy(logits), budget)
    trees = build(logprob[None], token[None], [budget], [0], 127)
    tree = row_of(trees, 0)
    assert tree.num_nodes == num_nodes
    for column in COLUMNS[:4]:
        assert getattr(tree, column).tolist() == BUILD[column][case, :num_nodes].tolist(), column
    np.testing.assert_allclose(tree.score, BUILD["score"][case, :num_nodes], rtol=0, atol=1e-5)
    places = ops.pack(trees, trees.num_nodes, torch.tensor([0]), num_nodes + 1)
    assert np.array_equal(places.bits, BUILD["ancestors"][case, : num_nodes + 1].view(np.int64))


def test_reference_walks_in_one_batch() -> None:
    num_places = ACCEPT["n_nodes"].astype(np.int64)
    num_rows, max_nodes = len(num_places), ACCEPT["token"].shape[1] - 1
    parent, depth = np.zeros((2, num_rows, max_nodes), dtype=np.int64)
    for row, stop in enumerate(num_places):
        parent[row, : stop - 1] = ACCEPT["parent"][row, 1:stop]
        for node in range(1, stop):
            above = parent[row, node - 1]
            depth[row, node - 1] = 1 + (depth[row, above - 1] if above else 0)
    trees = ops.TreeBatch(
        token=torch.from_numpy(ACCEPT["token"][:, 1:].astype(np.int64)),
        parent=torch.from_numpy(parent),
        depth=torch.from_numpy(depth),
        rank=torch.zeros(num_rows, max_nodes, dtype=torch.int64),
        score=torch.zeros(num_rows, max_nodes),
        num_nodes=torch.from_numpy(num_places - 1),
        depth_limit=int(depth.max()),
    )
    anchor = torch.from_numpy(ACCEPT["token"][:, 0].astype(np.int64))
    places = ops.pack(trees, trees.num_nodes, anchor, int(num_places.sum()) + 5)
    choice = np.zeros(len(places.token), dtype=np.int64)
    starts = places.row_start.tolist()
    for row, stop in enumerate(num_places):
        choice[starts[row] : starts[row + 1]] = ACCEPT["posterior"][row, :stop]
    accepted, path, next_token = ops.walk(places, torch.from_numpy(choice), trees.depth_limit)
    assert accepted.tolist() == (ACCEPT["path_len"] - 1).tolist()
    assert next_token.tolist() == ACCEPT["next_token"].tolist()
    for row, length in enumerate(ACCEPT["path_len"]):
        assert (path[row, :length] - starts[row]).tolist() == ACCEPT["path"][row, :length].tolist()


def test_no_operation_reads_a_value_on_the_host() -> None:
    """Tensors without data: any host read, and any shape that depends on values, raises."""
    with torch.device("meta"):
        token, logprob = ops.rank_candidates(torch.empty(2 * 15, 5000), 16)
        budget, cap, anchor = (torch.empty(2, dtype=torch.int64) for _ in range(3))
    shape = (2, 15, 16)
    trees = ops.build_trees(logprob.view(shape), token.view(shape), budget, cap, 63)
    count = ops.share_places(trees.score, trees.depth, trees.num_nodes, 50)
    places = ops.pack(trees, count, anchor, 50)
    accepted, path, next_token = ops.walk(places, torch.empty(50, dtype=torch.int64, device="meta"), 15)
    assert places.bits.shape == (50, 1) and path.shape == (2, 16)
    assert accepted.shape == next_token.shape == (2,)
