# Owns: a decoder layer of one place on a CPU, in as few calls and as fast products as torch has.
# Promises: what Layer computes, in float32, up to rounding.
# Never: runs under a graph: it reads a norm on the host.
"""One place, one layer. H: hidden, X: outputs of a product, I: intermediate.

A step of a small model on a CPU reads its weights and waits for its small calls, each of which finds its code and data
out of the cache: 15 to 50 us after a large product, 3 to 10 us alone. Weights are kept a second time, transposed: at
one place such a product takes 35 % less for the head and 9 % less for the layers, at more places it takes more (135M
model, 2 cores, torch 2.13, 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

HeadsT = TypeVar("HeadsT")


class LoneLayer(Generic[HeadsT]):
    """norms: the two scales [H]; weights: qkv, o, gate_up, down, each [X, H] float32 without bias."""

    def __init__(self, norms: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], eps: float, heads: HeadsT) -> None:
        before, between = norms
        qkv, o, gate_up, down = weights
        # The norm's scale is in the product's weights, and what is left of the norm is one factor.
        self._qkv, self._gate_up = (qkv * before).t().contiguous(), (gate_up * between).t().contiguous()
        self._o, self._down = o.t().contiguous(), down.t().contiguous()
        self._nothing = torch.zeros((), dtype=qkv.dtype)
        self._eps, self._heads = eps, heads

    def __call__(self, index: int, h_1H: Tensor, attend: Callable[[int, Tensor, HeadsT], Tensor]) -> Tensor:
        out_1X = attend(index, self._normed(h_1H, self._qkv), self._heads)
        h_1H = torch.addmm(h_1H, out_1X, self._o)
        gate_1I, up_1I = self._normed(h_1H, self._gate_up).view(2, 1, -1).unbind()
        return torch.addmm(h_1H, F.silu(gate_1I, inplace=True).mul_(up_1I), self._down)

    def _normed(self, h_1H: Tensor, weight_HX: Tensor) -> Tensor:
        """rms_norm(h) times the weight."""
        h_H = h_1H.view(-1)
        # Reading the mean square costs less than two more calls.
        factor = (h_H.dot(h_H).item() / h_H.shape[0] + self._eps) ** -0.5
        return torch.addmm(self._nothing, h_1H, weight_HX, beta=0, alpha=factor)
