# Owns: attention over paged K/V on a GPU: trees, draft blocks and prefill chunks, by one kernel.
# Promises: lengths, pages and trees are read on the device; grids and key ranges' number come from shapes alone.
# Never: uses memory beyond a row's own places, makes a mask of a context's size, or adds floats by atomics.
"""Paged attention kernel. T: packed places, R: rows, N: query heads, K: key/value heads, G = N / K, D: head dim,
S: slots (of a cache) or seats (of a table), P: pages of a row, W: words of ancestor bits, M: queries of a tile,
B: keys of a block.

The G query heads of one K/V head are folded with the places of a row: folded query f is place f // G, head f % G, so
that a tile of M queries is full and reads each key once. Tiles of packed rows lie at
row_start[row] * G // M + row + 0, 1, ..: that leaves each row the tiles it needs, so a tile finds its row by counting.
A row's keys are cut into at most `splits` ranges by the row's own length; ranges it does not need exit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.attention import Span
from ratoon.ops.kernels.early import await_previous
from ratoon.ops.kernels.merge import MAX_SPLITS, merge, merge_ranges
from ratoon.ops.launch import early, launch

_PROGRAMS = 264  # two for each of 132 multiprocessors
_LOG2_E = 1.4426950408889634


@triton.jit
def _ancestors(bits_M, live_M, first_node, words):
    """64 ancestor bits, uint64 [M], from local node `first_node` on (it may be negative); no such node: bit 0."""
    word = first_node >> 6
    shift = (first_node & 63).to(tl.uint64)
    low = tl.load(bits_M + word, mask=live_M & (word >= 0) & (word < words), other=0)
    high = tl.load(bits_M + word + 1, mask=live_M & (word + 1 >= 0) & (word + 1 < words), other=0)
    low, high = low.to(tl.uint64, bitcast=True), high.to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _seen(
    start, key_B, base, stop, local_M, live_M, bits_M, depth_M, depth_T, first_place, count, words,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Which keys of a block each query sees, [M, B]. Relative to base: keys key_B - base, prefix below 0."""
    node_B = key_B - base
    own_B = (node_B >= 0) & (node_B < count)
    seen = (key_B < stop)[None, :] & (local_M >= 0)[:, None]
    if PACKED:
        bits_M1 = _ancestors(bits_M, live_M, start - base, words)[:, None]
        set_MB = (bits_M1 >> (key_B - start).to(tl.uint64)[None, :]) & 1
        seen = seen & ((node_B < 0)[None, :] | ((set_MB != 0) & own_B[None, :]))
    elif CAUSAL:
        seen = seen & (node_B[None, :] <= local_M[:, None])
    if WINDOW is not None:
        # Windows count positions, and siblings share one: a tree's own keys lie at their depths.
        ahead_B = node_B
        if PACKED:
            ahead_B = tl.where(own_B, tl.load(depth_T + first_place + node_B, mask=own_B, other=0).to(tl.int32), node_B)
        back_MB = depth_M[:, None] - ahead_B[None, :]
        seen = seen & (back_MB < WINDOW)
        if not PACKED and not CAUSAL:
            seen = seen & (-back_MB < WINDOW)
    return seen


