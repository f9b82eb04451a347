# Owns: the Triton twin of ops/linear.py, and the choice between it and the library for a shape.
# Promises: a place's result is one fixed order of float32 sums per configuration; sizes and choice come from shapes.
# Never: tunes by timing at run time, keeps memory between launches, or sums with atomics.
"""Few-place products, which stream the weights once. T: places, H: inputs, O: rows of the weight, I: intermediate,
N: rows of one program, K: inputs of one step.

Gate and up rows of the same output are taken in turn, so that both lie in one program. The norm before a product is a
launch of its own: multiplied in where the inputs are read, it took 40 us of a 12 us product (H200, 2026-11-30), since
loads then wait for arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ratoon.ops.launch import LATE, early, launch

_SMALL_BYTES = 8 << 20
"""Weights below this are read faster than a launch takes: programs are made small, so that many share the latency."""
_SHARED_BYTES = 200 << 10
_LINE = 64
"""Elements of one cache line of 128 bytes (two-byte elements)."""


@dataclass(frozen=True)
class Tile:
    """What a program computes, block_t places by block_n rows, and how it reads: steps of block_k, num_stages deep.

    early: launched while the kernel before it still runs, its first weights then fetched into L2.
    """

    block_t: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    early: bool = False

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the buffers, roughly."""
        return (self.block_t + self.block_n) * self.block_k * element_bytes * self.num_stages


def plan(num_places: int, out_size: int, in_size: int, gated: bool, dtype: torch.dtype) -> Tile | None:
    """The tile for a product [num_places, in_size] x [out_size, in_size]^T; None: the library is faster.

    By measurement on an H200 (docs/NUMBERS.md): the library streams large weights at 98 % of a copy, but pays about
    4 us more than the tiles for what surrounds a small product.
    """
    if dtype == torch.float32:
        return Tile(16, 32, 32, 3) if num_places <= 64 else None
    if out_size * in_size * dtype.itemsize < _SMALL_BYTES:
        return _small_tile(num_places, out_size, in_size)
    if num_places > 16 or out_size > 8192:
        return None
    # Few programs must each keep more bytes in flight; where they are more than multiprocessors, some share one.
    return Tile(16, 32, 256, 7 if out_size <= 32 * 132 else 4, early=True)


