# Owns: the plainest form of target and drafter: dense, one sequence, every mask spelled out.
# Promises: shares no cache, page, mask, tap or rotary table with the engine that it judges.
# Never: is quick, or serves a request.
"""Dense passes for the doctor. P: prompt places, B: block, C: context places, S = C + B, H: hidden, L: draft layers,
N, K, D: heads, K/V heads, head dim, X: taps wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ratoon.core.drafter import DrafterConfig
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.layers import Apart, Layer, Rotary
from ratoon.ops.fused import apply_rope


def layer_states(target: Decoder, ids: Sequence[int]) -> list[Tensor]:
    """float32 [P, H] each: the embeddings, then the residual stream after every layer of a dense causal pass."""
    device = target.embed.weight.device
    position_P = torch.arange(len(ids), device=device)
    seen_PP = position_P <= position_P[:, None]
    attend = Apart(lambda layer, q, k, v: _attention(q, k, v, seen_PP))
    h_PH = target.embed(torch.tensor(list(ids), device=device))
    attend.begin(Rotary(target.config.rope, target.config.head_dim).to(device), position_P, h_PH.dtype)
    states = [h_PH.float()]
    for index, layer in enumerate(target.layers):
        h_PH = layer(index, h_PH.clone(), attend)
        states.append(h_PH.float())
    return states


def context_kv(drafter: DFlash, expected: DrafterConfig, taps_CX: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [L, C, K, D] of taps at positions 0 .. C-1, each layer by its own weights."""
    c_CH = drafter.hidden_norm(drafter.fc(taps_CX))
    cos, sin = _angles(expected, torch.arange(len(taps_CX), device=taps_CX.device), c_CH.dtype)
    keys, values = [], []
    for layer in drafter.layers:
        attention = cast(Layer, layer).self_attn
        bias, rows = attention.qkv_proj.bias, attention.kv_rows
        kv = torch.nn.functional.linear(c_CH, attention.qkv_proj.weight[rows], None if bias is None else bias[rows])
        k_CKD, v_CKD = kv.view(len(kv), 2, expected.num_kv_heads, expected.head_dim).unbind(1)
        assert attention.k_norm is not None
        keys.append(apply_rope(attention.k_norm(k_CKD), cos, sin))
        values.append(v_CKD)
    return torch.stack(keys), torch.stack(values)


def draft_hidden(
    drafter: DFlash, expected: DrafterConfig, x_BH: Tensor, context: tuple[Tensor, Tensor], seen_LBS: Tensor
) -> Tensor:
    """Block hidden [B, H] after the final norm, over context keys and values [L, C, K, D] by explicit masks."""
    start = context[0].shape[1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat((context[0][layer], k)), torch.cat((context[1][layer], v))
        return _attention(q, k, v, seen_LBS[layer])

    apart = Apart(attend)
    position_B = torch.arange(start, start + len(x_BH), device=x_BH.device)
    apart.begin(Rotary(expected.rope, expected.head_dim).to(x_BH.device), position_B, x_BH.dtype)
    for index, layer in enumerate(drafter.layers):
        x_BH = layer(index, x_BH.clone(), apart)
    return drafter.norm(x_BH)


def allowed(q_pos: int, k_pos: int, window: int | None, causal: bool) -> bool:
    """Whether a draft layer's query sees a key (METHOD section 2), one pair at a time."""
    if causal and k_pos > q_pos:
        return False
    if window is None:
        return True
    return q_pos - k_pos < window and (causal or k_pos - q_pos < window)


def mask_of(start: int, block: int, window: int | None, causal: bool) -> Tensor:
    """bool [B, start + B]: what a block at `start` sees of the context and of itself."""
    rows = [[allowed(q, k, window, causal) for k in range(start + block)] for q in range(start, start + block)]
    return torch.tensor(rows)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm().clamp(min=1e-20))


def _angles(config: DrafterConfig, position_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return Rotary(config.rope, config.head_dim).to(position_P.device)(position_P, dtype)


def _attention(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, seen_TS: Tensor) -> Tensor:
    group = q_TND.shape[1] // k_SKD.shape[1]
    k_SND, v_SND = (x.repeat_interleave(group, dim=1).float() for x in (k_SKD, v_SKD))
    scores_NTS = torch.einsum("tnd,snd->nts", q_TND.float(), k_SND) * q_TND.shape[2] ** -0.5
    weights_NTS = scores_NTS.masked_fill(~seen_TS, float("-inf")).softmax(-1)
    return torch.einsum("nts,snd->tnd", weights_NTS, v_SND).to(q_TND.dtype)
