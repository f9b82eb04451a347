# Owns: the paged `Attend` that target and drafter share, and how far a pass reads.
# Promises: a layer's new K/V are stored before it attends, in slots from the row's base on.
# Never: allocates the cache, or decides which places there are.
"""Attention over the paged cache for one pass. T: places, S: slots, N, K, D: heads, K/V heads, head dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ratoon.ops.attention import Layout, paged_attention, store


@dataclass(frozen=True)
class PagedAttend:
    """Attend (models/layers.py) over cache [layers, S, 2, K, D]; `bias[layer]` is that layer's additive mask."""

    cache: Tensor
    layout: Layout
    bias: Sequence[Tensor]
    page_size: int

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        cache, bias = self.cache[layer], self.bias[layer]
        store(cache, self.layout, bias.shape[3], k_TKD, v_TKD)
        return paged_attention(q_TND, cache, v_TKD, self.layout, bias, self.page_size)
