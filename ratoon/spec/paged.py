# Owns: the forms of `Attend` over the paged cache: by masks (reference), one place of a lone row, by kernels.
# Promises: a layer's new K/V are stored before it attends, in slots from the row's base on.
# Never: allocates the cache, or decides which places there are.
"""Attention over the paged cache for one pass. T: places, S: slots, N, K, D: heads, K/V heads, head dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon.models.layers import Heads, Rotary
from ratoon.ops.attention import InPlace, Layout, Span, attend_rows, in_place, paged_attention, store


class PagedAttend:
    """Attend (models/layers.py) over cache [layers, S, 2, K, D]; `bias[layer]` is that layer's additive mask."""

    def __init__(self, cache: Tensor, layout: Layout, bias: Sequence[Tensor], page_size: int) -> None:
        self.cache, self.layout, self.bias, self.page_size = cache, layout, bias, page_size
        self._views: InPlace | None = None
        if layout.first_slot is not None:
            self._views = in_place(cache, layout.first_slot, bias[0].shape[3], layout.slot_T.shape[0])

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        self._cos_sin = rotary(position_T, dtype)

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        q_TND, kv_T2KD = heads.rotate(qkv_TX, *self._cos_sin)
        return self._attend(layer, q_TND, kv_T2KD).reshape(len(q_TND), -1)

    def _attend(self, layer: int, q_TND: Tensor, kv_T2KD: Tensor) -> Tensor:
        views, bias = self._views, self.bias[layer]
        if views is None:
            cache = self.cache[layer]
            store(cache, self.layout, kv_T2KD)
            return paged_attention(q_TND, cache, kv_T2KD[:, 1], self.layout, bias, self.page_size)
        views.own[layer].copy_(kv_T2KD)
        return attend_rows(q_TND.unsqueeze(0), views.keys[layer], views.values[layer], bias).squeeze(0)


class LoneAttend:
    """The same for plain decoding of one row whose slots 0..C-1 lie side by side from `first_slot` on: the last place,
    which sees everything.

    Small products instead of many small calls, whose count is what a step of a small model on a CPU waits for beside
    its weights: rotation is a product with a [D, D] matrix made once per pass, written where the key belongs.
    """

    def __init__(self, cache: Tensor, first_slot: int, context: int) -> None:
        kv_LC2KD = cache[:, first_slot : first_slot + context]
        keys_LCKD, values_LCKD = kv_LC2KD.unbind(2)
        self._keys = keys_LCKD.permute(0, 2, 3, 1).unbind(0)
        self._values = values_LCKD.transpose(1, 2).unbind(0)
        self._own_key, self._own_value = keys_LCKD[:, -1].unbind(0), values_LCKD[:, -1].unbind(0)

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        cos_11D, sin_11D = rotary(position_T, dtype)
        half = cos_11D.shape[-1] // 2
        self._turn = cos_11D.flatten().diag() + sin_11D.flatten().diag().roll(half, 0)
        self._turn_and_scale = self._turn * cos_11D.shape[-1] ** -0.5

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        num_q, num_k = heads.num_heads, heads.num_kv_heads
        q_ND, k_KD, v_KD = qkv_TX.view(-1, heads.head_dim).split_with_sizes((num_q, num_k, num_k))
        if heads.q_norm is not None and heads.k_norm is not None:
            q_ND, k_KD = heads.q_norm(q_ND), heads.k_norm(k_KD)
        torch.mm(k_KD, self._turn, out=self._own_key[layer])
        self._own_value[layer].copy_(v_KD)
        q_KGD = torch.mm(q_ND, self._turn_and_scale).view(num_k, -1, heads.head_dim)
        weight_KGC = torch.bmm(q_KGD, self._keys[layer]).softmax(-1)
        return torch.bmm(weight_KGC, self._values[layer]).view(1, -1)


class KernelAttend:
    """The same by kernels that read page table, lengths and ancestor bits on the device: no mask, any row's length.

    slot_T int64 [T]: where the places' K/V go; windows, causal: one entry per layer; counters: zeros that outlive the
    pass (ops/kernels/attention.py), or None.
    """

    def __init__(
        self,
        cache: Tensor,
        span: Span,
        slot_T: Tensor,
        windows: Sequence[int | None],
        causal: Sequence[bool],
        counters: Tensor | None = None,
    ) -> None:
        self.cache, self.span, self.slot_T, self.windows, self.causal = cache, span, slot_T, windows, causal
        self.counters = counters

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        from ratoon.ops.kernels.rowwise import rotary_table

        self._table_T2P = rotary_table(position_T, rotary.inv_freq, rotary.rope.amplitude)

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        from ratoon.ops.kernels.attention import attend
        from ratoon.ops.kernels.rowwise import rotate_store

        cache, q_norm, k_norm = self.cache[layer], heads.q_norm, heads.k_norm
        q_TND = rotate_store(
            qkv_TX,
            self._table_T2P,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            heads.num_heads,
            heads.num_kv_heads,
            cache,
            self.slot_T,
        )
        return attend(q_TND, cache, self.span, self.causal[layer], self.windows[layer], self.counters)
