# Owns: the tree and acceptance kernels on a GPU, against the references on the CPU.
# Promises: real shapes; all values are equal, but for the forecast's sums, whose order differs.
# Never: times anything.
"""ops/kernels/tree.py and accept.py on a GPU. R: rows, L: depths, K: candidates, M: nodes, S: seats."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.ops import accept, attention, tree
from ratoon.ops.kernels import accept as accept_twin
from ratoon.ops.kernels import tree as tree_twin
from ratoon.ops.sample import Draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STOPS, PAGE, PAGES, MASSES = 32, 16, 40, 6


@dataclass(frozen=True)
class State:
    start_S: Tensor
    anchor_S: Tensor
    limit_S: Tensor
    done_S: Tensor
    stop_id_SE: Tensor
    page_table_SP: Tensor
    round_number: Tensor


def on_gpu(value: Any) -> Any:
    """A copy on the GPU of a tensor or of a dataclass of tensors; other values as they are."""
    if isinstance(value, Tensor):
        return value.to("cuda", copy=True)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{field.name: on_gpu(getattr(value, field.name)) for field in fields(value)})
    return value


def assert_same(got: Any, expected: Any, *skipped: str) -> None:
    for field in fields(expected):
        value, wanted = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(wanted, Tensor) and field.name not in skipped:
            assert value.dtype == wanted.dtype and torch.equal(value.cpu(), wanted), field.name


def candidates(seed: int, rows: int, depths: int, ranks: int, grain: float) -> tuple[Tensor, Tensor]:
    """(logprob, token) [R, L, K]; a coarse grain makes ties, and some rows have candidates without mass."""
    rng = np.random.default_rng([seed, rows, depths, ranks])
    logprob = -np.sort(rng.exponential(2.0, (rows, depths, ranks)), axis=2)
    logprob = np.round(logprob / grain) * grain if grain else logprob
    logprob[rows // 2 :, :, ranks - ranks // 3 :] = -np.inf
    token = np.argsort(rng.random((rows, depths, 4 * ranks)), axis=2)[:, :, :ranks]
    return torch.from_numpy(logprob.astype(np.float32)), torch.from_numpy(token.copy())


def trees_of(seed: int, rows: int, depths: int, ranks: int, nodes: int, grain: float = 0.5) -> tree.TreeBatch:
    budget = torch.from_numpy(np.random.default_rng(seed).integers(nodes // 2, nodes + 1, rows))
    return tree.build_trees(
        *candidates(seed, rows, depths, ranks, grain), budget, torch.zeros(rows, dtype=torch.int64), nodes
    )


@dataclass(frozen=True)
class Round:
    """What acceptance gets: most draws follow a child."""

    places: tree.Places
    draw: Draw
    finite_T: Tensor
    mass_RQ: Tensor
    state: State
    seat_R: Tensor
    ring: accept.Ring


def round_of(seed: int, rows: int, depths: int, nodes: int) -> Round:
    rng = np.random.default_rng([seed, rows, nodes])
    trees = trees_of(seed, rows, depths, 16, nodes)
    num_places = rows * (nodes + 1)
    places = tree.pack(trees, trees.num_nodes, torch.from_numpy(rng.integers(0, 60, rows)), num_places)
    choice = torch.from_numpy(rng.integers(0, 60, num_places))
    follows = torch.from_numpy(rng.random(num_places) < 0.8)
    # Of several children that write it, any one is drawn.
    choice[places.parent[follows]] = places.token[follows]
    values = {
        field.name: torch.from_numpy(rng.random(num_places, dtype=np.float32))
        if "gap" in field.name or "logit" in field.name
        else torch.from_numpy(rng.integers(-1, 60, num_places))
        for field in fields(Draw)
    }
    seats = rows + 1
    start = rng.integers(0, PAGE * (PAGES - 9), seats)
    stop_id = np.where(rng.random((seats, STOPS)) < 0.03, rng.integers(0, 60, (seats, STOPS)), -1)
    pages = rng.permutation(np.arange(1, seats * PAGES + 1)).reshape(seats, PAGES)
    state = State(
        start_S=torch.from_numpy(start),
        anchor_S=torch.from_numpy(rng.integers(0, 60, seats)),
        limit_S=torch.from_numpy(start + 1 + rng.integers(1, 40, seats)),
        done_S=torch.from_numpy(rng.random(seats) < 0.1),
        stop_id_SE=torch.from_numpy(stop_id),
        page_table_SP=torch.from_numpy(pages).int(),
        round_number=torch.tensor([seed + 1]),
    )
    state.done_S[0] = True
    seat_R = torch.from_numpy(rng.permutation(np.arange(1, seats)))
    seat_R[rows - rows // 4 :] = 0
    ring = accept.Ring(torch.zeros(3, rows, 6 + 4 * 16, dtype=torch.int64), torch.zeros(3, rows, 4 * 16 + MASSES), 16)
    mass_RQ = torch.from_numpy(rng.random((rows, MASSES), dtype=np.float32))
    finite_T = torch.from_numpy(rng.random(num_places) < 0.95)
    return Round(places, Draw(**{**values, "token_T": choice}), finite_T, mass_RQ, state, seat_R, ring)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(("depths", "ranks", "nodes"), [(15, 15, 15), (15, 16, 63), (15, 127, 127), (7, 16, 31)])
@pytest.mark.parametrize("grain", [0.0, 0.5])
def test_trees(rows: int, depths: int, ranks: int, nodes: int, grain: float) -> None:
    logprob, token = candidates(1, rows, depths, ranks, grain)
    budget, cap = torch.full((rows,), nodes), torch.arange(rows) % (ranks + 1)
    expected = tree.build_trees(logprob, token, budget, cap, nodes)
    got = tree_twin.build_trees(on_gpu(logprob), on_gpu(token), on_gpu(budget), on_gpu(cap), nodes)
    assert torch.equal(got.score.cpu(), expected.score) and torch.equal(got.num_nodes.cpu(), expected.num_nodes)
    real_RM = expected.score > -torch.inf
    for name in ("token", "parent", "depth", "rank"):
        assert torch.equal(getattr(got, name).cpu()[real_RM], getattr(expected, name)[real_RM]), name
    sizes = ((2, 1), (4, 3), (8, 7), (16, 15), (16, 63))
    mass_RQ = tree_twin.forecast_mass(got, sizes).cpu()
    torch.testing.assert_close(mass_RQ, tree.forecast_mass(expected, sizes), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("nodes", [15, 63, 127])
def test_shares_and_places(rows: int, nodes: int) -> None:
    trees = trees_of(3, rows, 15, 16, nodes)
    given = on_gpu(trees)
    anchor = torch.arange(rows)
    for places in (rows + 1, rows * 8, rows * (nodes + 1) - 1, rows * (nodes + 1)):
        count = tree.share_places(trees.score, trees.depth, trees.num_nodes, places)
        if places < rows * (nodes + 1):
            shared = tree_twin.share_places(given.score, given.depth, given.num_nodes, places)
            assert torch.equal(shared.cpu(), count)
        expected = tree.pack(trees, count, anchor, places)
        got = tree_twin.pack(given, on_gpu(count), on_gpu(anchor), places)
        assert_same(got, expected)
        assert torch.equal(tree_twin.history(got, 15).cpu(), tree.history(expected, 15))


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(("depths", "nodes"), [(15, 15), (15, 63), (15, 127)])
@pytest.mark.parametrize("seed", range(3))
def test_acceptance(rows: int, depths: int, nodes: int, seed: int) -> None:
    one = round_of(seed, rows, depths, nodes)
    given = on_gpu(one)
    got, expected = (
        run(each.places, each.draw, each.finite_T, each.mass_RQ, each.state, each.seat_R, depths, PAGE, each.ring)
        for run, each in ((accept_twin.accept_rows, given), (accept.accept_rows, one))
    )
    assert_same(got, expected)
    assert_same(given.state, one.state)
    assert_same(given.ring, one.ring)


@pytest.mark.parametrize("width", [576, 4096])
def test_finite_rows(width: int) -> None:
    hidden = torch.randn(70, width, device="cuda", dtype=torch.bfloat16)
    hidden[3, width - 1], hidden[9, 0], hidden[69, 77] = torch.nan, torch.inf, -torch.inf
    assert torch.equal(accept_twin.finite_rows(hidden), torch.isfinite(hidden).all(1))


@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(36, 8, 128), (30, 3, 64)])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 16), (64, 16), (2, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_move(layers: int, heads: int, head_dim: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """Every slot that is written is read for another place."""
    num_slots = PAGE + rows * width
    cache = torch.randn(layers, num_slots, 2, heads, head_dim, device="cuda", dtype=dtype)
    source = torch.arange(PAGE, num_slots, device="cuda").view(rows, width)
    target = source.roll(1, 1).clone()
    target[:, width // 2] = 0
    source[:, width // 2] = 0
    expected = cache.clone()
    attention.move(expected, source.flatten(), target.flatten())
    accept_twin.move(cache, source, target)
    assert torch.equal(cache[:, PAGE:], expected[:, PAGE:])
