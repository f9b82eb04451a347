# Owns: DDTree in numpy, one row at a time: rank, build, share, bits, accept. The oracle of ops/tree.py.
# Promises: the n most probable prefixes, ties by smaller depth, then lower rank, then lower parent.
# Never: imports torch, calibrates a score.
"""The draft tree of arXiv 2604.12989 with a heap. L: depths, K: candidates per depth, V: vocabulary, n: nodes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ratoon.core.tree import Tree

# (not forced, minus the score, depth, rank, parent): the order of the heap is the order of the nodes.
_Candidate = tuple[bool, float, int, int, int]


def rank_candidates(logits_LV: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(token int64, logprob float32), both [L, min(k, V)], by logit, equal logits by lower token id.

    Log-probabilities are a log-softmax over the whole vocabulary at temperature 1.
    """
    logits_LV = np.asarray(logits_LV, dtype=np.float32)
    token_LK = np.argsort(-logits_LV, axis=1, kind="stable")[:, :k]
    peak_L1 = logits_LV.max(axis=1, keepdims=True)
    total_L1 = np.exp((logits_LV - peak_L1).astype(np.float64)).sum(axis=1, keepdims=True)
    normaliser_L1 = (peak_L1 + np.log(total_L1)).astype(np.float32)
    return token_LK.astype(np.int64), np.take_along_axis(logits_LV, token_LK, axis=1) - normaliser_L1


def build_tree(logprob_LK: np.ndarray, token_LK: np.ndarray, budget: int, topk_cap: int = 16, spine: int = 0) -> Tree:
    """The `budget` most probable prefixes; fewer where no more have a probability above zero.

    logprob float32 [L, K], token [L, K], columns in rank order. `topk_cap` bounds the ranks (0 = all K),
    `spine` forces that many rank-0 nodes to come first. Raises ValueError for a negative number or for
    log-probabilities that are above 0, not a number, or rise with rank.
    """
    logprob_LK = np.asarray(logprob_LK, dtype=np.float32)
    if min(budget, topk_cap, spine) < 0:
        raise ValueError(f"budget, topk_cap and spine must not be negative, got {budget}, {topk_cap}, {spine}")
    if not np.all(logprob_LK <= 0) or np.any(logprob_LK[:, 1:] > logprob_LK[:, :-1]):
        raise ValueError("log-probabilities of candidates must be at most 0 and must not rise with rank")
    if topk_cap:
        logprob_LK = logprob_LK[:, :topk_cap]
    nodes = _pick(logprob_LK, budget, spine)
    depth, rank, parent = (np.array([node[column] for node in nodes], dtype=np.int64) for column in (2, 3, 4))
    return Tree(
        token=np.asarray(token_LK, dtype=np.int64)[depth - 1, rank],
        parent=parent,
        depth=depth,
        rank=rank,
        score=np.array([-node[1] for node in nodes], dtype=np.float32),
    )


def _pick(logprob_LK: np.ndarray, budget: int, spine: int) -> list[_Candidate]:
    heap: list[_Candidate] = []
    scores = [np.float32(0)]

    def offer(depth: int, rank: int, parent: int) -> None:
        if depth > logprob_LK.shape[0] or rank >= logprob_LK.shape[1]:
            return
        score = scores[parent] + logprob_LK[depth - 1, rank]
        if score > -np.inf:
            # Node j of a forced spine has depth j and parent j - 1.
            forced = rank == 0 and parent == depth - 1 and depth <= spine
            heapq.heappush(heap, (not forced, -float(score), depth, rank, parent))

    nodes: list[_Candidate] = []
    offer(1, 0, 0)
    while heap and len(nodes) < budget:
        nodes.append(heapq.heappop(heap))
        _, minus_score, depth, rank, parent = nodes[-1]
        scores.append(np.float32(-minus_score))
        offer(depth, rank + 1, parent)
        offer(depth + 1, 0, len(nodes))
    return nodes


def expected_tau(tree: Tree) -> float:
    """Committed tokens per round under the drafter's own distribution, the new anchor included."""
    return 1.0 + float(np.exp(tree.score.astype(np.float64)).sum())


def share(trees: Sequence[Tree], places: int) -> list[int]:
    """How many nodes of each tree go to verify when `places` are shared by all rows' roots and nodes.

    The best nodes of all rows by `score` (calibrated, not rising in pop order), equal scores by smaller depth,
    then lower row; within a row always the first nodes in pop order. Raises ValueError if the roots do not fit.
    """
    if places < len(trees):
        raise ValueError(f"{places} verify places cannot hold the roots of {len(trees)} rows")
    nodes = [
        (-float(tree.score[node]), int(tree.depth[node]), row, node)
        for row, tree in enumerate(trees)
        for node in range(tree.num_nodes)
    ]
    chosen = [row for _, _, row, _ in sorted(nodes)[: places - len(trees)]]
    return [chosen.count(row) for row in range(len(trees))]


def ancestor_bits(parent: np.ndarray) -> np.ndarray:
    """int64 [n + 1, W] bit sets: bit j % 64 of word j // 64 in row i says that node j is i or an ancestor of i.

    `parent` [n] holds the drafted nodes' parents; row 0 is the root, W = (n + 1) / 64 rounded up.
    """
    num = len(parent) + 1
    bits = np.zeros((num, (num + 63) // 64), dtype=np.uint64)
    for node in range(num):
        if node:
            bits[node] = bits[parent[node - 1]]
        bits[node, node // 64] |= np.uint64(1) << np.uint64(node % 64)
    return bits.view(np.int64)


def accept(tree: Tree, posterior: Sequence[int] | np.ndarray) -> tuple[list[int], int]:
    """(accepted path as node numbers, root first; next anchor) for the target's draw at each of the n + 1 nodes."""
    child_of = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True), start=1)
    }
    path = [0]
    while (node := child_of.get((path[-1], int(posterior[path[-1]])))) is not None:
        path.append(node)
    return path, int(posterior[path[-1]])