@triton.jit
def _load(ptr, at, live_B, d, D: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [B, PADDED]. 0 * NaN is NaN: what lies beyond a row must not be loaded."""
    if MASKED:
        return tl.load(ptr + at, mask=live_B[:, None] & (d < D)[None, :], other=0.0)
    elif D != PADDED:
        return tl.load(ptr + at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(ptr + at)


@triton.jit
def _sweep(
    acc, total, most, q, first, last, stop, keys, pages, num_pages, scale,
    base, local_M, live_M, bits_M, depth_M, depth_T, first_place, count, words,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys first..last-1 to a running softmax. Not MASKED: whole blocks that every query sees."""
    d = tl.arange(0, PADDED)
    column_B = (first + tl.arange(0, B)) // PAGE
    page_B = tl.load(pages + column_B, mask=column_B < num_pages, other=0)
    for start in range(first, last, B):
        key_B = start + tl.arange(0, B)
        live_B = key_B < stop
        slot_B = page_B.to(tl.int64) * PAGE + key_B % PAGE
        # Pages come one block ahead: loaded where they are used, they would take the pipeline's stages from the keys.
        column_B = (key_B + B) // PAGE
        page_B = tl.load(pages + column_B, mask=column_B < num_pages, other=0)
        at = slot_B[:, None] * (2 * KV_HEADS * D) + d[None, :]
        k = _load(keys, at, live_B, d, D, PADDED, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = _seen(
                start, key_B, base, stop, local_M, live_M, bits_M, depth_M, depth_T, first_place, count, words,
                PACKED, CAUSAL, WINDOW,
            )  # fmt: skip
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1) * scale)
        finite = higher
        if MASKED:
            finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(score * scale - finite[:, None])
        keep = tl.exp2(most - finite)
        total = total * keep + tl.sum(p, 1)
        v = _load(keys + KV_HEADS * D, at, live_B, d, D, PADDED, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        most = higher
    return acc, total, most


@triton.jit
def _find_row(tile, row_start, rows, G: tl.constexpr, M: tl.constexpr, MOST_ROWS: tl.constexpr):
    """(row, its first place, its places, its first folded query in this tile); row == rows for surplus places."""
    row = tl.arange(0, MOST_ROWS)
    start = tl.load(row_start + row, mask=row <= rows, other=0)
    begins = (row <= rows) & (start * G // M + row <= tile)
    found = tl.sum(begins.to(tl.int32), 0) - 1
    first_place = tl.load(row_start + found)
    count = (tl.load(row_start + found + 1) - first_place).to(tl.int32)
    first_query = (tile - found - (first_place * G // M).to(tl.int32)) * M
    return found, first_place, count, first_query


_RUNTIME = ["rows", "width", "num_pages", "words", "bits_stride", "splits", "queries", "scale"]


@triton.jit(do_not_specialize=_RUNTIME)
def attend_kernel(
    q, cache, out, part, lse, counters, seat_R, base, page_table, row_start, depth_T, bits_TW,
    rows, width, num_pages, words, bits_stride, splits, queries, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, SHORTEST: tl.constexpr, MOST_ROWS: tl.constexpr,
    PACKED: tl.constexpr, BY_ROW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, COUNTED: tl.constexpr, BATCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one K/V head against one range of keys."""
    G: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    if PACKED:
        found = _find_row(tile, row_start, rows, G, M, MOST_ROWS)
        row, first_place, count, first_query = found  # pyright: ignore[reportGeneralTypeIssues]
    else:
        # The last tile of a chunk has the most keys, so it goes first.
        tiles = (width * G + M - 1) // M
        row, count = tile // tiles, width
        first_place, first_query = (row * width).to(tl.int64), (tiles - 1 - tile % tiles) * M
    f = first_query + tl.arange(0, M)
    live_M = f < count * G
    local_M = f // G
    place_M = first_place + local_M
    query_M = place_M * HEADS + head * G + f % G
    d = tl.arange(0, PADDED)
    at_MD = query_M[:, None] * D + d[None, :]
    live_MD = live_M[:, None] & (d < D)[None, :]
    if PACKED:
        if row >= rows:
            await_previous(EARLY)
            if SPLIT and not COUNTED:
                tl.store(lse + split * queries + query_M, float("-inf"), mask=live_M)
            elif split == 0:
                tl.store(out + at_MD, tl.zeros([M, PADDED], dtype=out.dtype.element_ty), mask=live_MD)
            return
        if first_query >= count * G:
            return

    seat = tl.load(seat_R + row)
    pages = page_table + seat * num_pages
    if BY_ROW:
        base = tl.load(base + row).to(tl.int32)
    else:
        base = tl.load(base + seat).to(tl.int32)
    # Rows, lengths and page tables are older than the kernel before this one, which stored the places' K/V.
    await_previous(EARLY)
    q_MD = tl.load(q + at_MD, mask=live_MD, other=0.0)
    first_local, last_local = first_query // G, tl.minimum(count - 1, (first_query + M - 1) // G)
    low, stop, clear = 0, base + count, base
    if not PACKED and CAUSAL:
        stop, clear = base + last_local + 1, base + first_local + 1
    elif not PACKED:
        clear = stop
    if WINDOW is not None:
        reach = base - WINDOW + 1
        if not PACKED:
            reach += first_local
        low, clear = tl.maximum(reach, 0) // B * B, 0
        if not PACKED and not CAUSAL:
            stop = tl.minimum(stop, base + last_local + WINDOW)
    first, last, ranges = low, stop, 1
    if SPLIT:
        length = stop - low
        each = tl.maximum(((length + splits - 1) // splits + B - 1) // B * B, SHORTEST)
        ranges = (length + each - 1) // each
        if split >= ranges:
            if not COUNTED:
                tl.store(lse + split * queries + query_M, float("-inf"), mask=live_M)
            return
        first = low + split * each
        last = tl.minimum(stop, first + each)

    depth_M = local_M
    if PACKED and WINDOW is not None:
        depth_M = tl.load(depth_T + place_M, mask=live_M, other=0).to(tl.int32)
    bits_M = bits_TW + place_M * bits_stride
    keys = cache + head * D
    acc = tl.zeros([M, PADDED], dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    most = tl.full([M], float("-inf"), dtype=tl.float32)
    border = first + tl.maximum(tl.minimum(last, clear) - first, 0) // B * B
    if WINDOW is None:
        acc, total, most = _sweep(
            acc, total, most, q_MD, first, border, stop, keys, pages, num_pages, scale,
            base, local_M, live_M, bits_M, depth_M, depth_T, first_place, count, words,
            KV_HEADS, D, PADDED, PAGE, B, PACKED, CAUSAL, WINDOW, False,
        )  # fmt: skip
    acc, total, most = _sweep(
        acc, total, most, q_MD, border, last, stop, keys, pages, num_pages, scale,
        base, local_M, live_M, bits_M, depth_M, depth_T, first_place, count, words,
        KV_HEADS, D, PADDED, PAGE, B, PACKED, CAUSAL, WINDOW, True,
    )  # fmt: skip
    x = acc / tl.where(total == 0, 1.0, total)[:, None]

    alone = ranges == 1
    if SPLIT and not COUNTED:
        alone = False
    if alone:
        tl.store(out + at_MD, x.to(out.dtype.element_ty), mask=live_MD)
    elif SPLIT:
        part_M = split.to(tl.int64) * queries + query_M
        tl.store(part + part_M[:, None] * D + d[None, :], x, mask=live_MD)
        tl.store(lse + part_M, most + tl.log2(total), mask=live_M)
        if COUNTED:
            # The barrier puts the stores of all threads before the one that counts, whose release publishes them and
            # whose acquire, if it is the last, makes those of the other programs visible here.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
            if arrived == ranges - 1:
                tl.debug_barrier()
                tl.store(counters + tl.program_id(0), 0)
                x = merge_ranges(part, lse, query_M, live_M, ranges, queries, D, PADDED, BATCH)
                tl.store(out + at_MD, x.to(out.dtype.element_ty), mask=live_MD)


@dataclass(frozen=True)
class Tiling:
    """Sizes of one launch. queries: of a tile (M), keys: of a block (B), splits: most ranges of a row's keys,
    shortest: keys below which a range is not split, a multiple of `keys`. counted: the last range of a tile to finish
    merges them all (where counters are given); one program should not have to read large tiles of many ranges alone."""

    queries: int
    keys: int
    splits: int
    shortest: int
    num_warps: int
    num_stages: int
    counted: bool = True


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(a: int) -> int:
    """The lowest that is at least a."""
    return 1 << (a - 1).bit_length()


def choose_tiling(
    rows: int, places: int, group: int, kv_heads: int, head_dim: int, context: int, *, packed: bool, itemsize: int
) -> Tiling:
    """Tiles for the average row, and enough ranges to fill a GPU that few rows would leave idle."""
    folded = _power_of_2(_ceil_div(places, rows) * group)
    narrow = head_dim <= 64
    if itemsize > 2:
        queries, keys, warps, stages = (32 if folded > 16 and narrow else 16), 32, 4, 2
    else:
        large = head_dim <= 128 and places * group * kv_heads >= 128 * _PROGRAMS // 2
        queries = min(max(folded, 16), 128 if large else 64)
        keys = 128 if narrow and queries <= 32 and not packed else 64
        warps = 8 if queries * head_dim > 64 * 128 else 4
        stages = 3 if head_dim <= 128 else 2
    programs = max(rows, _ceil_div(places * group, queries)) * kv_heads
    wanted = _PROGRAMS * 2 if queries <= 32 else _PROGRAMS // 2
    shortest = 128
    splits = max(1, min(wanted // programs, _ceil_div(context, shortest), MAX_SPLITS))
    return Tiling(queries, keys, splits, shortest, warps, stages, counted=queries * head_dim <= 64 * 64)


def num_tiles(rows: int, places: int, group: int, queries: int, packed: bool) -> int:
    """Tiles that R rows can need, whatever their sizes; packed ones also cover the surplus places."""
    if packed:
        return places * group // queries + rows + 1
    return rows * _ceil_div(places // rows * group, queries)


def attend(
    q_TND: Tensor, cache_S2KD: Tensor, span: Span, causal: bool, window: int | None, buffers: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over what each place sees of its row, [T, N * D] in q's dtype.

    cache_S2KD is one layer and holds the places' own K/V already: local node j of a row lies at row slot base + j. A
    place sees its row's prefix (slots below base) and, of the row's own places, in a tree those in its ancestor bits,
    else all, or if `causal` those up to itself. window W: position distance below W, in both directions if not causal;
    a tree's positions are base + depth. Surplus places get 0. Reference: `ops.attention.paged_attention`.

    buffers: int32 [NUM_COUNTERS], zero before the first use and after every use, shared by launches of one stream: with
    it small tiles are merged by the last of their ranges to finish; without it the merge is a launch of its own.
    """
    (places, heads, head_dim), kv_heads, rows = q_TND.shape, cache_S2KD.shape[2], span.seat_R.shape[0]
    tiling = choose_tiling(
        *(rows, places, heads // kv_heads, kv_heads, head_dim, span.context),
        packed=_is_packed(span, places),
        itemsize=q_TND.element_size(),
    )
    return attend_tiled(q_TND, cache_S2KD, span, causal, window, tiling, buffers)


def _is_packed(span: Span, places: int) -> bool:
    """Rows of one place each, and nothing else, need no search for their row."""
    return span.row_start is not None and places != span.seat_R.shape[0]


def attend_tiled(
    q_TND: Tensor,
    cache_S2KD: Tensor,
    span: Span,
    causal: bool,
    window: int | None,
    tiling: Tiling,
    counters: Tensor | None = None,
) -> Tensor:
    """`attend` with sizes of the caller's choice."""
    places, heads, head_dim = q_TND.shape
    kv_heads, rows = cache_S2KD.shape[2], span.seat_R.shape[0]
    assert q_TND.is_contiguous() and cache_S2KD.is_contiguous() and span.page_table_SP.is_contiguous()
    packed = _is_packed(span, places)
    tiles = num_tiles(rows, places, heads // kv_heads, tiling.queries, packed)
    queries, split, padded = places * heads, tiling.splits > 1, _power_of_2(head_dim)
    if not (split and tiling.counted):
        counters = None
    assert tiling.splits <= MAX_SPLITS and tiling.shortest % tiling.keys == 0 and (not packed or tiling.keys <= 64)
    assert counters is None or counters.numel() >= tiles * kv_heads
    out = torch.empty((places, heads * head_dim), dtype=q_TND.dtype, device=q_TND.device)
    scratch = (tiling.splits, queries) if split else (1, 1)
    part = torch.empty((*scratch, head_dim), dtype=torch.float32, device=q_TND.device)
    lse = torch.empty(scratch, dtype=torch.float32, device=q_TND.device)
    tree, words, bits_stride = _tree_tensors(span, packed)
    launch(
        attend_kernel,
        (tiles * kv_heads, tiling.splits),
        *(q_TND, cache_S2KD, out, part, lse, lse if counters is None else counters),
        *(span.seat_R, span.base_S if span.base_R is None else span.base_R, span.page_table_SP, *tree),
        *(rows, places // rows, span.page_table_SP.shape[1], words, bits_stride),
        *(tiling.splits, queries, head_dim**-0.5 * _LOG2_E),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        PADDED=padded,
        PAGE=span.page_size,
        M=tiling.queries,
        B=tiling.keys,
        SHORTEST=tiling.shortest,
        MOST_ROWS=max(_power_of_2(rows + 1), 32) if packed else 32,
        PACKED=packed,
        BY_ROW=span.base_R is not None,
        # A row's only place sees itself, whatever the layer's kind.
        CAUSAL=causal or (span.row_start is not None and not packed),
        WINDOW=window,
        SPLIT=split,
        COUNTED=counters is not None,
        BATCH=8 if tiling.queries * padded <= 16 * 128 else 4,
        **early(q_TND),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if split and counters is None:
        merge(part, lse, out)
    return out


def _tree_tensors(span: Span, packed: bool) -> tuple[tuple[Tensor, Tensor, Tensor], int, int]:
    """(row_start, depth, bits), words of bits, and their distance from place to place."""
    if not packed:
        unread = span.seat_R
        return (unread, unread, unread), 0, 0
    assert span.row_start is not None and span.depth_T is not None and span.bits_TW is not None
    # Build hands over a view of a buffer for the largest tree, whose rows are longer than `words`.
    words, (stride, step) = span.bits_TW.shape[1], span.bits_TW.stride()
    assert step == 1 or words == 1
    return (span.row_start, span.depth_T, span.bits_TW), words, stride
