# Owns: the blocks that target and drafter share, and the one way a layer attends.
# Promises: weights are fused (qkv, gate_up) in the order that weights.py writes; a layer is four products and `attend`.
# Never: knows where K/V live: `Attend` does.
"""Shared layers. T: places, H: hidden, X: a fused product's width, N: query heads, K: key/value heads, D: head dim,
I: intermediate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ratoon.core.rope import RopeConfig
from ratoon.models.lone import LoneLayer
from ratoon.ops.fused import (
    apply_rope,
    inverse_frequencies,
    rms_norm,
    rms_norm_by_layer_norm,
    rotary,
    rotate_into,
    swiglu,
)
from ratoon.ops.launch import wants_kernel
from ratoon.ops.linear import project


def packed(weight: Tensor) -> Tensor:
    """The weight [out, in] in the order that `packed_linear` takes."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x, weight, bias) with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether packing pays: bfloat16 that oneDNN computes on this CPU. (float32 at one place is slower packed.)"""
    has_onednn = torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepare(network: nn.Module) -> None:
    """Readies every Linear and RMSNorm of a network for eager rounds on a CPU, once its weights are in place."""
    for module in network.modules():
        if isinstance(module, (Linear, RMSNorm)):
            module.prepare()


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps
        self._twice: Tensor | None = None

    def prepare(self) -> None:
        """Keeps the scale twice, side by side, as `rms_norm_by_layer_norm` takes it."""
        self._twice = self.weight.detach().repeat(2)

    def forward(self, x: Tensor) -> Tensor:
        if self._twice is not None:
            return rms_norm_by_layer_norm(x, self._twice, self.eps)
        return rms_norm(x, self.weight, self.eps)

    __call__ = forward


class Linear(nn.Module):
    """y = x W^T (+ b), weights left uninitialised for the loader."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Tensor | None = None
        self._transposed: Tensor | None = None

    def prepare(self) -> None:
        """Readies the weights for a CPU: packed in oneDNN's order where that pays, else as a transposed view.

        oneDNN reorders unpacked bfloat16 weights in every call: 16 places of a 135M model take 30 ms instead of 23
        (2 cores, 2026-11-30). The packed copy is a second one, and opaque: a captured graph must not use it.
        """
        if can_pack(self.weight.dtype):
            self._packed = packed(self.weight)
        else:
            self._transposed = self.weight.detach().t()

    def forward(
        self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        """norm(x) W^T + b; gated: the first half of the outputs gates the second; then the residual is added.

        By kernels the sum takes the residual's memory: no copy of it is made.
        """
        if wants_kernel(x):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return project(
                x, self.weight, self.bias, norm_H=scale, eps=eps, residual_TO=residual, gated=gated, out=residual
            )  # fmt: skip
        if norm is not None:
            x = norm(x)
        if gated:
            y = swiglu(self._product(x, None))
            return y if residual is None else residual + y
        return self._product(x, residual)

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self._transposed is not None and self.bias is None:
            if residual is None:
                return torch.mm(x, self._transposed)
            return torch.addmm(residual, x, self._transposed)
        if self._packed is not None:
            y = packed_linear(x, self._packed, self.bias)
        else:
            y = nn.functional.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y

    # A module's own __call__ looks for hooks in every layer of every step; nothing here has any.
    __call__ = forward


class Rotary(nn.Module):
    """Angles of positions. The frequencies stay float32 whatever dtype the network is cast to."""

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.rope, self.head_dim = rope, head_dim
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        # A cast to bfloat16 would lose the low angles, and to_empty leaves garbage.
        self.inv_freq = inverse_frequencies(self.rope, self.head_dim, self.inv_freq.device)
        return self

    def forward(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin: [T, 1, D] in `dtype`, as `apply_rope` takes them."""
        return rotary(position_T, self.inv_freq, self.rope.amplitude, dtype)


