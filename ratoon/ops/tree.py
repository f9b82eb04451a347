# Owns: the draft tree on the device: rank, build, share, pack, walk, for any number of rows at once.
# Promises: equal to spec/ddtree.py node for node, ties included; shapes depend on arguments' shapes and ints alone.
# Never: reads a value on the host, selects by a boolean mask.
"""Tree operations. R: rows, M: most nodes per row, L: depths, K: candidates per depth, N = R * L, V: vocabulary,
T: verify places, W: int64 words of ancestor bits, C: children considered per depth, F: parents among them,
P: nodes considered in all depths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.launch import wants_kernel

_CHUNK = 64
_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class TreeBatch:
    """Drafted nodes of R rows in pop order; column j is node j + 1, node 0 is the row's root and is not stored.

    token, parent, depth, rank: int64 [R, M]; score float32 [R, M]; num_nodes int64 [R]. Columns from
    num_nodes on hold no node: their score is -inf, the rest is any value in range.
    `depth_limit` bounds `depth` and is a host number.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    rank: Tensor
    score: Tensor
    num_nodes: Tensor
    depth_limit: int


@dataclass(frozen=True)
class Places:
    """T verify places: row 0's root and nodes, row 1's, ..., then the dummy row R, which owns all surplus places.

    token, row_of, parent, depth, local: int64 [T]; `parent` is a place (a root's is itself), `local` the node
    number in its row. row_start int64 [R + 2], row_start[R] = first surplus place, row_start[R + 1] = T.
    bits int64 [T, W]: bit j % 64 of word j // 64 says that local node j of the same row is this node or an
    ancestor. A surplus place is its own parent at depth 0 with token 0 and only its own bit. `local` wraps at
    64 * W among surplus places, so with more of them than that one sees its aliases too.
    """

    token: Tensor
    row_of: Tensor
    parent: Tensor
    depth: Tensor
    local: Tensor
    row_start: Tensor
    bits: Tensor


