# Owns: the paged `Attend` that target and drafter share, and how far a pass reads.
# Promises: a layer's new K/V are stored before it attends, in slots from the row's base on.
# Never: allocates the cache, or decides which places there are.
"""Attention over the paged cache for one pass. T: places, S: slots, N, K, D: heads, K/V heads, head dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.attention import InPlace, Layout, attend_rows, in_place, paged_attention, store


class PagedAttend:
    """Attend (models/layers.py) over cache [layers, S, 2, K, D]; `bias[layer]` is that layer's additive mask."""

    def __init__(self, cache: Tensor, layout: Layout, bias: Sequence[Tensor], page_size: int) -> None:
        self.cache, self.layout, self.bias, self.page_size = cache, layout, bias, page_size
        self._views: InPlace | None = None
        if layout.first_slot is not None:
            self._views = in_place(cache, layout.first_slot, bias[0].shape[3], layout.slot_T.shape[0])

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        views, bias = self._views, self.bias[layer]
        if views is None:
            cache = self.cache[layer]
            store(cache, self.layout, k_TKD, v_TKD)
            return paged_attention(q_TND, cache, v_TKD, self.layout, bias, self.page_size)
        views.own_keys[layer].copy_(k_TKD)
        views.own_values[layer].copy_(v_TKD)
        if q_TND.shape[0] == 1:
            # Plain decoding: the last place sees everything, and the group's heads need no folding.
            q_1KGD = q_TND.view(1, k_TKD.shape[1], -1, q_TND.shape[2])
            return F.scaled_dot_product_attention(q_1KGD, views.keys[layer], views.values[layer])
        return attend_rows(q_TND.unsqueeze(0), views.keys[layer], views.values[layer], bias)