def _small_tile(num_places: int, out_size: int, in_size: int) -> Tile | None:
    """All of a program's weights are asked for at once, while the kernel before it still runs."""
    if num_places > 64:
        return None
    block_n = 16 if num_places <= 16 and out_size <= 1024 else 32
    num_steps = _ceil_div(in_size, 64)
    stages = min(num_steps + 1, _SHARED_BYTES // ((16 + block_n) * 64 * 2), 10)
    return Tile(16, block_n, 64, stages, 2 if block_n == 16 else 4, early=True)


def _ceil_div(size: int, part: int) -> int:
    return -(-size // part)


@triton.jit
def _prefetch(at):
    """Asks for the cache lines at the given addresses to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fused_rows(tile_n, OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of the weight that a program takes; beyond the last row it reads the last one again."""
    row_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        row_N = row_N // 2 + (row_N % 2) * (OUT // 2)
    return tl.minimum(row_N, OUT - 1)


@triton.jit
def _finish(
    out,
    acc_TN,
    bias,
    residual,
    place_T,
    tile_n,
    num_places,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What follows the sums: bias, gate, residual, the one rounding."""
    if bias is not None:
        acc_TN += tl.load(bias + _fused_rows(tile_n, OUT, GATED, BLOCK_N)).to(tl.float32)[None, :]
    if GATED:
        WIDTH: tl.constexpr = OUT // 2
        BLOCK_O: tl.constexpr = BLOCK_N // 2
        gate_TO, up_TO = tl.split(tl.reshape(acc_TN, [BLOCK_T, BLOCK_O, 2]))
        y_TO = gate_TO * tl.sigmoid(gate_TO) * up_TO
    else:
        WIDTH: tl.constexpr = OUT
        BLOCK_O: tl.constexpr = BLOCK_N
        y_TO = acc_TN
    column_O = tile_n * BLOCK_O + tl.arange(0, BLOCK_O)
    mask_TO = (place_T < num_places)[:, None] & (column_O < WIDTH)[None, :]
    at_TO = place_T.to(tl.int64)[:, None] * WIDTH + column_O[None, :]
    if residual is not None:
        y_TO += tl.load(residual + at_TO, mask=mask_TO, other=0.0).to(tl.float32)
    tl.store(out + at_TO, y_TO.to(out.dtype.element_ty), mask=mask_TO)


@triton.jit(do_not_specialize=["num_places"])
def product(
    out,
    x,
    weight,
    bias,
    residual,
    num_places,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile. Launched early, its first weights are fetched into L2 while the kernel before it still runs."""
    tile_n, tile_t = tl.program_id(0), tl.program_id(1)
    place_T = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    live_T = place_T < num_places
    row_N = _fused_rows(tile_n, OUT, GATED, BLOCK_N).to(tl.int64)
    if EARLY:
        k_L = tl.arange(0, LINES) * 64
        _prefetch(weight + row_N[:, None] * IN + tl.minimum(k_L, IN - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    x_TK = x + place_T.to(tl.int64)[:, None] * IN + k_K[None, :]
    weight_NK = weight + row_N[:, None] * IN + k_K[None, :]
    acc_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for step in range(STEPS):
        at = step * BLOCK_K
        if IN % BLOCK_K == 0:
            w_NK = tl.load(weight_NK + at, eviction_policy="evict_first")
            a_TK = tl.load(x_TK + at, mask=live_T[:, None], other=0.0)
        else:
            inside_K = k_K < IN - at
            w_NK = tl.load(weight_NK + at, mask=inside_K[None, :], other=0.0, eviction_policy="evict_first")
            a_TK = tl.load(x_TK + at, mask=live_T[:, None] & inside_K[None, :], other=0.0)
        acc_TN = tl.dot(a_TK, tl.trans(w_NK), acc_TN, input_precision="ieee")
    _finish(out, acc_TN, bias, residual, place_T, tile_n, num_places, OUT, GATED, BLOCK_T, BLOCK_N)


def project(
    x_TH: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    residual_TO: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Twin of `ops.linear.project`, by this file's kernel or by the library as `plan` says."""
    from ratoon.ops.kernels.rowwise import rms_norm

    assert x_TH.dim() == 2 and weight_OH.is_contiguous() and weight_OH.shape[1] == x_TH.shape[1]
    if norm_H is not None:
        x_TH = rms_norm(x_TH, norm_H, eps)
    out_size, in_size = weight_OH.shape
    tile = plan(x_TH.shape[0], out_size, in_size, gated, x_TH.dtype)
    if tile is None:
        return by_library(x_TH, weight_OH, bias_O, residual_TO, gated, out)
    return by_tiles(tile, x_TH, weight_OH, bias_O, residual_TO, gated, out)


def by_tiles(
    tile: Tile,
    x_TH: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The product by this file's kernel; `out` may be of another dtype than x (float32: unrounded sums)."""
    num_places, (out_size, in_size) = x_TH.shape[0], weight_OH.shape
    width = out_size // 2 if gated else out_size
    x_TH = x_TH.contiguous()
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    if out is None:
        out = x_TH.new_empty(num_places, width)
    assert out.is_contiguous() and out.shape == (num_places, width)
    steps = _ceil_div(in_size, tile.block_k)
    ahead = min(tile.num_stages - 1, steps) * tile.block_k // _LINE
    launch(
        product,
        (_ceil_div(out_size, tile.block_n), _ceil_div(num_places, tile.block_t)),
        *(out, x_TH, weight_OH, bias_O, residual_TO, num_places),
        IN=in_size,
        OUT=out_size,
        GATED=gated,
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STEPS=steps,
        LINES=triton.next_power_of_2(max(ahead, 1)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **(early(x_TH) if tile.early else LATE),
    )
    return out


def by_library(
    x_TH: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The product by torch and the row kernels. The gate rounds to x's dtype; so does a bias beside a residual.

    The residual rides in the product, without a copy where `out` is the residual.
    """
    from ratoon.ops.kernels.rowwise import swiglu

    weight_HO = weight_OH.t()
    if residual_TO is not None and bias_O is None and not gated:
        return torch.addmm(residual_TO, x_TH, weight_HO, out=out)
    direct = out if residual_TO is None and not gated else None
    if bias_O is None:
        y = torch.mm(x_TH, weight_HO, out=direct)
    else:
        y = torch.addmm(bias_O, x_TH, weight_HO, out=direct)
    if gated:
        y = swiglu(y)
    if residual_TO is not None:
        y = y.add_(residual_TO)
    if out is None or y is out:
        return y
    return out.copy_(y)
