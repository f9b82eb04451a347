# Owns: equality of the acceptance and move kernels with their references, and what acceptance promises of a row.
# Promises: state, results, ring and slots are compared in full; memory that must not be read holds garbage.
# Never: runs without the interpreter.
"""ops/kernels/accept.py against ops/accept.py. R: rows, D: path places, T: places, S: seats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.ops import accept as ops
from ratoon.ops import attention
from ratoon.ops.kernels import accept as twin
from ratoon.ops.launch import use_kernels
from ratoon.ops.sample import Draw
from ratoon.ops.tree import Places, build_trees, pack

DEPTHS, NODES, PAGE, PAGES, SEATS, STOPS, DEPTH = 4, 9, 4, 5, 6, 3, 6
ANCHOR = 8
Accept = Callable[..., ops.AcceptedRows]
both = pytest.mark.parametrize("accept", [ops.accept_rows, twin.accept_rows], ids=["reference", "kernel"])


@dataclass(frozen=True)
class State:
    start_S: Tensor
    anchor_S: Tensor
    limit_S: Tensor
    done_S: Tensor
    stop_id_SE: Tensor
    page_table_SP: Tensor
    round_number: Tensor

    def copy(self) -> State:
        return State(*(getattr(self, field.name).clone() for field in fields(self)))


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """New tensors hold NaN or the largest integer until they are written."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    """Arguments of one acceptance, and the state that it changes."""

    places: Places
    draw: Draw
    finite_T: Tensor
    mass_RQ: Tensor
    state: State
    seat_R: Tensor
    ring: ops.Ring
    depth_limit: int = DEPTHS

    def run(self, accept: Accept, with_ring: bool = True) -> tuple[ops.AcceptedRows, State, ops.Ring]:
        state, ring = self.state.copy(), ops.Ring(self.ring.ints.clone(), self.ring.floats.clone(), self.ring.depth)
        arguments = (self.places, self.draw, self.finite_T, self.mass_RQ, state, self.seat_R, self.depth_limit, PAGE)
        return accept(*arguments, ring if with_ring else None), state, ring


def drawn(rng: np.random.Generator, token_T: np.ndarray) -> Draw:
    count = len(token_T)
    values = {
        field.name: torch.from_numpy(rng.integers(-1, 50, count))
        if "gap" not in field.name and "logit" not in field.name
        else torch.from_numpy(rng.random(count, dtype=np.float32))
        for field in fields(Draw)
    }
    return Draw(**{**values, "token_T": torch.from_numpy(token_T)})


def case(seed: int, rows: int = 5, depths: int = DEPTHS, nodes: int = NODES, masses: int = 2) -> Case:
    """Random trees and draws that mostly follow them, random stops, limits, starts and page tables."""
    rng = np.random.default_rng([seed, rows, depths, nodes])
    logprob = -np.sort(rng.random((rows, depths, 3), dtype=np.float32), axis=2)
    token = np.argsort(rng.random((rows, depths, 5)), axis=2)[:, :, :3].copy()
    budget = torch.from_numpy(rng.integers(0, nodes + 1, rows))
    trees = build_trees(torch.from_numpy(logprob), torch.from_numpy(token), budget, torch.zeros_like(budget), nodes)
    num_places = int(trees.num_nodes.sum()) + rows + 3
    places = pack(trees, trees.num_nodes, torch.full((rows,), ANCHOR), num_places)
    choice = rng.integers(0, 6, num_places)
    for place in range(num_places):
        if places.parent[place] != place and rng.random() < 0.8:
            choice[int(places.parent[place])] = int(places.token[place])
    # Seats in any order, the dummy among them twice.
    seat_R = torch.from_numpy(rng.permutation(np.arange(1, SEATS)))[:rows]
    seat_R[rows - 2 :][torch.from_numpy(rng.random(min(rows, 2)) < 0.5)] = 0
    start = rng.integers(0, PAGE * PAGES - 2, SEATS)
    state = State(
        start_S=torch.from_numpy(start),
        anchor_S=torch.full((SEATS,), ANCHOR),
        limit_S=torch.from_numpy(start + 1 + rng.integers(0, 9, SEATS)),
        done_S=torch.from_numpy(rng.random(SEATS) < 0.2),
        stop_id_SE=torch.from_numpy(np.where(rng.random((SEATS, STOPS)) < 0.3, rng.integers(0, 6, (SEATS, STOPS)), -1)),
        page_table_SP=torch.from_numpy(rng.permutation(np.arange(1, SEATS * PAGES + 1)).reshape(SEATS, PAGES)).int(),
        round_number=torch.tensor([int(rng.integers(0, 99))]),
    )
    state.done_S[0], state.start_S[0], state.limit_S[0] = True, 0, 0
    state.page_table_SP[0] = 0
    ring = ops.Ring(
        torch.full((3, rows + 1, len(ops.SCALARS) + len(ops.ID_KINDS) * DEPTH), -7),
        torch.full((3, rows + 1, len(ops.REAL_KINDS) * DEPTH + masses), -7.0),
        DEPTH,
    )
    mass_RQ = torch.from_numpy(rng.random((rows, masses), dtype=np.float32))
    finite_T = torch.from_numpy(rng.random(num_places) < 0.9)
    return Case(places, drawn(rng, choice), finite_T, mass_RQ, state, seat_R, ring, depths)


def assert_same(got: object, expected: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        value, wanted = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(wanted, Tensor):
            assert value.dtype == wanted.dtype, field.name
            assert value.tolist() == wanted.tolist(), field.name
        else:
            assert value == wanted, field.name


@pytest.mark.parametrize("seed", range(25))
def test_the_kernel_equals_the_reference(seed: int) -> None:
    one = case(seed, rows=1 + seed % 5, masses=seed % 3)
    for got, expected in zip(one.run(twin.accept_rows), one.run(ops.accept_rows), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("with_ring", [False, True])
def test_rows_without_trees(with_ring: bool) -> None:
    one = case(3, depths=0, nodes=0)
    got, expected = one.run(twin.accept_rows, with_ring), one.run(ops.accept_rows, with_ring)
    assert expected[0].path_RD.shape == (5, 1)
    for value, wanted in zip(got, expected, strict=True):
        assert_same(value, wanted)


def test_long_paths_through_two_words() -> None:
    one = case(1, rows=2, depths=70, nodes=70)
    one = replace(
        one, ring=ops.Ring(torch.zeros(2, 2, 6 + 4 * 71, dtype=torch.int64), torch.zeros(2, 2, 4 * 71 + 2), 71)
    )
    for got, expected in zip(one.run(twin.accept_rows), one.run(ops.accept_rows), strict=True):
        assert_same(got, expected)


def line(tokens: list[int], stop: int = -1, limit: int = 100, done: bool = False, start: int = 6) -> Case:
    """One row in seat 2 whose tree is a chain that the target draws in full, then token 5."""
    length = len(tokens)
    logprob = torch.full((1, length, 1), -0.5)
    number = torch.tensor([length])
    trees = build_trees(logprob, torch.tensor(tokens).view(1, -1, 1), number, number, length)
    places = pack(trees, number, torch.tensor([ANCHOR]), length + 2)
    one = case(0, rows=1, depths=length)
    state = one.state
    state.start_S[2], state.limit_S[2], state.done_S[2] = start, limit, done
    state.stop_id_SE[2] = torch.tensor([-1, stop, -1])
    state.page_table_SP[2] = torch.tensor([3, 9, 1, 4, 7])
    draw = drawn(np.random.default_rng(0), np.array([*tokens, 5, 0]))
    finite_T = torch.ones(length + 2, dtype=torch.bool)
    return replace(one, places=places, draw=draw, finite_T=finite_T, seat_R=torch.tensor([2]), depth_limit=length)


@both
def test_a_whole_path_is_committed(accept: Accept) -> None:
    one = line([1, 2, 3])
    rows, state, ring = one.run(accept)
    assert rows.tokens_RD.tolist() == [[1, 2, 3, 5]]
    assert (rows.emitted_R.tolist(), rows.accepted_R.tolist(), rows.done_R.tolist()) == ([4], [3], [False])
    assert (int(state.start_S[2]), int(state.anchor_S[2]), bool(state.done_S[2])) == (10, 5, False)
    assert rows.position_RD.tolist() == [[6, 7, 8, 9]]
    assert rows.target_RD.tolist() == rows.source_RD.tolist() == [[9 * 4 + 2, 9 * 4 + 3, 4, 5]]
    number = int(one.state.round_number)
    assert int(state.round_number) == number + 1
    packed = ring.ints[number % 3, 0].tolist()
    assert packed[:6] == [number, 4, 3, 0, 0, 3] and packed[6 : 6 + DEPTH] == [1, 2, 3, 5, 0, 0]
    assert ring.floats[number % 3, 0, -2:].tolist() == one.mass_RQ[0].tolist()
    assert (ring.ints[(number + 1) % 3] == -7).all() and (ring.ints[number % 3, 1] == -7).all()


def test_a_tree_deeper_than_the_limit_is_walked_to_the_limit() -> None:
    rows, _, _ = replace(line([1, 2, 3]), depth_limit=2).run(twin.accept_rows)
    assert rows.emitted_R.tolist() == [3] and rows.path_RD.tolist() == [[0, 1, 2]]


@both
def test_a_stop_token_ends_the_row(accept: Accept) -> None:
    rows, state, _ = line([1, 2, 3], stop=2).run(accept)
    assert rows.tokens_RD.tolist() == [[1, 2, -1, -1]]
    assert (int(rows.emitted_R), int(rows.accepted_R), bool(rows.done_R)) == (2, 1, True)
    assert rows.target_RD[0, 2:].tolist() == rows.source_RD[0, 2:].tolist() == [0, 0]
    assert (int(state.start_S[2]), int(state.anchor_S[2]), bool(state.done_S[2])) == (8, 2, True)


@both
@pytest.mark.parametrize(("limit", "emitted"), [(7, 0), (8, 1), (10, 3), (11, 4), (12, 4)])
def test_nothing_goes_past_the_limit(accept: Accept, limit: int, emitted: int) -> None:
    rows, state, _ = line([1, 2, 3], limit=limit).run(accept)
    assert int(rows.emitted_R) == emitted and bool(rows.done_R) == (limit < 12)
    assert int(state.start_S[2]) == 6 + emitted
    assert int(state.anchor_S[2]) == [ANCHOR, 1, 2, 3, 5][emitted]


@both
def test_a_done_row_commits_nothing(accept: Accept) -> None:
    one = line([1, 2, 3], done=True)
    rows, state, _ = one.run(accept)
    assert int(rows.emitted_R) == int(rows.accepted_R) == 0 and bool(rows.done_R)
    assert rows.tokens_RD.tolist() == [[-1] * 4]
    assert (int(state.start_S[2]), int(state.anchor_S[2])) == (6, ANCHOR)


@both
def test_the_dummy_seat_never_changes(accept: Accept) -> None:
    one = replace(case(4, rows=3), seat_R=torch.tensor([0, 3, 0]))
    rows, state, _ = one.run(accept)
    assert rows.emitted_R[[0, 2]].tolist() == [0, 0] and rows.done_R[[0, 2]].all()
    for field in fields(State):
        if field.name != "round_number":
            assert getattr(state, field.name)[0].tolist() == getattr(one.state, field.name)[0].tolist(), field.name


@both
@pytest.mark.parametrize(("broken", "stop", "is_bad"), [(0, -1, True), (3, -1, True), (4, -1, False), (2, 2, False)])
def test_only_a_place_that_counts_makes_a_row_bad(accept: Accept, broken: int, stop: int, is_bad: bool) -> None:
    """Chain 1 2 3: places 0 to 3; place 4 is a surplus one. A place behind the stop does not count."""
    one = line([1, 2, 3], stop=stop)
    one.finite_T[broken] = False
    assert one.run(accept)[0].bad_R.tolist() == [is_bad]


@both
def test_a_broken_node_that_was_not_drawn_leaves_its_row_good(accept: Accept) -> None:
    one = line([1, 2, 3])
    one.draw.token_T[1] = 4
    one.finite_T[2:] = False
    rows, _, _ = one.run(accept)
    assert rows.tokens_RD.tolist() == [[1, 4, -1, -1]] and rows.bad_R.tolist() == [False]


@both
def test_a_done_row_with_a_broken_root_says_so(accept: Accept) -> None:
    one = line([1, 2, 3], done=True)
    one.finite_T[0] = False
    assert one.run(accept)[0].bad_R.tolist() == [True]


@pytest.mark.parametrize("width", [1, 30, 64, 576])
def test_finite_rows(width: int) -> None:
    hidden = torch.randn(6, width)
    hidden[1, width - 1] = torch.nan
    hidden[3, 0] = torch.inf
    hidden[4, width // 2] = -torch.inf
    assert twin.finite_rows(hidden).tolist() == ops.finite_rows(hidden).tolist()
    assert ops.finite_rows(hidden).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(3, 2, 4), (1, 3, 96), (2, 1, 64)])
@pytest.mark.parametrize("width", [1, 5, 16, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_move_equals_the_reference(layers: int, heads: int, head_dim: int, width: int, dtype: torch.dtype) -> None:
    """Chains of slots, each of which is read as a source and written as a target."""
    rng = np.random.default_rng([layers, width])
    num_slots = 4 + 3 * 2 * width
    cache = torch.randn(layers, num_slots, 2, heads, head_dim).to(dtype)
    own = rng.permutation(np.arange(4, num_slots)).reshape(3, -1)
    source = torch.from_numpy(np.sort(own, axis=1)[:, :width].copy())
    target = torch.from_numpy(rng.permuted(np.sort(own, axis=1)[:, :width], axis=1))
    target[1] = source[1]
    kept = torch.from_numpy(rng.random((3, width)) < 0.8)
    source, target = source * kept, target * kept
    cache[:, 1:4] = torch.nan
    moved, expected = cache.clone(), cache.clone()
    twin.move(moved, source, target)
    attention.move(expected, source.flatten(), target.flatten())
    assert torch.equal(moved[:, 4:], expected[:, 4:])
    assert torch.equal(moved[:, 0], cache[:, 0]), "what is not kept is not written"


def test_the_reference_hands_over() -> None:
    one = case(7)
    expected = one.run(ops.accept_rows)
    use_kernels("triton")
    try:
        with torch.inference_mode():
            got = one.run(ops.accept_rows)
            assert ops.finite_rows(torch.ones(2, 3)).tolist() == [True, True]
    finally:
        use_kernels("auto")
    for value, wanted in zip(got, expected, strict=True):
        assert_same(value, wanted)
