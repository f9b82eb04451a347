# Owns: the Triton twin of ops/tree.py's `rank_candidates`.
# Promises: two launches; a row is read by many programs; ties exactly as in the reference.
# Never: holds a sorted or masked copy of the vocabulary.
"""Candidates of draft logits. N: rows, V: vocabulary, K: candidates, S: programs per row, X: any number.

A first kernel leaves the peaks of every 32, 256 and 2048 values. The k best values lie in the k best of the widest,
those in the k best of their parts, and so on: a second kernel, one program per row, descends with short lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.kernels.order import (
    LOW,
    TILE,
    key_of,
    load_ids,
    number_of,
    pair,
    sortable,
    tile_ids,
    value_of,
)
from ratoon.ops.launch import launch

NARROW, MIDDLE = 32, 256
"""Widths of the peaks within a program's tile. Each is 8 of the next: lists of 8 K."""


@triton.jit
def _finite(x):
    """0 for an infinite maximum, so that inf - inf does not arise."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def _scan(
    x_NV,
    narrow_NX,
    middle_NX,
    share_2NS,
    V: tl.constexpr,
    TILE: tl.constexpr,
    MIDDLE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Peaks of a tile, its largest value and its sum of exp(x - largest)."""
    part, row = tl.program_id(0), tl.program_id(1)
    num_narrow: tl.constexpr = (V + NARROW - 1) // NARROW
    num_middle: tl.constexpr = (V + MIDDLE - 1) // MIDDLE
    narrow_X = part * (TILE // NARROW) + tl.arange(0, TILE // NARROW)
    x_XW, inside_XW = load_ids(x_NV, row, tile_ids(narrow_X, NARROW), V)  # pyright: ignore[reportGeneralTypeIssues]
    peak_X = tl.max(tl.where(inside_XW, sortable(x_XW), LOW), axis=1)
    tl.store(narrow_NX + row.to(tl.int64) * num_narrow + narrow_X, peak_X, mask=narrow_X < num_narrow)
    middle_X = part * (TILE // MIDDLE) + tl.arange(0, TILE // MIDDLE)
    peak_X = tl.max(tl.reshape(peak_X, [TILE // MIDDLE, MIDDLE // NARROW]), axis=1)
    tl.store(middle_NX + row.to(tl.int64) * num_middle + middle_X, peak_X, mask=middle_X < num_middle)
    largest = value_of(tl.max(peak_X, axis=0))
    total = tl.sum(tl.sum(tl.exp(x_XW - _finite(largest)), axis=1), axis=0)
    place, size = row * tl.num_programs(0) + part, tl.num_programs(0) * tl.num_programs(1)
    tl.store(share_2NS + place, largest)
    tl.store(share_2NS + size + place, total)


@triton.jit
def _normaliser(largest_S, total_S):
    """log-sum-exp of a row from its programs' shares."""
    largest = _finite(tl.max(largest_S, axis=0))
    return largest + tl.log(tl.sum(total_S * tl.exp(largest_S - largest), axis=0))


@triton.jit
def _best(pair_X, KP: tl.constexpr):
    """The KP largest of distinct pairs, in order."""
    if pair_X.shape[0] > 64:
        best_K = tl.topk(pair_X, KP)
    else:
        # Counting who is before whom has no chain of steps; longer lists would fill the registers.
        rank_X = tl.sum((pair_X[:, None] > pair_X[None, :]).to(tl.int32), axis=0)
        best_K = tl.sum(tl.where(rank_X[:, None] == tl.arange(0, KP)[None, :], pair_X[:, None], 0), axis=0)
    return best_K


@triton.jit
def _parts(pair_X, PARTS: tl.constexpr, KP: tl.constexpr):
    """Numbers of the parts of the KP best."""
    if pair_X.shape[0] > KP:
        pair_X = _best(pair_X, KP)
    part_XW = tile_ids(number_of(pair_X), PARTS)
    return tl.reshape(part_XW, [part_XW.shape[0] * PARTS])


@triton.jit
def _load_peaks(peak_NX, row, number_X, NUM: tl.constexpr):
    peak_X = tl.load(peak_NX + row.to(tl.int64) * NUM + number_X, mask=number_X < NUM, other=LOW)
    return pair(peak_X, number_X)


@triton.jit
def _rank(
    x_NV,
    narrow_NX,
    middle_NX,
    share_2NS,
    token_NK,
    logprob_NK,
    V: tl.constexpr,
    TILE: tl.constexpr,
    MIDDLE: tl.constexpr,
    NARROW: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
):
    row = tl.program_id(0)
    num_parts: tl.constexpr = (V + TILE - 1) // TILE
    part_S = tl.arange(0, SP)
    inside_S = part_S < num_parts
    place_S = row * num_parts + part_S
    largest_S = tl.load(share_2NS + place_S, mask=inside_S, other=float("-inf"))
    total_S = tl.load(share_2NS + tl.num_programs(0) * num_parts + place_S, mask=inside_S, other=0.0)
    pair_X = pair(tl.where(inside_S, sortable(largest_S), LOW), part_S)
    pair_X = _load_peaks(middle_NX, row, _parts(pair_X, TILE // MIDDLE, KP), (V + MIDDLE - 1) // MIDDLE)
    pair_X = _load_peaks(narrow_NX, row, _parts(pair_X, MIDDLE // NARROW, KP), (V + NARROW - 1) // NARROW)
    four_X = _parts(pair_X, NARROW // 4, KP)
    x_XW, inside_XW = load_ids(x_NV, row, tile_ids(four_X, 4), V)
    pair_X = pair(tl.max(tl.where(inside_XW, sortable(x_XW), LOW), axis=1), four_X)
    id_X = _parts(pair_X, 4, KP)
    x_X, inside_X = load_ids(x_NV, row, id_X, V)
    best_K = _best(pair(tl.where(inside_X, sortable(x_X), LOW), id_X), KP)
    logprob_K = value_of(key_of(best_K)) - _normaliser(largest_S, total_S)
    rank_K = tl.arange(0, KP)
    place_K = row.to(tl.int64) * K + rank_K
    tl.store(token_NK + place_K, number_of(best_K).to(tl.int64), mask=rank_K < K)
    tl.store(logprob_NK + place_K, logprob_K, mask=rank_K < K)


def rank_candidates(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ops/tree.py: (token int64, logprob float32), both [N, min(k, V)]."""
    logits_NV = logits_NV.contiguous()
    num_rows, vocab = logits_NV.shape
    num_parts, ranks = -(-vocab // TILE), min(k, vocab)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_NV.device)

    narrow_NX = empty(num_rows, -(-vocab // NARROW), dtype=torch.int32)
    middle_NX = empty(num_rows, -(-vocab // MIDDLE), dtype=torch.int32)
    share_2NS = empty(2, num_rows, num_parts, dtype=torch.float32)
    token_NK = empty(num_rows, ranks, dtype=torch.int64)
    logprob_NK = empty(num_rows, ranks, dtype=torch.float32)
    peaks = (logits_NV, narrow_NX, middle_NX, share_2NS)
    sizes = {"V": vocab, "TILE": TILE, "MIDDLE": MIDDLE, "NARROW": NARROW}
    launch(_scan, (num_parts, num_rows), *peaks, **sizes, num_warps=4)
    # tl.topk takes no list of one.
    padded = max(triton.next_power_of_2(ranks), 2)
    launch(
        _rank,
        (num_rows,),
        *(*peaks, token_NK, logprob_NK),
        **sizes,
        K=ranks,
        KP=padded,
        SP=triton.next_power_of_2(num_parts),
        num_warps=4 if padded <= 16 else 8,
    )
    return token_NK, logprob_NK
