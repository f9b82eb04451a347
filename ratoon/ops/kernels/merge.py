# Owns: how partial attention outputs of key ranges become one output.
# Promises: ranges are merged in ascending order, so the same inputs give the same bits.
# Never: reads a partial output of a range that does not exist as a number.
"""Merge of split attention. S: splits (key ranges), M: queries of a tile, Q: all queries (place and head), D: head dim.

part float32 [S, Q, D]: softmax output over one range. lse float32 [S, Q]: log2 of that softmax's normaliser, -inf
where a query sees nothing of the range.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.kernels.early import await_previous
from ratoon.ops.launch import early, launch

MAX_SPLITS = 32
_QUERIES = 16


@triton.jit
def merge_ranges(
    part, lse, query_M, live_M, splits, queries, D: tl.constexpr, PADDED: tl.constexpr, BATCH: tl.constexpr
):
    """Outputs [M, PADDED] of ranges 0..splits-1; 0 where a query saw nothing at all.

    BATCH ranges are loaded before they are needed: one load after the other would wait for memory each time.
    """
    stride = queries.to(tl.int64)
    d = tl.arange(0, PADDED)
    M: tl.constexpr = query_M.shape[0]
    acc = tl.zeros([M, PADDED], dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    most = tl.full([M], float("-inf"), dtype=tl.float32)
    for first in range(0, splits, BATCH):
        for i in tl.static_range(BATCH):
            exists = live_M & (first + i < splits)
            row = (first + i) * stride + query_M
            norm = tl.load(lse + row, mask=exists, other=float("-inf"), cache_modifier=".cg")
            at = row[:, None] * D + d[None, :]
            x = tl.load(part + at, mask=exists[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(most, norm)
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(norm - finite)
            keep = tl.exp2(most - finite)
            # A range that a row does not have was never written: it has no weight, and may hold NaN.
            x = tl.where((weight > 0)[:, None], x, 0.0)
            acc = acc * keep[:, None] + x * weight[:, None]
            total = total * keep + weight
            most = higher
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["splits", "queries"])
def merge_kernel(
    part,
    lse,
    out,
    splits,
    queries,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """M queries a program."""
    await_previous(EARLY)
    query_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    live_M = query_M < queries
    split = tl.arange(0, SPLITS)
    exists = (split < splits)[:, None] & live_M[None, :]
    norm = tl.load(lse + split.to(tl.int64)[:, None] * queries + query_M[None, :], mask=exists, other=float("-inf"))
    # Rows have different lengths: how many ranges any of these queries has.
    used = tl.max(tl.max(tl.where(norm > float("-inf"), split[:, None] + 1, 0), 1), 0)
    x = merge_ranges(part, lse, query_M, live_M, used, queries, D, PADDED, 8)
    d = tl.arange(0, PADDED)
    at = query_M[:, None] * D + d[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=live_M[:, None] & (d < D)[None, :])


def merge(part_SQD: Tensor, lse_SQ: Tensor, out: Tensor) -> None:
    """Writes all of out, [Q, D] in any shape and dtype, from float32 partial outputs."""
    splits, queries, head_dim = part_SQD.shape
    grid = (-(-queries // _QUERIES),)
    sizes = dict(D=head_dim, PADDED=1 << (head_dim - 1).bit_length(), M=_QUERIES, SPLITS=MAX_SPLITS)
    launch(merge_kernel, grid, part_SQD, lse_SQ, out, splits, queries, **sizes, **early(out), num_warps=4, num_stages=1)
