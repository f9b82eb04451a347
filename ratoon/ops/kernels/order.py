# Owns: the order of values inside kernels: by value, equal values by lower id; and the split of a row over programs.
# Promises: a row is read once by many programs, which leave the best value of each short chunk.
# Never: leaves a tie open.
"""Parts of kernels that look for the best values of a row. N: rows, V: vocabulary, W: width of a chunk, C: chunks,
S: programs per row.

The k best values of a row lie in the k chunks with the best peaks (equal peaks: lower chunk), so a second kernel
reads those alone. Values are compared as int32 keys, or as int64 keys that hold the id too and have no ties.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048
"""Values per program: one row of 151936 is spread over 75 programs."""

LOW = tl.constexpr(-(2**31))
"""Key below all values."""
_NO_PAIR = tl.constexpr(-(2**63))


@triton.jit
def sortable(x):
    """int32 that orders as the float32 does; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pair(key, number):
    """int64 that orders by key, equal keys by lower number."""
    return (key.to(tl.int64) << 32) | (0xFFFFFFFF - number.to(tl.int64))


@triton.jit
def key_of(pair_N):
    return (pair_N >> 32).to(tl.int32)


@triton.jit
def number_of(pair_N):
    return (0xFFFFFFFF - (pair_N & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def best_three(pair_N):
    """The three largest of distinct pairs of any shape."""
    first = tl.max(tl.ravel(pair_N), axis=0)
    pair_N = tl.where(pair_N == first, _NO_PAIR, pair_N)
    second = tl.max(tl.ravel(pair_N), axis=0)
    third = tl.max(tl.ravel(tl.where(pair_N == second, _NO_PAIR, pair_N)), axis=0)
    return first, second, third


@triton.jit
def three_chunks(peak_NC, row, num_chunks: tl.constexpr, CP: tl.constexpr):
    """Numbers [4] of the three chunks of a row with the best peaks; the last is none."""
    chunk_C = tl.arange(0, CP)
    peak_C = tl.load(peak_NC + row.to(tl.int64) * num_chunks + chunk_C, mask=chunk_C < num_chunks, other=LOW)
    first, second, third = best_three(pair(peak_C, chunk_C))  # pyright: ignore[reportGeneralTypeIssues]
    place = tl.arange(0, 4)
    best = tl.where(place == 0, first, tl.where(place == 1, second, third))
    return tl.where(place < 3, number_of(best), CP)


@triton.jit
def tile_ids(chunk_C, W: tl.constexpr):
    """Token ids [C, W] of chunks."""
    return chunk_C[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def load_ids(x_NV, row, id_CW, V: tl.constexpr):
    """(values, whether inside the vocabulary) of a row's ids; outside is -inf."""
    inside_CW = id_CW < V
    x_CW = tl.load(x_NV + row.to(tl.int64) * V + id_CW, mask=inside_CW, other=float("-inf"))
    return x_CW.to(tl.float32), inside_CW


@triton.jit
def store_peaks(peak_NC, row, chunk_C, key_CW, num_chunks: tl.constexpr):
    offset_C = row.to(tl.int64) * num_chunks + chunk_C
    tl.store(peak_NC + offset_C, tl.max(key_CW, axis=1), mask=chunk_C < num_chunks)


def chunks(vocab: int, width: int) -> tuple[int, int]:
    """(chunks of a row, programs that share them)."""
    return -(-vocab // width), -(-vocab // TILE)
