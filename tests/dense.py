# Owns: the plainest possible `Attend`: one sequence, every key kept, causal.
# Promises: one dense softmax in float32 over explicit scores, no library attention.
# Never: pages, windows, trees.
"""A dense causal cache for tests. T: new places, S: places so far, N: query heads, K: key/value heads, D: head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.models.layers import Apart


class DenseCausal(Apart):
    """Appends each layer's keys and values; a place sees every place before it and itself."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(self._dense)
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    @property
    def length(self) -> int:
        """Places stored, as the last layer sees it."""
        last = self.keys[-1]
        return 0 if last is None else last.shape[0]

    def _dense(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k_SKD = self._append(self.keys, layer, k_TKD)
        v_SKD = self._append(self.values, layer, v_TKD)
        num_new, num_heads, head_dim = q_TND.shape
        group = num_heads // k_SKD.shape[1]
        k_SND, v_SND = (x.repeat_interleave(group, dim=1).float() for x in (k_SKD, v_SKD))
        scores_NTS = torch.einsum("tnd,snd->nts", q_TND.float(), k_SND) * head_dim**-0.5
        place_S = torch.arange(k_SKD.shape[0])
        hidden_TS = place_S > place_S[-num_new:].unsqueeze(1)
        weight_NTS = scores_NTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
        return torch.einsum("nts,snd->tnd", weight_NTS, v_SND).to(q_TND.dtype)

    def _append(self, store: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        old = store[layer]
        joined = new if old is None else torch.cat((old, new))
        store[layer] = joined
        return joined
