# Owns: the blocks that target and drafter share, and the one way a layer attends.
# Promises: weights are fused (qkv, gate_up) in the order that weights.py writes.
# Never: knows where K/V live: `Attend` does.
"""Shared layers. T: places, H: hidden, N: query heads, K: key/value heads, D: head dim."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ratoon.ops.fused import rms_norm, swiglu


class Attend(Protocol):
    """Stores a layer's new keys and values and attends; the caller owns cache, mask and windows."""

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """q, k normed and rotated, v bare; returns [T, N, D]."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T (+ b), weights left uninitialised for the loader."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """SwiGLU feed-forward with gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x_TH)))
