# Owns: the tests of ops/attention.py.
# Promises: trees over scattered pages are held against a float64 softmax that knows neither pages nor bits.
# Never: needs a model.
"""Paged attention, its layouts and masks, and the move of accepted slots. R: rows, T: places, C: context slots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.core.rope import RopeConfig
from ratoon.models.layers import Heads, RMSNorm, Rotary
from ratoon.ops.attention import (
    Layout,
    additive,
    block_layout,
    move,
    packed_layout,
    paged_attention,
    slots,
    store,
    tree_mask,
)
from ratoon.ops.tree import Places, TreeBatch, pack
from ratoon.spec.paged import LoneAttend, PagedAttend

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
NUM_PAGES = 64


def random_trees(sizes: Sequence[int], most: int, seed: int) -> TreeBatch:
    """Trees whose parents are any earlier node, so that paths are scattered and reach every depth."""
    rng = np.random.default_rng(seed)
    parent, depth = (np.zeros((len(sizes), most), dtype=np.int64) for _ in range(2))
    for row, size in enumerate(sizes):
        for node in range(1, size + 1):
            parent[row, node - 1] = above = int(rng.integers(max(0, node - 5), node))
            depth[row, node - 1] = 1 + (depth[row, above - 1] if above else 0)
    zeros = torch.zeros(len(sizes), most)
    parent_RM, depth_RM = torch.from_numpy(parent), torch.from_numpy(depth)
    return TreeBatch(parent_RM, parent_RM, depth_RM, parent_RM, zeros, torch.tensor(sizes), int(depth.max()))


def scattered_pages(num_rows: int, num_pages: int, seed: int) -> Tensor:
    """int32 [R, P], all different, none of them page 0."""
    order = torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return order[: num_rows * num_pages].view(num_rows, num_pages).to(torch.int32)


def ancestors(places: Places, place: int) -> list[int]:
    """A place and those above it, by following parents."""
    path = [place]
    while int(places.parent[path[-1]]) != path[-1]:
        path.append(int(places.parent[path[-1]]))
    return path


def softmax_row(q_HD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
    """One query place against its visible keys, float64 [H, D]."""
    group = q_HD.shape[0] // k_NKD.shape[1]
    out = []
    for head in range(q_HD.shape[0]):
        score_N = k_NKD[:, head // group].double() @ q_HD[head].double() * q_HD.shape[1] ** -0.5
        out.append(score_N.softmax(0) @ v_NKD[:, head // group].double())
    return torch.stack(out)


def filled_cache(page_size: int, seed: int) -> Tensor:
    return torch.randn(NUM_PAGES * page_size, 2, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


# At position 0 a rotation changes nothing.
UNTURNED = Rotary(RopeConfig(), HEAD_DIM)


def random_qkv(num: int, seed: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(num, size, HEAD_DIM, generator=generator) for size in sizes)
    return q, k, v


def attend(
    layout: Layout, seen_RNC: Tensor, cache: Tensor, page_size: int, qkv: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    q, k, v = qkv
    store(cache, layout, torch.stack((k, v), dim=1))
    return paged_attention(q, cache, v, layout, additive(seen_RNC, q.shape[1] // KV_HEADS, q.dtype), page_size)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("sizes", "bases", "surplus"), [((5,), (6,), 0), ((3, 9, 0), (0, 7, 3), 4), ((1, 1), (2, 9), 0)]
)
def test_trees_over_scattered_pages(
    sizes: tuple[int, ...], bases: tuple[int, ...], surplus: int, page_size: int
) -> None:
    trees = random_trees(sizes, 10, seed=len(sizes))
    places = sum(sizes) + len(sizes) + surplus
    packed = pack(trees, trees.num_nodes, torch.zeros(len(sizes), dtype=torch.int64), places)
    context, width = 20, max(sizes) + 1
    page_RP = scattered_pages(len(sizes), -(-context // page_size), seed=3)
    base_R = torch.tensor(bases)
    layout = packed_layout(packed.row_start, packed.row_of, packed.local, base_R, page_RP, page_size, width)
    cache, qkv = filled_cache(page_size, 1), random_qkv(places, 2)
    before = cache.clone()
    seen = tree_mask(layout, packed.bits, base_R, context)
    out = attend(layout, seen, cache, page_size, qkv)
    for place in range(places):
        row = int(packed.row_of[place])
        if row == len(sizes):  # a dummy sees itself alone
            want = qkv[2][place].double().repeat_interleave(HEADS // KV_HEADS, 0)
        else:
            prefix = [int(page_RP[row, i // page_size]) * page_size + i % page_size for i in range(bases[row])]
            path = ancestors(packed, place)
            k = torch.cat((before[prefix, 0], qkv[1][path]))
            v = torch.cat((before[prefix, 1], qkv[2][path]))
            want = softmax_row(qkv[0][place], k, v)
        torch.testing.assert_close(out[place].double(), want, atol=2e-6, rtol=1e-5)


def test_places_are_stored_from_the_base_on_and_dummies_on_page_0() -> None:
    sizes, bases, page_size, context = (3, 0, 6), (2, 5, 0), 4, 16
    trees = random_trees(sizes, 6, seed=1)
    packed = pack(trees, trees.num_nodes, torch.zeros(3, dtype=torch.int64), 15)
    page_RP = scattered_pages(3, 4, seed=5)
    base_R = torch.tensor(bases)
    layout = packed_layout(packed.row_start, packed.row_of, packed.local, base_R, page_RP, page_size, 7)
    cache, qkv = filled_cache(page_size, 1), random_qkv(15, 2)
    before = cache.clone()
    attend(layout, tree_mask(layout, packed.bits, base_R, context), cache, page_size, qkv)
    written = set(range(page_size))
    for row, size in enumerate(sizes):
        first = int(packed.row_start[row])
        for node in range(size + 1):
            position = bases[row] + node
            slot = int(page_RP[row, position // page_size]) * page_size + position % page_size
            assert torch.equal(cache[slot, 0], qkv[1][first + node])
            assert torch.equal(cache[slot, 1], qkv[2][first + node])
            written.add(slot)
    others = [slot for slot in range(len(cache)) if slot not in written]
    assert torch.equal(cache[others], before[others])


@pytest.mark.parametrize("exact", [False, True])
def test_a_block_is_a_rectangle_of_consecutive_places(exact: bool) -> None:
    bases, width, page_size = ((9,) if exact else (9, 0, 4)), 5, 4
    page_RP = scattered_pages(len(bases), 4, seed=2)
    base_R = torch.tensor(bases)
    context = 14 if exact else 16
    layout = block_layout(base_R, page_RP, page_size, width, exact)
    cache, qkv = filled_cache(page_size, 1), random_qkv(len(bases) * width, 2)
    before = cache.clone()
    key_C = torch.arange(context)
    position_RN = base_R[:, None] + torch.arange(width)
    out = attend(layout, key_C <= position_RN[:, :, None], cache, page_size, qkv)
    for row, node in itertools.product(range(len(bases)), range(width)):
        prefix = [int(page_RP[row, i // page_size]) * page_size + i % page_size for i in range(bases[row])]
        own = slice(row * width, row * width + node + 1)
        k, v = torch.cat((before[prefix, 0], qkv[1][own])), torch.cat((before[prefix, 1], qkv[2][own]))
        want = softmax_row(qkv[0][row * width + node], k, v)
        torch.testing.assert_close(out[row * width + node].double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [2, 6])  # one query head per key head, and three
def test_query_heads_share_key_heads_in_order(heads: int) -> None:
    base_R, page_RP = torch.tensor([3, 1]), scattered_pages(2, 2, seed=4)
    layout = block_layout(base_R, page_RP, 4, 2)
    cache, qkv = filled_cache(4, 1), random_qkv(4, 2, heads)
    before = cache.clone()
    position_RN = base_R[:, None] + torch.arange(2)
    out = attend(layout, torch.arange(8) <= position_RN[:, :, None], cache, 4, qkv)
    prefix = [int(page_RP[0, 0]) * 4 + i for i in range(3)]
    k, v = (torch.cat((before[prefix, i], qkv[1 + i][:2])) for i in (0, 1))
    torch.testing.assert_close(out[1].double(), softmax_row(qkv[0][1], k, v), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_nodes", [62, 63, 64, 127])  # with the root: one word, exactly one, and beyond
def test_the_mask_is_right_across_words(num_nodes: int) -> None:
    trees = random_trees((num_nodes, num_nodes // 2), num_nodes, seed=num_nodes)
    places = num_nodes + num_nodes // 2 + 2
    packed = pack(trees, trees.num_nodes, torch.zeros(2, dtype=torch.int64), places)
    base_R, context = torch.tensor([2, 5]), num_nodes + 8
    page_RP = torch.arange(1, 2 * context + 1, dtype=torch.int32).view(2, context)
    layout = packed_layout(packed.row_start, packed.row_of, packed.local, base_R, page_RP, 1, num_nodes + 1)
    assert packed.bits.shape[1] == num_nodes // 64 + 1
    want = torch.zeros(2, num_nodes + 1, context, dtype=torch.bool)
    for place in range(places):
        row, local = int(packed.row_of[place]), int(packed.local[place])
        want[row, local, : int(base_R[row])] = True
        for above in ancestors(packed, place):
            want[row, local, int(base_R[row]) + int(packed.local[above])] = True
    got = tree_mask(layout, packed.bits, base_R, context)
    assert torch.equal(got[0], want[0])
    count = num_nodes // 2 + 1
    assert torch.equal(got[1, :count], want[1, :count])


def test_a_dummy_row_of_pages_stays_finite_and_alone() -> None:
    """Padding rows: seat 0, base 0, one root on page 0."""
    row_start = torch.tensor([0, 1, 2, 4])
    row_of, local = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 0, 1])
    page_RP = torch.zeros(2, 2, dtype=torch.int32)
    layout = packed_layout(row_start, row_of, local, torch.zeros(2, dtype=torch.int64), page_RP, 4, 1)
    assert layout.slot_T.tolist() == [0, 0, 0, 0]
    cache, qkv = filled_cache(4, 1), random_qkv(4, 2)
    before = cache.clone()
    seen = tree_mask(layout, torch.ones(4, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 8)
    out = attend(layout, seen, cache, 4, qkv)
    assert torch.isfinite(out).all() and torch.equal(cache[1:], before[1:])
    assert torch.equal(out[2:], qkv[2][2:].repeat_interleave(2, 1))


def test_what_lies_beyond_a_row_is_never_read() -> None:
    trees = random_trees((4, 2), 4, seed=9)
    packed = pack(trees, trees.num_nodes, torch.zeros(2, dtype=torch.int64), 9)
    base_R, page_RP = torch.tensor([6, 1]), scattered_pages(2, 4, seed=6)
    layout = packed_layout(packed.row_start, packed.row_of, packed.local, base_R, page_RP, 4, 5)
    seen, qkv = tree_mask(layout, packed.bits, base_R, 16), random_qkv(9, 2)
    clean = filled_cache(4, 1)
    spoilt = torch.full_like(clean, float("nan"))
    spoilt[0] = 0
    for row, base in enumerate((6, 1)):
        slot_N = slots(page_RP, torch.full((base,), row), torch.arange(base), 4)
        spoilt[slot_N] = clean[slot_N]
    want, got = attend(layout, seen, clean, 4, qkv), attend(layout, seen, spoilt, 4, qkv)
    assert torch.equal(want, got) and torch.isfinite(got).all()


def test_a_position_beyond_the_table_lands_on_page_0() -> None:
    page_RP = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    row_T, position_T = torch.tensor([0, 0, 0, 1, 1, 0]), torch.tensor([0, 5, 8, 3, 4, 4001])
    assert slots(page_RP, row_T, position_T, 4).tolist() == [28, 13, 0, 23, 0, 1]
    assert slots(page_RP, row_T, position_T, 4).dtype == torch.int64


def test_slots_do_not_overflow_32_bits() -> None:
    page_RP = torch.tensor([[2**30]], dtype=torch.int32)
    assert slots(page_RP, torch.tensor([0]), torch.tensor([15]), 16).tolist() == [2**34 + 15]


def test_move_reads_all_before_it_writes_any() -> None:
    cache = torch.arange(2 * 6).view(2, 6, 1, 1, 1).expand(2, 6, 2, 1, 1).float().clone()
    move(cache, torch.tensor([3, 1, 5]), torch.tensor([1, 2, 3]))
    assert cache[0, :, 0, 0, 0].tolist() == [0, 3, 1, 5, 4, 5]
    assert cache[1, :, 1, 0, 0].tolist() == [6, 9, 7, 11, 10, 11]


def test_additive_folds_the_heads_that_share_a_key() -> None:
    mask = torch.tensor([[[True, False], [True, True]]])
    bias = additive(mask, 3, torch.bfloat16)
    assert bias.shape == (1, 1, 6, 2) and bias.dtype == torch.bfloat16
    inf = float("inf")
    assert bias[0, 0].tolist() == [[0, -inf], [0, 0]] * 3


def test_neighbour_pages_are_read_and_written_in_place() -> None:
    page_size, base, width = 4, 6, 3
    context = base + width
    pages, base_R = torch.tensor([[3, 4, 5]]), torch.tensor([base])
    seen_RNC = torch.arange(context) <= (base_R[:, None] + torch.arange(width)).unsqueeze(2)
    bias = additive(seen_RNC, HEADS // KV_HEADS, torch.float32)
    outs, caches = [], []
    for first_slot in (None, 3 * page_size):
        cache = filled_cache(page_size, seed=7).repeat(2, 1, 1, 1, 1)
        layout = block_layout(base_R, pages, page_size, width, exact=True, first_slot=first_slot)
        attend_paged = PagedAttend(cache, layout, [bias, bias], page_size)
        attend_paged.begin(UNTURNED, torch.zeros(width), torch.float32)
        qkv = torch.cat([part.flatten(1) for part in random_qkv(width, seed=8)], dim=1)
        outs.append(attend_paged(1, qkv, Heads(HEADS, KV_HEADS, HEAD_DIM)))
        caches.append(cache)
    assert torch.equal(caches[0], caches[1])
    torch.testing.assert_close(outs[0], outs[1])
    untouched = filled_cache(page_size, seed=7)
    assert torch.equal(caches[1][0], untouched)
    assert not torch.equal(caches[1][1], untouched)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "q and k norm"])
def test_one_place_of_a_lone_row_attends_as_any_place_does(normed: bool) -> None:
    page_size, base = 4, 6
    context = base + 1
    norm = None
    if normed:
        norm = RMSNorm(HEAD_DIM, 1e-5)
        norm.weight.data = torch.linspace(0.5, 1.5, HEAD_DIM)
    heads = Heads(HEADS, KV_HEADS, HEAD_DIM, norm, norm)
    bias = torch.zeros(1, 1, HEADS // KV_HEADS, context)
    layout = block_layout(torch.tensor([base]), torch.tensor([[3, 4]]), page_size, 1, exact=True)
    outs, caches = [], []
    for lone in (False, True):
        cache = filled_cache(page_size, seed=7).repeat(2, 1, 1, 1, 1)
        attend_one = LoneAttend(cache, 12, context) if lone else PagedAttend(cache, layout, [bias, bias], page_size)
        attend_one.begin(UNTURNED, torch.tensor([base]), torch.float32)
        qkv = torch.cat([part.flatten(1) for part in random_qkv(1, seed=8)], dim=1)
        outs.append(attend_one(1, qkv, heads))
        caches.append(cache)
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(caches[0], caches[1])
    assert not torch.equal(caches[1][1], filled_cache(page_size, seed=7)), "the place's own key and value are stored"
