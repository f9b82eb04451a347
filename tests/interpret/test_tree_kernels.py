# Owns: equality of the tree kernels with their references.
# Promises: node for node, ties included; every element of an output that began as garbage is compared.
# Never: runs without the interpreter.
"""ops/kernels/tree.py against ops/tree.py. R: rows, L: depths, K: candidates, M: nodes, T: places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.ops import tree as ops
from ratoon.ops.kernels import tree as twin
from ratoon.ops.launch import use_kernels

STEPS = [-0.0, -0.25, -0.5, -0.75, -1.0, -2.5, -np.inf]


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """New tensors hold NaN or the largest integer until they are written."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def candidates(
    rng: np.random.Generator, rows: int, depths: int, ranks: int, grain: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(logprob, token) [R, L, K]: drawn from a few values (grain 0), or a softmax rounded to `grain`."""
    if grain:
        logits = np.round(rng.normal(scale=2, size=(rows, depths, ranks)) / grain) * grain
        logprob = (logits - np.log(np.exp(logits).sum(2, keepdims=True)) - 0.1).astype(np.float32)
    else:
        logprob = rng.choice(np.array(STEPS, dtype=np.float32), size=(rows, depths, ranks))
    token = np.argsort(rng.random((rows, depths, ranks)), axis=2)
    return torch.from_numpy(-np.sort(-logprob, axis=2)), torch.from_numpy(token)


def assert_same_trees(trees: ops.TreeBatch, expected: ops.TreeBatch, num_ranks: int) -> None:
    assert trees.depth_limit == expected.depth_limit
    assert trees.num_nodes.tolist() == expected.num_nodes.tolist()
    assert torch.equal(trees.score, expected.score)
    for row, count in enumerate(expected.num_nodes.tolist()):
        for column in ("token", "parent", "depth", "rank"):
            values = getattr(trees, column)[row, :count].tolist()
            assert values == getattr(expected, column)[row, :count].tolist(), column
    # The rest is no node, but in range.
    assert ((trees.parent >= 0) & (trees.parent <= trees.token.shape[1])).all()
    assert ((trees.depth >= 1) & (trees.depth <= trees.depth_limit)).all()
    assert ((trees.rank >= 0) & (trees.rank < num_ranks)).all()
    assert ((trees.token >= 0) & (trees.token < num_ranks)).all()


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 31, 32, 33])
@pytest.mark.parametrize(("depths", "ranks"), [(1, 5), (4, 1), (3, 4), (15, 9)])
@pytest.mark.parametrize("grain", [0.0, 1.0])
def test_build_equals_the_reference(max_nodes: int, depths: int, ranks: int, grain: float) -> None:
    rng = np.random.default_rng([max_nodes, depths, ranks, int(grain * 10)])
    logprob, token = candidates(rng, 3, depths, ranks, grain)
    budget = torch.tensor([max_nodes, max_nodes + 7, max_nodes // 2])
    cap = torch.tensor([0, ranks + 2, int(rng.integers(1, ranks + 1))])
    expected = ops.build_trees(logprob, token, budget, cap, max_nodes)
    assert_same_trees(twin.build_trees(logprob, token, budget, cap, max_nodes), expected, ranks)


@pytest.mark.parametrize(("depths", "ranks"), [(15, 127), (127, 2)])
def test_build_at_the_largest_size(depths: int, ranks: int) -> None:
    logprob, token = candidates(np.random.default_rng(depths), 1, depths, ranks, 0.5)
    budget, cap = torch.tensor([127]), torch.tensor([0])
    expected = ops.build_trees(logprob, token, budget, cap, 127)
    assert_same_trees(twin.build_trees(logprob, token, budget, cap, 127), expected, ranks)


def test_build_of_rows_that_draft_nothing() -> None:
    logprob, token = candidates(np.random.default_rng(1), 5, 3, 4)
    logprob[:, 0, 0] = torch.tensor([-1.0, -torch.inf, torch.nan, -1.0, 0.5])
    logprob[:, 0, 1:] = -torch.inf
    logprob[:, 1] = torch.nan
    budget, cap = torch.tensor([9, 9, 9, -3, 9]), torch.tensor([0, 0, 0, 0, -1])
    expected = ops.build_trees(logprob, token, budget, cap, 9)
    trees = twin.build_trees(logprob, token, budget, cap, 9)
    assert trees.num_nodes.tolist() == [1, 0, 0, 0, 0]
    assert_same_trees(trees, expected, 4)


def test_build_without_depths_or_nodes_is_no_tree() -> None:
    logprob, token = candidates(np.random.default_rng(1), 2, 0, 4)
    number = torch.tensor([3, 3])
    assert twin.build_trees(logprob, token, number, number, 3).num_nodes.tolist() == [0, 0]
    logprob, token = candidates(np.random.default_rng(1), 2, 3, 4)
    assert twin.build_trees(logprob, token, number, number, 0).token.shape == (2, 0)


def grown(seed: int, rows: int, depths: int, ranks: int, max_nodes: int) -> ops.TreeBatch:
    rng = np.random.default_rng([seed, rows, depths, ranks, max_nodes])
    logprob, token = candidates(rng, rows, depths, ranks, 0.0 if seed % 2 else 0.5)
    budget = torch.from_numpy(rng.integers(0, max_nodes + 2, rows))
    cap = torch.from_numpy(rng.integers(0, ranks + 1, rows))
    return ops.build_trees(logprob, token, budget, cap, max_nodes)


@pytest.mark.parametrize("max_nodes", [0, 1, 15, 40])
def test_forecast_equals_the_reference(max_nodes: int) -> None:
    trees = grown(3, 4, 7, 5, max_nodes)
    sizes = ((2, 3), (4, 7), (4, 31), (8, 7), (8, 127), (1, 5))
    torch.testing.assert_close(twin.forecast_mass(trees, sizes), ops.forecast_mass(trees, sizes), rtol=1e-6, atol=0)
    assert twin.forecast_mass(trees, ()).shape == (4, 0)


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (2, 1), (2, 2), (5, 3), (5, 4), (33, 5)])
def test_share_equals_the_reference(rows: int, seed: int) -> None:
    trees = grown(seed, rows, 4, 3, 12)
    for places in {rows * 4} if rows > 9 else {rows + 1, rows + 5, rows * 4, rows * 13 - 1}:
        counts = twin.share_places(trees.score, trees.depth, trees.num_nodes, places)
        expected = ops.share_places(trees.score, trees.depth, trees.num_nodes, places)
        assert counts.tolist() == expected.tolist(), places


@pytest.mark.parametrize("max_nodes", [0, 1, 15, 63, 64, 127, 130])
@pytest.mark.parametrize("surplus", [0, 1, 150])
@pytest.mark.parametrize("is_given", [False, True])
def test_pack_equals_the_reference(max_nodes: int, surplus: int, is_given: bool) -> None:
    rng = np.random.default_rng([max_nodes, surplus])
    trees = grown(max_nodes, 3, 6, 4, max_nodes)
    count = torch.from_numpy(rng.integers(0, trees.num_nodes.numpy() + 1))
    anchor = torch.tensor([7, 0, 9])
    places = 3 + int(count.sum()) + surplus
    expected = ops.pack(trees, count, anchor, places)
    out = None
    if is_given:
        wide = torch.full((places + 4, expected.bits.shape[1] + 2), -5)
        token, row_of, parent, depth, local = torch.full((5, places + 4), -5)[:, :places].unbind(0)
        out = ops.Places(token, row_of, parent, depth, local, torch.full((5,), -5), wide[:places, :-2])
    packed = twin.pack(trees, count, anchor, places, out)
    for name in ("token", "row_of", "parent", "depth", "local", "row_start", "bits"):
        assert getattr(packed, name).tolist() == getattr(expected, name).tolist(), name
    if out is not None:
        assert packed is out
        assert (wide[places:] == -5).all() and (wide[:, -2:] == -5).all(), "wrote beyond what it was given"
        again = ops.pack(trees, count, anchor, places, out)
        assert again is out and out.bits.tolist() == expected.bits.tolist()


def test_pack_follows_long_chains() -> None:
    logprob, token = torch.zeros(2, 127, 1), torch.zeros(2, 127, 1, dtype=torch.int64)
    number = torch.tensor([127, 126])
    trees = ops.build_trees(logprob, token, number, number, 127)
    anchor = torch.tensor([1, 2])
    expected, packed = (each(trees, trees.num_nodes, anchor, 258) for each in (ops.pack, twin.pack))
    assert packed.bits.tolist() == expected.bits.tolist()


@pytest.mark.parametrize("depth_limit", [0, 1, 6, 9])
def test_history_equals_the_reference(depth_limit: int) -> None:
    trees = grown(5, 4, depth_limit, 3, 20)
    places = ops.pack(trees, trees.num_nodes, torch.tensor([3, 4, 5, 6]), 90)
    assert twin.history(places, depth_limit).tolist() == ops.history(places, depth_limit).tolist()


def test_the_references_hand_over() -> None:
    """With kernels asked for, the reference's own functions give the twins' results."""
    logprob, token = candidates(np.random.default_rng(8), 2, 4, 3, 1.0)
    number, anchor = torch.tensor([9, 5]), torch.tensor([1, 2])

    def every() -> list[Tensor]:
        trees = ops.build_trees(logprob, token, number, number, 9)
        count = ops.share_places(trees.score, trees.depth, trees.num_nodes, 12)
        places = ops.pack(trees, count, anchor, 12)
        return [trees.score, count, places.bits, ops.history(places, 4), ops.forecast_mass(trees, ((3, 4),))]

    expected = every()
    launched: list[str] = []
    from ratoon.ops.launch import set_recorder

    def recorder(run, *args) -> None:  # type: ignore[no-untyped-def]
        launched.append(run.__name__)
        run(*args)

    use_kernels("triton")
    set_recorder(recorder)
    try:
        with torch.inference_mode():
            values = every()
    finally:
        use_kernels("auto")
        set_recorder(None)
    assert launched == ["_build", "_share", "_pack", "_history", "_forecast"]
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=0)
