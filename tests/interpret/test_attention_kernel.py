# Owns: the tests of the paged attention kernel and its merge, interpreted on a CPU.
# Promises: every pass is held against the torch reference over scattered pages, with NaN wherever no row may look.
# Never: needs a GPU.
"""Paged attention kernel. R: rows, T: places, N: places of a row, C: context slots, S: slots or seats, P: pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.models.dflash import visible
from ratoon.ops.attention import (
    NUM_COUNTERS,
    Layout,
    Span,
    additive,
    block_layout,
    packed_layout,
    paged_attention,
    tree_mask,
)
from ratoon.ops.kernels import attention
from ratoon.ops.kernels.attention import Tiling, attend, attend_tiled, choose_tiling, num_tiles
from ratoon.ops.tree import Places, TreeBatch, pack

PAGE = 4
TILING = Tiling(queries=16, keys=16, splits=1, shortest=16, num_warps=4, num_stages=1)
SPLIT = dataclasses.replace(TILING, splits=5)
Heads = tuple[int, int, int]
HEADS: Heads = (6, 2, 16)


def random_trees(sizes: Sequence[int], seed: int) -> TreeBatch:
    """Trees whose parents are any earlier node of the last five."""
    rng = np.random.default_rng(seed)
    parent, depth = (np.zeros((len(sizes), max(*sizes, 1)), dtype=np.int64) for _ in range(2))
    for row, size in enumerate(sizes):
        for node in range(1, size + 1):
            parent[row, node - 1] = above = int(rng.integers(max(0, node - 5), node))
            depth[row, node - 1] = 1 + (depth[row, above - 1] if above else 0)
    parent_RM, depth_RM = torch.from_numpy(parent), torch.from_numpy(depth)
    score = torch.zeros(parent_RM.shape)
    return TreeBatch(parent_RM, parent_RM, depth_RM, parent_RM, score, torch.tensor(sizes), int(depth.max()))


@dataclass(frozen=True)
class Case:
    """A pass over rows in seats of their own; `cache` holds NaN in every slot that no row owns."""

    span: Span
    base_R: Tensor
    page_RP: Tensor
    cache: Tensor
    q_TND: Tensor
    count_R: Tensor


def make_case(
    bases: Sequence[int], counts: Sequence[int], places: int, heads: Heads, seed: int, **parts: Tensor
) -> Case:
    """Rows with `counts` own places in scattered pages; row r lives in seat 2 r + 1, other seats hold nonsense."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, (num_q, num_kv, head_dim) = len(bases), heads
    num_pages = max(-(-(base + count) // PAGE) for base, count in zip(bases, counts, strict=True))
    order = torch.randperm(num_rows * num_pages, generator=generator).to(torch.int32) + 1
    page_RP = order.view(num_rows, num_pages)
    seat_R = 2 * torch.arange(num_rows) + 1
    table_SP = torch.full((2 * num_rows + 2, num_pages), 2**30, dtype=torch.int32)
    table_SP[seat_R] = page_RP
    base_S = torch.full((2 * num_rows + 2,), 2**40)
    base_R = torch.tensor(bases)
    base_S[seat_R] = base_R
    cache = torch.full(((num_rows * num_pages + 1) * PAGE, 2, num_kv, head_dim), float("nan"))
    cache[:PAGE] = 0
    for row, (base, count) in enumerate(zip(bases, counts, strict=True)):
        position = torch.arange(base + count)
        slot = page_RP[row, position // PAGE].long() * PAGE + position % PAGE
        cache[slot] = torch.randn(len(slot), 2, num_kv, head_dim, generator=generator)
    q_TND = torch.randn(places, num_q, head_dim, generator=generator)
    span = Span(seat_R, base_S, None, table_SP, PAGE, num_pages * PAGE, max(counts), **parts)
    return Case(span, base_R, page_RP, cache, q_TND, torch.tensor(counts))


def reference(case: Case, layout: Layout, seen_RNC: Tensor) -> Tensor:
    """[T, N * D]; a surplus place, whose output nobody reads, is 0."""
    group = case.q_TND.shape[1] // case.cache.shape[2]
    v_TKD = torch.zeros(len(case.q_TND), *case.cache.shape[2:])
    bias = additive(seen_RNC, group, torch.float32)
    return paged_attention(case.q_TND, case.cache, v_TKD, layout, bias, PAGE).flatten(1)


def tree_case(
    sizes: Sequence[int], bases: Sequence[int], surplus: int = 0, heads: Heads = HEADS, seed: int = 0
) -> tuple[Case, Places, Layout]:
    trees = random_trees(sizes, seed)
    counts = [size + 1 for size in sizes]
    places = sum(counts) + surplus
    packed = pack(trees, trees.num_nodes, torch.zeros(len(sizes), dtype=torch.int64), places)
    # As build hands them over: a view of a buffer for larger trees, with other bits beside.
    words = packed.bits.shape[1]
    bits_TW = torch.cat((packed.bits, torch.full_like(packed.bits, -1)), dim=1)[:, :words]
    parts = dict(row_start=packed.row_start, depth_T=packed.depth, bits_TW=bits_TW)
    case = make_case(bases, counts, places, heads, seed, **parts)
    span = case.span
    layout = packed_layout(packed.row_start, packed.row_of, packed.local, case.base_R, case.page_RP, PAGE, span.width)
    return case, packed, layout


def tree_seen(case: Case, packed: Places, layout: Layout, window: int | None) -> Tensor:
    seen_RNC = tree_mask(layout, packed.bits, case.base_R, case.span.context)
    if window is None:
        return seen_RNC
    num_rows, width, context = seen_RNC.shape
    position_RC = torch.arange(context).repeat(num_rows, 1)
    position_RN = torch.zeros(num_rows, width, dtype=torch.int64)
    for place, (row, local) in enumerate(zip(packed.row_of.tolist(), packed.local.tolist(), strict=True)):
        if row < num_rows:
            position = int(case.base_R[row] + packed.depth[place])
            position_RN[row, local] = position_RC[row, int(case.base_R[row]) + local] = position
    return seen_RNC & (position_RN[:, :, None] - position_RC[:, None] < window)


def block_case(width: int, bases: Sequence[int], heads: Heads = HEADS, seed: int = 0) -> tuple[Case, Layout]:
    case = make_case(bases, [width] * len(bases), width * len(bases), heads, seed)
    return case, block_layout(case.base_R, case.page_RP, PAGE, width)


def block_seen(case: Case, causal: bool, window: int | None) -> Tensor:
    position_RN = case.base_R[:, None] + torch.arange(case.span.width)
    key_C = torch.arange(case.span.context)
    inside_R1C = (key_C < (case.base_R + case.span.width)[:, None]).unsqueeze(1)
    return visible(position_RN.unsqueeze(2), key_C, window, causal) & inside_R1C


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, as a graph's pool may."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


def run(case: Case, causal: bool, window: int | None, tiling: Tiling, counted: bool = True) -> Tensor:
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32) if counted else None
    out = attend_tiled(case.q_TND, case.cache, case.span, causal, window, tiling, counters)
    assert counters is None or not counters.any(), "counters must be zero again"
    return out


def check(case: Case, causal: bool, window: int | None, tiling: Tiling, want: Tensor) -> None:
    """Both ways to merge, where there is something to merge."""
    close(run(case, causal, window, tiling), want)
    if tiling.splits > 1:
        close(run(case, causal, window, tiling, counted=False), want)


def close(got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(want).all()
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


# ---- trees ----


@pytest.mark.parametrize("tiling", [TILING, SPLIT])
@pytest.mark.parametrize(
    ("sizes", "bases", "surplus"),
    [
        ((5,), (6,), 0),
        ((12,), (70,), 9),
        ((3, 9, 0), (0, 37, 3), 4),
        ((0, 0, 1), (50, 16, 15), 0),
        ((1, 21, 0, 6), (33, 0, 80, 17), 40),
    ],
)
def test_trees(sizes: tuple[int, ...], bases: tuple[int, ...], surplus: int, tiling: Tiling) -> None:
    case, packed, layout = tree_case(sizes, bases, surplus)
    want = reference(case, layout, tree_seen(case, packed, layout, None))
    check(case, True, None, tiling, want)


@pytest.mark.parametrize(
    ("num_nodes", "base"),  # with the root: one word, exactly one, and beyond; blocks begin anywhere in a word
    [(62, 0), (63, 5), (64, 61), (64, 0), (127, 64), (130, 67), (130, 5)],
)
def test_trees_across_words_of_bits(num_nodes: int, base: int) -> None:
    case, packed, layout = tree_case((num_nodes, num_nodes // 2), (base, 3), heads=(2, 2, 16), seed=num_nodes)
    want = reference(case, layout, tree_seen(case, packed, layout, None))
    close(run(case, True, None, dataclasses.replace(TILING, queries=64, keys=64, shortest=64)), want)


@pytest.mark.parametrize("window", [1, 3, 19])
@pytest.mark.parametrize("tiling", [TILING, SPLIT])
def test_a_tree_s_window_counts_positions_not_slots(window: int, tiling: Tiling) -> None:
    case, packed, layout = tree_case((14, 3, 20), (40, 0, 9), 5, seed=window)
    want = reference(case, layout, tree_seen(case, packed, layout, window))
    check(case, True, window, tiling, want)


def test_rows_of_one_place_each_need_no_search() -> None:
    case, packed, layout = tree_case((0, 0, 0, 0), (0, 31, 32, 90))
    want = reference(case, layout, tree_seen(case, packed, layout, None))
    for causal in (True, False):
        close(run(case, causal, None, SPLIT), want)
    close(run(case, True, 20, SPLIT), reference(case, layout, tree_seen(case, packed, layout, 20)))


def test_many_rows_find_their_tiles() -> None:
    rng = np.random.default_rng(3)
    sizes, bases = rng.integers(0, 9, 37).tolist(), rng.integers(0, 40, 37).tolist()
    case, packed, layout = tree_case(sizes, bases, 21, heads=(3, 1, 16))
    close(run(case, True, None, TILING), reference(case, layout, tree_seen(case, packed, layout, None)))


# ---- blocks and chunks ----


@pytest.mark.parametrize("tiling", [TILING, SPLIT])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 30])
def test_blocks(window: int | None, causal: bool, tiling: Tiling) -> None:
    case, layout = block_case(9, (70, 0, 5, 23))
    want = reference(case, layout, block_seen(case, causal, window))
    check(case, causal, window, tiling, want)


@pytest.mark.parametrize(("width", "bases"), [(50, (0,)), (33, (41, 7))])
def test_a_chunk_takes_its_base_by_row(width: int, bases: tuple[int, ...]) -> None:
    case, layout = block_case(width, bases)
    # Seat-indexed starts are another round's: they must not be read.
    span = dataclasses.replace(case.span, base_S=torch.full_like(case.span.base_S, 2**40), base_R=case.base_R)
    case = dataclasses.replace(case, span=span)
    want = reference(case, layout, block_seen(case, True, None))
    close(run(case, True, None, TILING), want)
    close(run(case, True, None, dataclasses.replace(SPLIT, queries=32)), want)


def test_a_tile_of_a_chunk_reads_no_key_beyond_its_last_query() -> None:
    case, _ = block_case(24, (10,), heads=(2, 2, 16))
    want = run(case, True, None, TILING)
    cache = case.cache.clone()
    position = torch.arange(10 + 16, 34)  # own places of the second tile
    cache[case.page_RP[0, position // PAGE].long() * PAGE + position % PAGE] = float("nan")
    got = run(dataclasses.replace(case, cache=cache), True, None, TILING)
    assert torch.equal(got[:16], want[:16]) and got[16:].isnan().any()


def test_window_skips_blocks_that_no_query_of_the_tile_sees() -> None:
    case, _ = block_case(4, (90,), heads=(2, 2, 16))
    want = run(case, True, 20, TILING)
    cache = case.cache.clone()
    position = torch.arange(64)  # the first visible slot is 71, in the block from 64 on
    cache[case.page_RP[0, position // PAGE].long() * PAGE + position % PAGE] = float("nan")
    assert torch.equal(run(dataclasses.replace(case, cache=cache), True, 20, TILING), want)


# ---- shapes ----


@pytest.mark.parametrize("heads", [(2, 2, 64), (14, 2, 64), (9, 3, 96), (16, 1, 128), (2, 1, 256), (8, 1, 24)])
@pytest.mark.parametrize("tiling", [TILING, SPLIT])
def test_head_shapes(heads: Heads, tiling: Tiling) -> None:
    case, packed, layout = tree_case((4, 7), (33, 11), 3, heads)
    want = reference(case, layout, tree_seen(case, packed, layout, None))
    check(case, True, None, tiling, want)


def test_padding_rows_share_the_dummy_seat() -> None:
    """Seat 0 is at position 0 on page 0; any number of rows name it."""
    case, packed, layout = tree_case((3, 0, 0), (7, 0, 0), 2)
    seat_R, table_SP, base_S = case.span.seat_R.clone(), case.span.page_table_SP.clone(), case.span.base_S.clone()
    seat_R[1:], table_SP[0], base_S[0] = 0, 0, 0
    span = dataclasses.replace(case.span, seat_R=seat_R, page_table_SP=table_SP, base_S=base_S)
    case.page_RP[1:] = 0
    layout = packed_layout(
        packed.row_start, packed.row_of, packed.local, case.base_R, case.page_RP, PAGE, case.span.width
    )
    case = dataclasses.replace(case, span=span)
    close(run(case, True, None, TILING), reference(case, layout, tree_seen(case, packed, layout, None)))


def test_positions_beyond_the_table_are_page_0() -> None:
    """A padded row of a chunk may run past its table: its places there are nobody's, but finite."""
    case, _ = block_case(12, (8,))
    span = dataclasses.replace(case.span, page_table_SP=case.span.page_table_SP[:, :4].contiguous())
    got = run(dataclasses.replace(case, span=span), True, None, TILING)
    want = run(case, True, None, TILING)
    assert torch.isfinite(got).all() and torch.equal(got[:8], want[:8])


def test_splits_agree_and_repeat_their_bits() -> None:
    case = tree_case((4, 11), (70, 25), 2)[0]
    alone, *outs = [run(case, True, None, dataclasses.replace(TILING, splits=n)) for n in (1, 2, 7)]
    for out in outs:
        close(out, alone)
    assert torch.equal(outs[1], run(case, True, None, dataclasses.replace(TILING, splits=7)))


def test_attend_chooses_sizes_by_shapes() -> None:
    case, packed, layout = tree_case((20, 2), (150, 9), 3)
    want = reference(case, layout, tree_seen(case, packed, layout, None))
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    close(attend(case.q_TND, case.cache, case.span, True, None), want)
    close(attend(case.q_TND, case.cache, case.span, True, None, counters), want)
    assert not counters.any()


# ---- choices on the host ----


def test_tilings_stay_within_their_limits() -> None:
    for rows in (1, 2, 7, 32, 128, 256):
        for width in (1, 2, 16, 64, 129, 2048):
            for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128), (14, 2, 64), (64, 8, 128), (16, 1, 256)):
                for packed in (False, True):
                    for itemsize in (2, 4):
                        group, places = heads // kv_heads, rows * width
                        tiling = choose_tiling(
                            rows, places, group, kv_heads, head_dim, 4096, packed=packed, itemsize=itemsize
                        )
                        programs = num_tiles(rows, places, group, tiling.queries, packed) * kv_heads
                        assert tiling.splits == 1 or programs <= NUM_COUNTERS
                        assert tiling.shortest % tiling.keys == 0 and tiling.splits <= attention.MAX_SPLITS
                        assert not packed or tiling.keys <= 64


def test_num_tiles_covers_every_packing() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        group, queries = int(rng.integers(1, 17)), int(rng.choice([16, 32, 64]))
        counts = rng.integers(1, 40, int(rng.integers(1, 20)))
        places = int(counts.sum() + rng.integers(0, 50))
        begin = np.append(np.append(0, counts.cumsum()), places)
        first_tile = begin[:-1] * group // queries + np.arange(len(begin) - 1)
        need = -(-np.diff(begin) * group // queries)
        assert (first_tile[:-1] + need[:-1] <= first_tile[1:]).all()
        assert first_tile[-1] + need[-1] <= num_tiles(len(counts), places, group, queries, True)
