# Owns: the Triton twins of what works place by place: norm, gate, rotation into the cache, block input.
# Promises: float32 inside; each is one launch of one fixed order of sums, and fills every element of its result.
# Never: reads a value on the host, or lets a place touch another place's slot.
"""Row-wise kernels. T, N: places, R: rows, B: block, H: hidden, I: intermediate, L: draft layers, N and K: query and
key/value heads, D: head dim, P: D // 2 pairs of a head, S: slots, X: width of a fused product.

Strides are constants of a kernel, since they are constants of a model and an engine; sizes that vary by graph key are
plain integers that Triton does not specialise. A head is two halves of P elements, because the rotation pairs element
p with p + P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.kernels.early import await_previous
from ratoon.ops.launch import early, launch

_FILL = 1024
"""Programs from which on a launch fills an H200, so that further heads go into the same programs."""
_MOST_HEADS = 16


def _padded(number: int) -> int:
    """The least power of two that holds a number: ranges of a kernel have such sizes."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _rms_norm(
    out,
    x,
    weight,
    eps,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    x_H = tl.load(x + place * X_STRIDE + h, mask=inside, other=0.0).to(tl.float32)
    weight_H = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    y_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, axis=0) / H + eps) * weight_H
    tl.store(out + place * OUT_STRIDE + h, y_H.to(out.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """As ops/fused.py, for [T, H] with any row stride; `out` [T, H] may be x or part of a wider buffer."""
    num_places, size = x_TH.shape
    if out is None:
        out = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    assert out.shape == x_TH.shape and x_TH.stride(1) == out.stride(1) == weight_H.stride(0) == 1
    block = _padded(size)
    launch(
        _rms_norm,
        (num_places,),
        *(out, x_TH, weight_H, eps),
        **early(out),
        X_STRIDE=x_TH.stride(0),
        OUT_STRIDE=out.stride(0),
        H=size,
        BLOCK_H=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


@triton.jit
def _swiglu(out, gate_up, X_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr):
    await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < WIDTH
    gate_I = tl.load(gate_up + place * X_STRIDE + i, mask=inside, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up + place * X_STRIDE + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    y_I = gate_I * tl.sigmoid(gate_I) * up_I
    tl.store(out + place * WIDTH + i, y_I.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """As ops/fused.py: [T, 2 * intermediate] to [T, intermediate], rounded once."""
    num_places, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    assert gate_up_TI.stride(1) == 1 and gate_up_TI.shape[1] == 2 * width
    out = gate_up_TI.new_empty(num_places, width)
    block = min(_padded(width), 1024)
    launch(
        _swiglu,
        (num_places, -(-width // block)),
        *(out, gate_up_TI),
        **early(out),
        X_STRIDE=gate_up_TI.stride(0),
        WIDTH=width,
        BLOCK_I=block,
        num_warps=4,
    )
    return out


@triton.jit
def _rotary_table(out, position_T, inv_freq_P, amplitude, P: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr):
    await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    inside = p < P
    angle_P = tl.load(position_T + place).to(tl.float32) * tl.load(inv_freq_P + p, mask=inside, other=0.0)
    tl.store(out + place * 2 * P + p, tl.cos(angle_P) * amplitude, mask=inside)
    tl.store(out + place * 2 * P + P + p, tl.sin(angle_P) * amplitude, mask=inside)


def rotary_table(position_T: Tensor, inv_freq_P: Tensor, amplitude: float) -> Tensor:
    """cos, then sin, of every place's angles, float32 [T, 2, P], the amplitude applied. position int64 [T]."""
    num_places, pairs = position_T.shape[0], inv_freq_P.shape[0]
    table_T2P = torch.empty(num_places, 2, pairs, dtype=torch.float32, device=position_T.device)
    block = _padded(pairs)
    launch(
        _rotary_table,
        (num_places,),
        *(table_T2P, position_T, inv_freq_P, amplitude),
        **early(table_T2P),
        P=pairs,
        BLOCK_P=block,
        num_warps=min(max(block // 32, 1), 4),
    )
    return table_T2P


@triton.jit
def _turned(halves, scales, is_value_H, table_at, eps, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Both halves of heads in their own dtype, normed where `scales` (two halves) are given, and rotated; values
    untouched. The norm rounds to the model's dtype, as Hugging Face's module does before its rotation."""
    dtype: tl.constexpr = halves[0].dtype
    pair = tl.arange(0, BLOCK_P)
    cos_P = tl.load(table_at + pair, mask=pair < P, other=0.0)
    sin_P = tl.load(table_at + P + pair, mask=pair < P, other=0.0)
    a_HP, b_HP = halves[0].to(tl.float32), halves[1].to(tl.float32)
    if scales is not None:
        factor_H = tl.rsqrt(tl.sum(a_HP * a_HP + b_HP * b_HP, axis=1) / (2 * P) + eps)
        a_HP = (a_HP * factor_H[:, None] * scales[0].to(tl.float32)).to(dtype).to(tl.float32)
        b_HP = (b_HP * factor_H[:, None] * scales[1].to(tl.float32)).to(dtype).to(tl.float32)
    turned_a_HP = (a_HP * cos_P[None, :] - b_HP * sin_P[None, :]).to(dtype)
    turned_b_HP = (b_HP * cos_P[None, :] + a_HP * sin_P[None, :]).to(dtype)
    return tl.where(is_value_H[:, None], halves[0], turned_a_HP), tl.where(is_value_H[:, None], halves[1], turned_b_HP)


@triton.jit
def _halves(at, inside, P: tl.constexpr):
    """The two halves of heads."""
    return tl.load(at, mask=inside, other=0.0), tl.load(at + P, mask=inside, other=0.0)


@triton.jit
def _store_halves(at, halves, inside, P: tl.constexpr):
    tl.store(at, halves[0].to(at.dtype.element_ty), mask=inside)
    tl.store(at + P, halves[1].to(at.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_store(
    q_TND,
    cache,
    qkv_TX,
    table_T2P,
    q_norm_D,
    k_norm_D,
    slot_T,
    eps,
    X_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_T + place)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside_HP = (head_H < N + 2 * K)[:, None] & (pair < P)
    is_query_H1 = (head_H < N)[:, None]
    halves = _halves(qkv_TX + place * X_STRIDE + head_H[:, None] * (2 * P) + pair, inside_HP, P)
    if q_norm_D is not None:
        q_scales = _halves(q_norm_D + pair, pair < P, P)
        k_scales = _halves(k_norm_D + pair, pair < P, P)
        scales = tl.where(is_query_H1, q_scales[0], k_scales[0]), tl.where(is_query_H1, q_scales[1], k_scales[1])
    else:
        scales = None
    turned = _turned(halves, scales, head_H >= N + K, table_T2P + place * 2 * P, eps, P, BLOCK_P)
    _store_halves(q_TND + place * (N * 2 * P) + head_H[:, None] * (2 * P) + pair, turned, inside_HP & is_query_H1, P)
    kv_H = head_H - N
    kept_H = (kv_H // K) * PART_STRIDE + (kv_H % K) * HEAD_STRIDE
    _store_halves(cache + slot * SLOT_STRIDE + kept_H[:, None] + pair, turned, inside_HP & ~is_query_H1, P)


def _head_block(num_places: int, num_heads: int) -> int:
    """Heads of one program: one until the launch fills the device, then more, so that programs do not queue."""
    wanted = _padded(max(num_places * num_heads // _FILL, 1))
    return min(wanted, _MOST_HEADS, _padded(num_heads))


def _tile(num_places: int, num_heads: int, pairs: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid over places and blocks of heads, and the options that say how large a block is."""
    heads, block = _head_block(num_places, num_heads), _padded(pairs)
    warps = min(max(heads * block // 256, 1), 8)
    grid = (num_places, -(-num_heads // heads))
    return grid, {"P": pairs, "BLOCK_H": heads, "BLOCK_P": block, "num_warps": warps}


def rotate_store(
    qkv_TX: Tensor,
    table_T2P: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    cache_S2KD: Tensor,
    slot_T: Tensor,
) -> Tensor:
    """Norms (both or neither) and rotates queries and keys; keys and values go to cache[slot], queries are returned.

    qkv [T, (N + 2K) * D] with any row stride; table from `rotary_table`; one layer's cache [S, 2, K, D]; slot int64
    [T]. Returns [T, N, D]. Places that name one slot race for it: each leaves whole elements, so it stays finite.
    """
    num_places, pairs = qkv_TX.shape[0], cache_S2KD.shape[3] // 2
    num_all = num_heads + 2 * num_kv_heads
    assert qkv_TX.shape[1] == num_all * 2 * pairs and qkv_TX.stride(1) == cache_S2KD.stride(3) == 1
    assert (q_norm_D is None) == (k_norm_D is None) and table_T2P.is_contiguous()
    assert table_T2P.shape == (num_places, 2, pairs) and slot_T.shape == (num_places,)
    q_TND = qkv_TX.new_empty(num_places, num_heads, 2 * pairs)
    grid, options = _tile(num_places, num_all, pairs)
    launch(
        _rotate_store,
        grid,
        *(q_TND, cache_S2KD, qkv_TX, table_T2P, q_norm_D, k_norm_D, slot_T, eps),
        **early(q_TND),
        X_STRIDE=qkv_TX.stride(0),
        SLOT_STRIDE=cache_S2KD.stride(0),
        PART_STRIDE=cache_S2KD.stride(1),
        HEAD_STRIDE=cache_S2KD.stride(2),
        N=num_heads,
        K=num_kv_heads,
        **options,
    )
    return q_TND


@triton.jit
def _context_store(
    cache,
    kv_NX,
    table_N2P,
    k_norm_LD,
    slot_N,
    eps,
    X_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_N + place)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside_HP = (head_H < L * 2 * K)[:, None] & (pair < P)
    layer_H, kv_H = head_H // (2 * K), head_H % (2 * K)
    halves = _halves(kv_NX + place * X_STRIDE + head_H[:, None] * (2 * P) + pair, inside_HP, P)
    scales = _halves(k_norm_LD + layer_H[:, None] * (2 * P) + pair, inside_HP, P)
    turned = _turned(halves, scales, kv_H >= K, table_N2P + place * 2 * P, eps, P, BLOCK_P)
    kept_H = layer_H.to(tl.int64) * LAYER_STRIDE + (kv_H // K) * PART_STRIDE + (kv_H % K) * HEAD_STRIDE
    _store_halves(cache + slot * SLOT_STRIDE + kept_H[:, None] + pair, turned, inside_HP, P)


def context_store(
    kv_NX: Tensor, table_N2P: Tensor, k_norm_LD: Tensor, eps: float, cache_LS2KD: Tensor, slot_N: Tensor
) -> None:
    """Context keys, normed and rotated, and values of all draft layers into cache[:, slot] [L, S, 2, K, D].

    kv [N, L*2*K*D]: per layer K heads of keys, then K of values, as DFlash.context_kv takes them apart; k_norm [L, D];
    table from `rotary_table`; slot int64 [N], where slot 0 may be named by any number of places.
    """
    num_layers, _, _, num_heads, head_dim = cache_LS2KD.shape
    num_places, pairs = kv_NX.shape[0], head_dim // 2
    assert kv_NX.shape[1] == num_layers * 2 * num_heads * head_dim and kv_NX.stride(1) == cache_LS2KD.stride(4) == 1
    assert table_N2P.shape == (num_places, 2, pairs) and table_N2P.is_contiguous() and k_norm_LD.is_contiguous()
    assert k_norm_LD.shape == (num_layers, head_dim) and slot_N.shape == (num_places,)
    grid, options = _tile(num_places, num_layers * 2 * num_heads, pairs)
    launch(
        _context_store,
        grid,
        *(cache_LS2KD, kv_NX, table_N2P, k_norm_LD, slot_N, eps),
        **early(cache_LS2KD),
        X_STRIDE=kv_NX.stride(0),
        LAYER_STRIDE=cache_LS2KD.stride(0),
        SLOT_STRIDE=cache_LS2KD.stride(1),
        PART_STRIDE=cache_LS2KD.stride(2),
        HEAD_STRIDE=cache_LS2KD.stride(3),
        L=num_layers,
        K=num_heads,
        **options,
    )


@triton.jit(do_not_specialize=["block"])
def _block_embeddings(
    out,
    embed_VH,
    anchor_R,
    mask_H,
    scale,
    block,
    ROW_STRIDE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_previous(EARLY)
    place = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if place % block == 0:
        token = tl.load(anchor_R + place // block).to(tl.int64)
        row_H = tl.load(embed_VH + token * ROW_STRIDE + h, mask=h < H, other=0.0)
    else:
        row_H = tl.load(mask_H + h, mask=h < H, other=0.0).to(embed_VH.dtype.element_ty)
    y_H = (row_H.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + place.to(tl.int64) * H + h, y_H, mask=h < H)


def block_embeddings(embed_VH: Tensor, anchor_R: Tensor, mask_H: Tensor, scale: float, block: int) -> Tensor:
    """As DFlash.block_embeddings, [R * B, H]: each anchor's row, then B - 1 times `mask_H`, all times `scale`."""
    num_rows, size = anchor_R.shape[0], embed_VH.shape[1]
    assert embed_VH.stride(1) == mask_H.stride(0) == 1 and mask_H.shape == (size,)
    out = embed_VH.new_empty(num_rows * block, size)
    block_h = min(_padded(size), 1024)
    launch(
        _block_embeddings,
        (num_rows * block, -(-size // block_h)),
        *(out, embed_VH, anchor_R, mask_H, scale, block),
        **early(out),
        ROW_STRIDE=embed_VH.stride(0),
        H=size,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return out
