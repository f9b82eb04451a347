# Owns: the blocks that target and drafter share, and the one way a layer attends.
# Promises: weights are fused (qkv, gate_up) in the order that weights.py writes.
# Never: knows where K/V live: `Attend` does.
"""Shared layers. T: places, H: hidden, N: query heads, K: key/value heads, D: head dim."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ratoon.ops.fused import rms_norm, rms_norm_by_layer_norm, swiglu


class Attend(Protocol):
    """Stores a layer's new keys and values and attends; the caller owns cache, mask and windows."""

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """q, k normed and rotated, v bare; returns T * N * D elements in the order of [T, N, D]."""
        ...


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

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x W^T + b, and the residual added."""
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


class MLP(nn.Module):
    """SwiGLU feed-forward with gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_TH: Tensor, residual_TH: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x_TH)), residual_TH)

    __call__ = forward
