# Owns: Triton twins of ops/tree.py: build, forecast, share, pack, history.
# Promises: the references' trees, ties included; a row is built by one warp that no other row waits for.
# Never: allocates anything but results, or reads a value on the host.
"""Tree kernels. R: rows, M: most nodes per row, L: depths, K: candidates per depth, T: places, W: words of ancestor
bits, Q: forecast sizes. Each of them waits for memory and for itself, so what counts is the length of its longest
chain of dependent steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.launch import launch
from ratoon.ops.tree import Places, TreeBatch, no_trees

MOST_NODES = 1023
"""The order of equal scores packs depth, rank and parent into one int32."""

_MOST_AHEAD = 2048
"""Candidates read ahead: 64 registers of each thread."""

_NOTHING = tl.constexpr(-(2**31))
"""Below the key of every float32."""
_ZERO_MASS = tl.constexpr(-2139095041)
"""Key of -inf."""
_LAST = tl.constexpr(2**31 - 1)


def pow2(number: int, least: int = 1) -> int:
    """The next power of two, or `least` where that is more."""
    return max(1 << max(number - 1, 0).bit_length(), least)


# ---- build ------------------------------------------------------------------------------------------------


@triton.jit
def _ordered(bits):
    """int32 that orders as the float32 of these bits does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(score, step):
    """Key of a node below one of this score. A step that is no log-probability (a NaN) has no mass."""
    total = score + tl.where(step <= 0, step, float("-inf"))
    return _ordered(total.to(tl.int32, bitcast=True))