@dataclass(frozen=True)
class Heads:
    """What turns a layer's fused product into queries, keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def split(self, qkv_TX: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, D] and k [T, K, D], normed and rotated, and v [T, K, D] as it is."""
        num_q, num_k = self.num_heads, self.num_kv_heads
        qkv_TND = qkv_TX.unflatten(-1, (num_q + 2 * num_k, self.head_dim))
        if self.q_norm is None or self.k_norm is None:
            q_k = apply_rope(qkv_TND[:, : num_q + num_k], cos_T1D, sin_T1D)
            return q_k[:, :num_q], q_k[:, num_q:], qkv_TND[:, num_q + num_k :]
        q, k, v = qkv_TND.split((num_q, num_k, num_k), dim=1)
        return apply_rope(self.q_norm(q), cos_T1D, sin_T1D), apply_rope(self.k_norm(k), cos_T1D, sin_T1D), v

    def rotate(self, qkv_TX: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, N, D], and keys beside values [T, 2, K, D] as a cache stores them. Spoils qkv: no copy is made."""
        num_q, num_k = self.num_heads, self.num_kv_heads
        qkv_TND = qkv_TX.view(-1, num_q + 2 * num_k, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            rotate_into(qkv_TND[:, : num_q + num_k], qkv_TND[:, : num_q + num_k], cos_T1D, sin_T1D)
        else:
            for norm, at in ((self.q_norm, slice(num_q)), (self.k_norm, slice(num_q, num_q + num_k))):
                rotate_into(qkv_TND[:, at], norm(qkv_TND[:, at]), cos_T1D, sin_T1D)
        q_TND, kv_TND = qkv_TND.split((num_q, 2 * num_k), dim=1)
        return q_TND, kv_TND.view(-1, 2, num_k, self.head_dim)


class Attend(Protocol):
    """Rotates and stores a layer's new keys and values, and attends; it owns cache, mask and windows."""

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        """Called once per pass, before its first layer."""
        ...

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        """qkv: the fused product, X = (N + 2K) * D. Returns the heads' outputs, [T, N * D]."""
        ...


class Apart:
    """Attend by a function of (layer, q [T, N, D], k [T, K, D], v [T, K, D]), q and k normed and rotated."""

    def __init__(self, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> None:
        self._attend = attend

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        self._cos_sin = rotary(position_T, dtype)

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        out_TND = self._attend(layer, *heads.split(qkv_TX, *self._cos_sin))
        return out_TND.reshape(qkv_TX.shape[0], heads.num_heads * heads.head_dim)


class Attention(nn.Module):
    """Weights of grouped-query attention; q, k and v in one product."""

    def __init__(
        self, hidden_size: int, heads: tuple[int, int, int], *, eps: float, qk_norm: bool, qkv_bias: bool, o_bias: bool
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = heads
        self.qkv_proj = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.heads = Heads(num_heads, num_kv_heads, head_dim, self.q_norm, self.k_norm)

    @property
    def kv_rows(self) -> slice:
        """Rows of the fused product that give keys and values."""
        return slice(self.heads.num_heads * self.heads.head_dim, None)


class MLP(nn.Module):
    """SwiGLU feed-forward with gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = MLP(hidden_size, intermediate_size)
        self._lone: LoneLayer[Heads] | None = None

    def prepare_lone(self) -> None:
        """Readies the layer for passes of one place, which a drafter never makes."""
        attention, mlp, norms = self.self_attn, self.mlp, (self.input_layernorm, self.post_attention_layernorm)
        products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if products[0].weight.dtype == torch.float32 and all(product.bias is None for product in products):
            scales, weights = (norms[0].weight, norms[1].weight), tuple(product.weight for product in products)
            self._lone = LoneLayer(scales, weights, norms[0].eps, attention.heads)

    def forward(self, index: int, h_TH: Tensor, attend: Attend) -> Tensor:
        if self._lone is not None and len(h_TH) == 1:
            return self._lone(index, h_TH, attend)
        attention, mlp = self.self_attn, self.mlp
        qkv_TX = attention.qkv_proj(h_TH, norm=self.input_layernorm)
        h_TH = attention.o_proj(attend(index, qkv_TX, attention.heads), residual=h_TH)
        gated_TI = mlp.gate_up_proj(h_TH, norm=self.post_attention_layernorm, gated=True)
        return mlp.down_proj(gated_TI, residual=h_TH)

    __call__ = forward
