# Owns: the noise of ops/noise.py inside kernels.
# Promises: words equal to the reference bit for bit; logarithms in float64, so values too but for a last bit.
# Never: writes noise to memory.
"""Gumbel noise in registers. C: chunks of W token ids, K: chosen ids."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gumbel(word):
    """-log(-log(1 - v)), v = (word + 0.5) / 2^32. v has 33 bits, so 1 - v is exact in float64 and loses nothing."""
    rest = (1.0 - word.to(tl.float64) * (2.0**-32)) - 2.0**-33
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def _words(seed, sample, position, block):
    zero = tl.zeros_like(block)
    return tl.philox(seed, block, zero + position.to(tl.int32), zero + sample.to(tl.int32), zero)


@triton.jit
def gumbel_chunks(seed, sample, position, chunk_C, W: tl.constexpr):
    """float32 [C, W] for the ids W * chunk .. W * chunk + W - 1. seed, sample, position: int64."""
    block_CB = chunk_C[:, None] * (W // 4) + tl.arange(0, W // 4)[None, :]
    first, second, third, fourth = _words(seed, sample, position, block_CB)  # pyright: ignore[reportGeneralTypeIssues]
    word_CB22 = tl.join(tl.join(first, third), tl.join(second, fourth))
    return _gumbel(tl.reshape(word_CB22, [block_CB.shape[0], W]))


@triton.jit
def gumbel_at(seed, sample, position, id_K):
    """The same noise at chosen ids, float32 [K]."""
    first, second, third, fourth = _words(seed, sample, position, id_K >> 2)  # pyright: ignore[reportGeneralTypeIssues]
    lane_K = id_K & 3
    low_K = tl.where(lane_K == 0, first, second)
    return _gumbel(tl.where(lane_K < 2, low_K, tl.where(lane_K == 2, third, fourth)))