@triton.jit
def _build(
    logprob, token, budget, cap, out_token, out_parent, out_depth, out_rank, out_score, out_num,
    DEPTHS: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr, BITS: tl.constexpr,
    SLOTS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    table = logprob + row * (DEPTHS * RANKS)
    # The table at once: a pick's two loads then find it in L1.
    entry = tl.arange(0, TABLE)
    entries = tl.load(table + entry, mask=entry < DEPTHS * RANKS, other=1.0)
    has_mass = tl.max((entries <= 0).to(tl.int32))
    wanted = tl.minimum(tl.load(budget + row), NODES).to(tl.int32) * has_mass
    ranks = tl.load(cap + row)
    ranks = tl.where((ranks <= 0) | (ranks > RANKS), RANKS, ranks).to(tl.int32)
    field: tl.constexpr = (1 << BITS) - 1

    # Slot i is node i (0: the root) and its one candidate, its next child. word: depth, rank, parent of the candidate.
    node = tl.arange(0, SLOTS)
    score = tl.zeros([SLOTS], tl.float32)
    word = tl.full([SLOTS], 1 << (2 * BITS), tl.int32)
    made = tl.zeros([SLOTS], tl.int32)
    key = tl.where(node == 0, _key(score, tl.load(table)), _NOTHING)
    count = tl.zeros([], tl.int32)
    best = tl.max(key)
    while (count < wanted) & (best > _ZERO_MASS):
        count += 1
        chosen = tl.min(tl.where(key == best, word, _LAST))
        depth, rank, parent = chosen >> (2 * BITS), (chosen >> BITS) & field, chosen & field
        sibling = tl.load(table + (depth - 1) * RANKS + rank + 1, mask=rank + 1 < ranks, other=float("-inf"))
        child = tl.load(table + depth * RANKS, mask=depth < DEPTHS, other=float("-inf"))
        is_new, is_parent = node == count, node == parent
        made = tl.where(is_new, chosen, made)
        score = tl.where(is_new, _ordered(best).to(tl.float32, bitcast=True), score)
        key = tl.where(is_new | is_parent, _key(score, tl.where(is_new, child, sibling)), key)
        word = tl.where(is_parent, word + (1 << BITS), word)
        word = tl.where(is_new, ((depth + 1) << (2 * BITS)) | count, word)
        best = tl.max(key)

    is_made = (node >= 1) & (node <= count)
    depth = tl.where(is_made, made >> (2 * BITS), 1)
    rank = tl.where(is_made, (made >> BITS) & field, 0)
    column = row * NODES + node - 1
    stored = (node >= 1) & (node <= NODES)
    tokens = tl.load(token + row * (DEPTHS * RANKS) + (depth - 1) * RANKS + rank, mask=stored, other=0)
    tl.store(out_token + column, tokens, mask=stored)
    tl.store(out_parent + column, tl.where(is_made, made & field, 0).to(tl.int64), mask=stored)
    tl.store(out_depth + column, depth.to(tl.int64), mask=stored)
    tl.store(out_rank + column, rank.to(tl.int64), mask=stored)
    tl.store(out_score + column, tl.where(is_made, score, float("-inf")), mask=stored)
    tl.store(out_num + row, count.to(tl.int64))


def build_trees(logprob_RLK: Tensor, token_RLK: Tensor, budget_R: Tensor, cap_R: Tensor, max_nodes: int) -> TreeBatch:
    """Twin of ops/tree.py `build_trees`: n picks of the best candidate, one per made node and the root."""
    num_rows, depths, ranks = logprob_RLK.shape
    if min(max_nodes, depths, ranks) == 0:
        return no_trees(num_rows, max_nodes, logprob_RLK.device)
    assert max_nodes <= MOST_NODES, f"{max_nodes} nodes: the order of equal scores holds {MOST_NODES}"
    token, parent, depth, rank = budget_R.new_empty((4, num_rows, max_nodes)).unbind(0)
    score_RM = logprob_RLK.new_empty((num_rows, max_nodes))
    num_nodes_R = torch.empty_like(budget_R)
    launch(
        _build,
        (num_rows,),
        *(logprob_RLK.contiguous(), token_RLK.contiguous(), budget_R.contiguous(), cap_R.contiguous()),
        *(token, parent, depth, rank, score_RM, num_nodes_R),
        DEPTHS=depths,
        RANKS=ranks,
        NODES=max_nodes,
        BITS=max_nodes.bit_length(),
        # A whole warp of slots, so that its reductions are one instruction each.
        SLOTS=pow2(max_nodes + 1, 32),
        TABLE=min(pow2(depths * ranks, 32), _MOST_AHEAD),
        num_warps=1,
    )
    return TreeBatch(token, parent, depth, rank, score_RM, num_nodes_R, depths)


# ---- forecast ---------------------------------------------------------------------------------------------


@triton.jit
def _forecast(
    score, depth, out, NODES: tl.constexpr, SIZES: tl.constexpr, NUM_SIZES: tl.constexpr, SLOTS: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block, nodes = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for size in tl.static_range(NUM_SIZES):
        block = tl.where(column == size, SIZES[2 * size], block)
        nodes = tl.where(column == size, SIZES[2 * size + 1], nodes)
    node = tl.arange(0, SLOTS)
    inside = node < NODES
    reached = inside & (tl.load(depth + row * NODES + node, mask=inside, other=0) < block)
    mass = tl.exp(tl.load(score + row * NODES + node, mask=inside, other=float("-inf")))
    first = reached & (tl.cumsum(reached.to(tl.int32), 0) <= nodes)
    tl.store(out + row * NUM_SIZES + column, tl.sum(tl.where(first, mass, 0.0)))


def forecast_mass(trees: TreeBatch, sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """Twin of ops/tree.py `forecast_mass`: one program per row and size."""
    num_rows, max_nodes = trees.score.shape
    mass_RQ = trees.score.new_empty((num_rows, len(sizes)))
    launch(
        _forecast,
        (num_rows, len(sizes)),
        *(trees.score.contiguous(), trees.depth.contiguous(), mass_RQ),
        NODES=max_nodes,
        SIZES=tuple(number for size in sizes for number in size),
        NUM_SIZES=len(sizes),
        SLOTS=pow2(max_nodes, 32),
        num_warps=1,
    )
    return mass_RQ


# ---- share ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows", "room"])
def _share(score, depth, num_nodes, out, num_rows, room, NODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """How many nodes of this row have fewer than `room` nodes of any row before them.

    Both searches are binary: a row's nodes are in order, so the number of nodes before one grows with it.
    """
    row = tl.program_id(0).to(tl.int64)
    other = tl.arange(0, ROWS).to(tl.int64)
    inside = (other < num_rows) & (other != row)
    lengths = tl.load(num_nodes + other, mask=inside, other=0)
    low, high = tl.zeros([], tl.int64), tl.load(num_nodes + row)
    for _ in range(STEPS):
        own = (low + high) // 2
        searching = low < high
        own_score = tl.load(score + row * NODES + own, mask=searching, other=float("-inf"))
        own_depth = tl.load(depth + row * NODES + own, mask=searching, other=0)
        first, last = tl.zeros([ROWS], tl.int64), lengths
        for _ in range(STEPS):
            at = (first + last) // 2
            open_ = first < last
            its_score = tl.load(score + other * NODES + at, mask=open_, other=float("-inf"))
            its_depth = tl.load(depth + other * NODES + at, mask=open_, other=0)
            is_level = (its_depth < own_depth) | ((its_depth == own_depth) & (other < row))
            is_before = (its_score > own_score) | ((its_score == own_score) & is_level)
            first, last = tl.where(open_ & is_before, at + 1, first), tl.where(open_ & ~is_before, at, last)
        fits = own + tl.sum(first) < room
        low, high = tl.where(searching & fits, own + 1, low), tl.where(searching & ~fits, own, high)
    tl.store(out + row, low)


def share_places(score_RM: Tensor, depth_RM: Tensor, num_nodes_R: Tensor, places: int) -> Tensor:
    """Twin of ops/tree.py `share_places`, where the places are fewer than all nodes and more than the roots."""
    num_rows, max_nodes = score_RM.shape
    count_R = torch.empty_like(num_nodes_R)
    launch(
        _share,
        (num_rows,),
        *(score_RM.contiguous(), depth_RM.contiguous(), num_nodes_R.contiguous(), count_R),
        *(num_rows, places - num_rows),
        NODES=max_nodes,
        STEPS=max_nodes.bit_length(),
        ROWS=pow2(num_rows, 32),
        num_warps=1 if num_rows <= 64 else 4,
    )
    return count_R


# ---- pack -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows", "places", "bits_stride"])
def _pack(
    token, parent, depth, count, anchor, out_token, out_row_of, out_parent, out_depth, out_local, out_start, out_bits,
    num_rows, places, bits_stride,
    NODES: tl.constexpr, DEPTHS: tl.constexpr, WORDS: tl.constexpr, WORD_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program r packs row r; those from R on pack SLOTS surplus places each."""
    program = tl.program_id(0)
    is_dummy = program >= num_rows
    row = tl.minimum(program, num_rows).to(tl.int64)
    other = tl.arange(0, ROWS)
    lengths = tl.load(count + other, mask=other < num_rows, other=-1) + 1
    start, total = tl.sum(tl.where(other < row, lengths, 0)), tl.sum(lengths)
    length = tl.where(is_dummy, places - start, tl.sum(tl.where(other == row, lengths, 0)))
    local = tl.arange(0, SLOTS) + tl.where(is_dummy, program - num_rows, 0).to(tl.int64) * SLOTS
    place = start + local
    inside = (local < length) & (place < places)
    is_node = inside & (local > 0) & (program < num_rows)

    column = row * NODES + local - 1
    tokens = tl.load(token + column, mask=is_node, other=0)
    above = tl.load(parent + column, mask=is_node, other=0)
    depths = tl.load(depth + column, mask=is_node, other=0)
    root = tl.load(anchor + row, mask=program < num_rows, other=0)
    wrapped = local % (WORDS * 64)
    tl.store(out_token + place, tl.where(is_node, tokens, tl.where(local == 0, root, 0)), mask=inside)
    tl.store(out_row_of + place, tl.zeros([SLOTS], tl.int64) + row, mask=inside)
    tl.store(out_parent + place, tl.where(is_dummy, place, start + above), mask=inside)
    tl.store(out_depth + place, depths, mask=inside)
    tl.store(out_local + place, wrapped, mask=inside)
    tl.store(out_start + row, start, mask=program < num_rows)
    tl.store(out_start + num_rows, total, mask=program == 0)
    tl.store(out_start + num_rows + 1, places, mask=program == 0)

    word = tl.arange(0, WORD_SLOTS).to(tl.int64)[None, :]
    one = tl.full([SLOTS, 1], 1, tl.int64)
    bits = tl.where((wrapped >> 6)[:, None] == word, one << (wrapped & 63)[:, None], 0)
    for _ in range(DEPTHS):
        bits |= tl.where(is_node[:, None] & ((above >> 6)[:, None] == word), one << (above & 63)[:, None], 0)
        above = tl.load(parent + row * NODES + above - 1, mask=is_node & (above > 0), other=0)
    tl.store(out_bits + place[:, None] * bits_stride + word, bits, mask=inside[:, None] & (word < WORDS))


def pack(trees: TreeBatch, count_R: Tensor, anchor_R: Tensor, places: int, out: Places | None = None) -> Places:
    """Twin of ops/tree.py `pack`, straight into `out`."""
    num_rows, max_nodes = trees.token.shape
    words = max_nodes // 64 + 1
    if out is None:
        token, row_of, parent, depth, local = anchor_R.new_empty((5, places)).unbind(0)
        row_start, bits = anchor_R.new_empty(num_rows + 2), anchor_R.new_empty((places, words))
        out = Places(token, row_of, parent, depth, local, row_start, bits)
    # Places that share one row's tile: its root and nodes, and no fewer than a warp.
    slots = pow2(max_nodes + 1, 32)
    launch(
        _pack,
        (num_rows + -(-(places - num_rows) // slots),),
        *(trees.token.contiguous(), trees.parent.contiguous(), trees.depth.contiguous()),
        *(count_R.contiguous(), anchor_R.contiguous()),
        *(out.token, out.row_of, out.parent, out.depth, out.local, out.row_start, out.bits),
        *(num_rows, places, out.bits.stride(0)),
        NODES=max_nodes,
        DEPTHS=min(trees.depth_limit, max_nodes),
        WORDS=words,
        WORD_SLOTS=pow2(words),
        SLOTS=slots,
        ROWS=pow2(num_rows, 32),
        num_warps=max(1, min(4, slots // 64)),
    )
    return out


# ---- history ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["places"])
def _history(token, parent, depth, out, places, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    at = place
    for step in range(STEPS):
        is_node = inside & (tl.load(depth + at, mask=inside, other=0) > 0)
        tl.store(out + place * STEPS + step, tl.load(token + at, mask=is_node, other=-1), mask=inside)
        at = tl.load(parent + at, mask=inside, other=0)


def history(places: Places, depth_limit: int) -> Tensor:
    """Twin of ops/tree.py `history`."""
    num_places, steps = places.token.shape[0], max(depth_limit, 1)
    history_TD = places.token.new_empty((num_places, steps))
    launch(
        _history,
        (-(-num_places // 32),),
        *(places.token, places.parent, places.depth, history_TD, num_places),
        STEPS=steps,
        BLOCK=32,
        num_warps=1,
    )
    return history_TD