def rank_candidates(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(token int64, logprob float32), both [N, min(k, V)], by logit, equal logits by lower token id.

    Log-probabilities come from a float32 log-softmax over the whole vocabulary; a row with a NaN gives NaN.
    """
    if wants_kernel(logits_NV):
        from ratoon.ops.kernels import rank

        return rank.rank_candidates(logits_NV, k)
    logits_NV = logits_NV.float()
    token_NK = _top_ids(logits_NV, min(k, logits_NV.shape[1]))
    # On a CPU the temporaries of four rows stay in cache: 10 ms instead of 28 on 120 x 49152 (2026-11-30).
    groups = logits_NV.split(4) if logits_NV.device.type == "cpu" else (logits_NV,)
    normaliser_N1 = torch.cat([torch.logsumexp(rows, dim=1, keepdim=True) for rows in groups])
    return token_NK, logits_NV.gather(1, token_NK) - normaliser_N1


def _top_ids(value_NV: Tensor, k: int) -> Tensor:
    """Columns of the k best values of each row, equal values by lower column.

    torch.topk promises no order among equals, so it runs on unique keys. The k best lie in the k chunks with
    the best maxima (equal maxima: lower chunk first), so only those are keyed: half the time of topk on
    15 x 49152 values, one CPU thread (2026-11-30).
    """
    width = value_NV.shape[1]
    if k * _CHUNK * 2 > width:
        every_V = torch.arange(width, device=value_NV.device)
        return _order_of_best(value_NV, every_V, k, width)
    whole = width // _CHUNK * _CHUNK
    peak = value_NV[:, :whole].unflatten(1, (-1, _CHUNK)).amax(dim=2)
    if whole < width:
        peak = torch.cat((peak, value_NV[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    chunk_NK = _order_of_best(peak, torch.arange(peak.shape[1], device=peak.device), k, peak.shape[1])
    offset = torch.arange(_CHUNK, device=peak.device)
    column = (chunk_NK.unsqueeze(2) * _CHUNK + offset).flatten(1)
    if whole == width:
        return _order_of_best(value_NV.gather(1, column), column, k, width)
    value = value_NV.gather(1, column.clamp(max=width - 1))
    # Columns past the end get the lowest key: below a real -inf.
    return _order_of_best(value, column, k, width, column < width)


def _order_of_best(value: Tensor, column: Tensor, k: int, width: int, valid: Tensor | None = None) -> Tensor:
    """The k of `column` [..., any] (distinct numbers below `width`) with the best value, best first, ties lower."""
    key = _unique_key(value, width - 1 - column)
    if valid is not None:
        key = key.masked_fill(~valid, _LOWEST)
    best = torch.topk(key, k, dim=-1).values
    return width - 1 - (best & 0xFFFFFFFF)


def _unique_key(value: Tensor, low: Tensor) -> Tensor:
    """int64 that sorts as (value, low): float32 value above 32 bits of a number >= 0. -0.0 counts as 0.0."""
    bits = (value + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(torch.int64) * (1 << 32) + low


@dataclass(frozen=True)
class Frontier:
    """Constant index tables of `build_trees`; they depend on M, L and K alone. All tensors int64.

    Within a depth, the child of rank r of the parent in place i (both from 0) comes after its like with
    i' <= i and r' <= r, and after i + 1 parents, so it can be a node only if (i + 1) * (r + 2) <= M.
    child_parent, child_rank: i and r of those `num_children` = C, ordered by (r, i), so that a stable sort by
    score leaves equal scores in node order; then of the root's children.
    depth, above [P], for the places of all depths in a row: the depth, and where the places of the depth above
    begin (P for the root). widths: places per depth; `num_parents` = F places of a depth may have children.
    """

    child_parent: Tensor
    child_rank: Tensor
    depth: Tensor
    above: Tensor
    widths: tuple[int, ...]
    num_children: int
    num_parents: int


@functools.lru_cache(maxsize=64)
def frontier(max_nodes: int, num_depths: int, num_ranks: int, device: torch.device) -> Frontier:
    """The tables for M nodes, L depths, K ranks. Made once per device: call it before a capture that uses them."""
    children = [
        (rank, parent)
        for rank in range(min(num_ranks, max_nodes - 1))
        for parent in range(min(max_nodes // (rank + 2), num_ranks ** (num_depths - 1)))
    ]
    widths = [min(num_ranks, max_nodes)]
    widths += [min(len(children), max_nodes - depth + 1) for depth in range(2, min(num_depths, max_nodes) + 1)]
    surplus = max(0, max_nodes - sum(widths))
    num_places = sum(widths) + surplus
    above = [num_places, *(sum(widths[:depth]) for depth in range(len(widths)))]

    def table(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Frontier(
        child_parent=table([parent for _, parent in children] + [0] * widths[0]),
        child_rank=table([rank for rank, _ in children] + list(range(widths[0]))),
        depth=table([depth + 1 for depth, width in enumerate(widths) for _ in range(width)] + [1] * surplus),
        above=table([above[depth] for depth, width in enumerate(widths) for _ in range(width)] + [0] * surplus),
        widths=tuple(widths),
        num_children=len(children),
        num_parents=1 + max((parent for _, parent in children), default=0),
    )


def no_trees(num_rows: int, max_nodes: int, device: torch.device) -> TreeBatch:
    """Rows that drafted nothing: with `pack` the one-node trees of autoregressive decoding."""
    number_RM = torch.zeros(num_rows, max_nodes, dtype=torch.int64, device=device)
    score_RM = torch.full((num_rows, max_nodes), -torch.inf, device=device)
    num_nodes_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return TreeBatch(number_RM, number_RM, number_RM, number_RM, score_RM, num_nodes_R, depth_limit=0)


def build_trees(logprob_RLK: Tensor, token_RLK: Tensor, budget_R: Tensor, cap_R: Tensor, max_nodes: int) -> TreeBatch:
    """The most probable prefixes of each row, budget_R of them, at most `max_nodes` = M.

    logprob float32 [R, L, K], at most 0 and not rising with rank (a NaN counts as probability zero); token int64
    [R, L, K]; budget_R, cap_R int64 [R] (cap 0 = all K ranks, 1 = chain). A row has fewer nodes where no more
    have a probability above zero.
    """
    if wants_kernel(logprob_RLK):
        from ratoon.ops.kernels import tree as twin

        return twin.build_trees(logprob_RLK, token_RLK, budget_R, cap_R, max_nodes)
    num_rows, num_depths, num_ranks = logprob_RLK.shape
    if min(max_nodes, num_depths, num_ranks) == 0:
        return no_trees(num_rows, max_nodes, logprob_RLK.device)
    tables = frontier(max_nodes, num_depths, num_ranks, logprob_RLK.device)
    rank_K = torch.arange(num_ranks, device=cap_R.device)
    cap_R11 = cap_R.masked_fill(cap_R <= 0, num_ranks).view(-1, 1, 1)
    allowed_RLK = (rank_K < cap_R11) & (logprob_RLK <= 0)
    score_RP, child_RP = _grow(logprob_RLK.masked_fill(~allowed_RLK, -torch.inf), tables)
    # Depths ascend over the places and each is in node order, so the lower place is the earlier node.
    num_places = len(tables.depth)
    every_P = torch.arange(num_places, device=cap_R.device)
    place_RM = _order_of_best(score_RP, every_P, max_nodes, num_places)
    depth_RM, child_RM = tables.depth[place_RM], child_RP.gather(1, place_RM)
    rank_RM = tables.child_rank[child_RM]
    node_RM = torch.arange(1, max_nodes + 1, device=cap_R.device).expand(num_rows, -1)
    node_of_place = torch.zeros(num_rows, num_places + 1, dtype=torch.int64, device=cap_R.device)
    node_of_place.scatter_(1, place_RM, node_RM)
    score_RM = score_RP.gather(1, place_RM)
    num_nodes_R = torch.minimum((score_RM > -torch.inf).sum(1), budget_R.clamp(min=0))
    return TreeBatch(
        token=token_RLK.flatten(1).gather(1, (depth_RM - 1) * num_ranks + rank_RM),
        parent=node_of_place.gather(1, tables.above[place_RM] + tables.child_parent[child_RM]),
        depth=depth_RM,
        rank=rank_RM,
        score=score_RM.masked_fill(node_RM > num_nodes_R.unsqueeze(1), -torch.inf),
        num_nodes=num_nodes_R,
        depth_limit=num_depths,
    )


def _grow(logprob_RLK: Tensor, tables: Frontier) -> tuple[Tensor, Tensor]:
    """Score and child number of every place [R, P], depth by depth, each in node order."""
    num_rows, first, num_children = logprob_RLK.shape[0], tables.widths[0], tables.num_children
    parent_C = tables.child_parent[:num_children]
    step_LRC = logprob_RLK.index_select(2, tables.child_rank[:num_children]).unbind(1)
    score_RF = logprob_RLK[:, 0, :first]
    child_R1 = torch.arange(num_children, num_children + first, device=parent_C.device)
    scores, children = [score_RF], [child_R1.expand(num_rows, -1)]
    score_RF = F.pad(score_RF, (0, max(0, tables.num_parents - first)), value=-torch.inf)
    for depth, width in enumerate(tables.widths[1:], start=1):
        # A float32 sum, as in the heap: the order of equal scores depends on it.
        score_RC = score_RF.index_select(1, parent_C) + step_LRC[depth]
        score_RF, child_RC = score_RC.sort(dim=1, descending=True, stable=True)
        scores.append(score_RF[:, :width])
        children.append(child_RC[:, :width])
    surplus = len(tables.depth) - sum(tables.widths)
    if surplus:
        scores.append(scores[0].new_full((num_rows, surplus), -torch.inf))
        children.append(children[0].new_zeros((num_rows, surplus)))
    return torch.cat(scores, dim=1), torch.cat(children, dim=1)


def forecast_mass(trees: TreeBatch, sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """Sum of path probabilities of each row's best `nodes` nodes that a block of `block` can reach, float32 [R, Q].

    sizes: Q pairs (block, nodes).
    """
    if wants_kernel(trees.score):
        from ratoon.ops.kernels import tree as twin

        return twin.forecast_mass(trees, sizes)
    probability_RM = trees.score.exp()
    columns: list[Tensor] = []
    for block, nodes in sizes:
        reach_RM = trees.depth < block
        first_RM = reach_RM & (reach_RM.cumsum(1) <= nodes)
        columns.append(torch.where(first_RM, probability_RM, 0).sum(1))
    return torch.stack(columns, dim=1) if columns else probability_RM.new_zeros(len(probability_RM), 0)


def share_places(score_RM: Tensor, depth_RM: Tensor, num_nodes_R: Tensor, places: int) -> Tensor:
    """How many nodes of each row go to verify, int64 [R], when `places` hold all rows' roots and nodes.

    The best nodes of all rows by score (calibrated, at most 0, not rising in node order, nor depth falling among
    a row's equals), equal scores by smaller depth, then lower row; within a row always the first ones. Raises
    ValueError if the roots do not fit.
    """
    num_rows, max_nodes = score_RM.shape
    num_all = num_rows * max_nodes
    if places < num_rows:
        raise ValueError(f"{places} verify places cannot hold the roots of {num_rows} rows")
    if places >= num_all + num_rows:
        return num_nodes_R
    if places == num_rows:
        return torch.zeros_like(num_nodes_R)
    node_bits = (num_all - 1).bit_length()
    if node_bits + max_nodes.bit_length() > 32:
        raise ValueError(f"{num_rows} rows of {max_nodes} nodes do not fit the 32-bit order of nodes")
    if wants_kernel(score_RM):
        from ratoon.ops.kernels import tree as twin

        return twin.share_places(score_RM, depth_RM, num_nodes_R, places)
    real_RM = torch.arange(max_nodes, device=score_RM.device) < num_nodes_R.unsqueeze(1)
    number_RM = torch.arange(num_all - 1, -1, -1, device=score_RM.device).view(num_rows, max_nodes)
    key_RM = _unique_key(score_RM, (max_nodes - depth_RM) * (1 << node_bits) + number_RM)
    key_RM = key_RM.masked_fill(~real_RM, _LOWEST)
    worst = torch.topk(key_RM.flatten(), places - num_rows).values.amin()
    return ((key_RM >= worst) & real_RM).sum(1)


def pack(trees: TreeBatch, count_R: Tensor, anchor_R: Tensor, places: int, out: Places | None = None) -> Places:
    """Lays each row's anchor and first count_R nodes side by side; needs sum(count_R) + R <= places.

    Written into `out` where given: tensors of the result's shapes, the rows of `bits` at any distance.
    """
    if wants_kernel(trees.token):
        from ratoon.ops.kernels import tree as twin

        return twin.pack(trees, count_R, anchor_R, places, out)
    num_rows, max_nodes = trees.token.shape
    if max_nodes == 0:
        return _placed(_roots(anchor_R, places), out)
    start_R = F.pad((count_R + 1).cumsum(0), (1, 0))
    row_start = F.pad(start_R, (0, 1), value=places)
    place_T = torch.arange(places, device=anchor_R.device)
    row_of = torch.searchsorted(row_start[1:-1].contiguous(), place_T, right=True)
    start_T = row_start[row_of]
    local = place_T - start_T
    # Zeros stand for the roots and, in the last row, for the dummy's places.
    node_3X = F.pad(torch.stack((trees.token, trees.parent, trees.depth)), (1, 0, 0, 1)).flatten(1)
    token, parent, depth = node_3X[:, row_of * (max_nodes + 1) + local.clamp(max=max_nodes)].unbind(0)
    token = torch.where(local == 0, F.pad(anchor_R, (0, 1))[row_of], token)
    parent = torch.where(row_of == num_rows, place_T, start_T + parent)
    num_words = max_nodes // 64 + 1
    local = local % (num_words * 64)
    bits = _ancestor_bits(local, parent, num_words, trees.depth_limit)
    return _placed(Places(token, row_of, parent, depth, local, row_start, bits), out)


def _placed(packed: Places, out: Places | None) -> Places:
    if out is None:
        return packed
    for field in fields(Places):
        getattr(out, field.name).copy_(getattr(packed, field.name))
    return out


def _roots(anchor_R: Tensor, places: int) -> Places:
    """Rows of one place each, and the dummy's: plain decoding, in few calls."""
    num_rows = len(anchor_R)
    place_T = torch.arange(places, device=anchor_R.device)
    row_of = place_T.clamp(max=num_rows)
    local = (place_T - row_of) % 64
    token = F.pad(anchor_R, (0, places - num_rows))
    row_start = F.pad(torch.arange(num_rows + 1, device=anchor_R.device), (0, 1), value=places)
    bits = torch.bitwise_left_shift(torch.ones_like(local), local).unsqueeze(1)
    return Places(token, row_of, place_T, torch.zeros_like(local), local, row_start, bits)


def _ancestor_bits(local_T: Tensor, parent_T: Tensor, num_words: int, depth_limit: int) -> Tensor:
    word_W = torch.arange(num_words, device=local_T.device)
    bit_T1 = torch.bitwise_left_shift(torch.ones_like(local_T), local_T & 63).unsqueeze(1)
    bits_TW = bit_T1 * ((local_T >> 6).unsqueeze(1) == word_W)
    # Each step doubles the ancestors covered: 1, 3, 7, ... above the node itself.
    for _ in range(depth_limit.bit_length()):
        bits_TW = bits_TW | bits_TW[parent_T]
        parent_T = parent_T[parent_T]
    return bits_TW


def walk(places: Places, choice_T: Tensor, depth_limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the target's draws down every row's tree.

    choice_T int64 [T]: the token drawn at each place. Returns accepted int64 [R], the drafted nodes accepted;
    path int64 [R, depth_limit + 1], their places from the root down, the last one repeated to the end; and
    next_token int64 [R], the draw at the last. Siblings must have distinct tokens.
    """
    num_rows, width = len(places.row_start) - 2, depth_limit + 1
    if depth_limit == 0:
        root_R = places.row_start[:num_rows]
        return torch.zeros_like(root_R), root_R.unsqueeze(1), choice_T[root_R]
    drawn = (choice_T[places.parent] == places.token).unsqueeze(1)
    own_TW = places.bits ^ places.bits[places.parent]
    # Bits of the nodes that were not drawn; a root's own bit cancels, so it is never among them. Bits of one
    # row are distinct, so their sum is their union.
    missed_TW = own_TW.masked_fill(drawn, 0)
    missed_RW = missed_TW.new_zeros(num_rows + 1, missed_TW.shape[1]).index_add_(0, places.row_of, missed_TW)
    alive = ((places.bits & missed_RW[places.row_of]) == 0).all(dim=1)
    target = (places.row_of * width + places.depth).masked_fill(~alive, (num_rows + 1) * width)
    place_at = torch.full(((num_rows + 1) * width + 1,), -1, dtype=torch.int64, device=choice_T.device)
    place_at.scatter_(0, target, torch.arange(len(choice_T), device=choice_T.device))
    path_RD = place_at[: num_rows * width].view(num_rows, width)
    accepted = (path_RD >= 0).sum(1) - 1
    step_D = torch.arange(width, device=choice_T.device)
    path_RD = path_RD.gather(1, torch.minimum(step_D, accepted.unsqueeze(1)))
    return accepted, path_RD, choice_T[path_RD[:, -1]]


def history(places: Places, depth_limit: int) -> Tensor:
    """Tokens of the drafted nodes from each place up to its root, int64 [T, max(depth_limit, 1)], -1 pads."""
    if wants_kernel(places.token):
        from ratoon.ops.kernels import tree as twin

        return twin.history(places, depth_limit)
    steps, node_T = [], torch.arange(places.token.shape[0], device=places.token.device)
    for _ in range(max(depth_limit, 1)):
        steps.append(torch.where(places.depth[node_T] > 0, places.token[node_T], -1))
        node_T = places.parent[node_T]
    return torch.stack(steps, dim=1)
