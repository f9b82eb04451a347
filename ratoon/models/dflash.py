# Owns: the DFlash v1 draft network (METHOD section 2) and the one visibility rule of its attention.
# Promises: context K/V depend on target taps alone; the block's K/V go to `attend` and are kept nowhere here.
# Never: owns an embedding or a head (both are the target's), a cache or a mask.
"""DFlash drafter. R: rows, B: block, T = R*B places, N: context places (or heads), H: hidden, X: taps wide,
L: draft layers, K: key/value heads, D: head dim, V: vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ratoon.core.drafter import DrafterConfig
from ratoon.models.layers import MLP, Attend, Linear, RMSNorm
from ratoon.ops.fused import apply_rope, inverse_frequencies, rotary


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None, causal: bool) -> Tensor:
    """Which keys a query sees, by RoPE positions; broadcasts q_pos against k_pos, returns bool.

    A window reaches W-1 positions back and, in a bidirectional layer, as far ahead. It cuts block keys too.
    """
    ahead = k_pos - q_pos
    # Pointwise in every branch: flex-attention traces this function and takes no constructor.
    seen = ahead <= 0 if causal else ahead == ahead
    if window is not None:
        seen = seen & (-ahead < window)
        if not causal:
            seen = seen & (ahead < window)
    return seen


class DraftAttention(nn.Module):
    """Weights of one draft layer's attention; q, k and v in one product."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size, self.kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=config.attention_bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def block_qkv(self, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, D], k and v [T, K, D]; q and k normed and rotated."""
        q, k, v = self.qkv_proj(x_TH).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_rope(q, cos_T1D, sin_T1D), apply_rope(k, cos_T1D, sin_T1D), v


class DraftLayer(nn.Module):
    """One Qwen3-style layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, index: int, h_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.self_attn.block_qkv(self.input_layernorm(h_TH), cos_T1D, sin_T1D)
        h_TH = self.self_attn.o_proj(attend(index, q, k, v).reshape(h_TH.shape[0], -1), h_TH)
        return self.mlp(self.post_attention_layernorm(h_TH), h_TH)

    __call__ = forward


class DFlash(nn.Module):
    """The draft network. Weights are left uninitialised for the loader or the trainer."""

    inv_freq_P: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.tap_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Checkpoints with a learned mask carry one row that stands in for the embedding of the mask id.
        self.mask_embedding: nn.Parameter | None = None
        self.register_buffer("inv_freq_P", inverse_frequencies(config.rope, config.head_dim), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlash:
        # A cast to bf16 or a move off the meta device would spoil the frequencies: they are made anew, in float32.
        super()._apply(fn, recurse)
        self.inv_freq_P = inverse_frequencies(self.config.rope, self.config.head_dim, self.inv_freq_P.device)
        return self

    def _rotary(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary(position_T, self.inv_freq_P, self.config.rope.amplitude, dtype)

    def set_mask_embedding(self, row_H: Tensor) -> None:
        """Takes the learned mask row, [H] or [1, H]; raises ValueError for another shape."""
        if row_H.numel() != self.config.hidden_size or row_H.shape[-1] != self.config.hidden_size:
            raise ValueError(f"mask_embedding has shape {tuple(row_H.shape)}, expected [{self.config.hidden_size}]")
        row_H = row_H.reshape(-1).to(self.fc.weight)
        self.mask_embedding = nn.Parameter(row_H, requires_grad=False)

    def context_feature(self, taps_NX: Tensor) -> Tensor:
        """c = hidden_norm(fc(taps)), [N, H]: computed once, shared by all draft layers."""
        return self.hidden_norm(self.fc(taps_NX))

    def context_kv(self, c_NH: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of every draft layer, each [L, N, K, D]."""
        cos_N1D, sin_N1D = self._rotary(position_N, c_NH.dtype)
        keys, values = [], []
        for layer in self.layers:
            attn = layer.self_attn
            assert isinstance(attn, DraftAttention)
            bias = attn.qkv_proj.bias
            kv = nn.functional.linear(
                c_NH, attn.qkv_proj.weight[attn.q_size :], None if bias is None else bias[attn.q_size :]
            )
            k, v = kv.unflatten(-1, (2 * attn.num_kv_heads, attn.head_dim)).split(attn.num_kv_heads, dim=-2)
            keys.append(apply_rope(attn.k_norm(k), cos_N1D, sin_N1D))
            values.append(v)
        return torch.stack(keys), torch.stack(values)

    def block_embeddings(self, embed_weight_VH: Tensor, anchor_R: Tensor, block_size: int) -> Tensor:
        """Input of a draft pass, [R*B, H]: the anchor's raw embedding, then B-1 mask rows."""
        anchor_RH = nn.functional.embedding(anchor_R, embed_weight_VH)
        mask_H = embed_weight_VH[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        mask_RMH = mask_H.to(anchor_RH.dtype).expand(anchor_R.shape[0], block_size - 1, -1)
        x_RBH = torch.cat((anchor_RH.unsqueeze(1), mask_RMH), dim=1)
        if self.config.input_embedding_scale != 1.0:
            x_RBH = x_RBH * self.config.input_embedding_scale
        return x_RBH.flatten(0, 1)

    def forward(self, x_TH: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Block hidden states after the final norm, [T, H]; `attend` adds the context and owns the mask."""
        cos_T1D, sin_T1D = self._rotary(position_T, x_TH.dtype)
        for index, layer in enumerate(self.layers):
            x_TH = layer(index, x_TH, cos_T1D, sin_T1D, attend)
        return self.norm(x_TH)

    def logits(self, h_NH: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [N, V]: the target's bare head ([N, H] to [N, V]), then the drafter's own multiplier and softcap."""
        return self.shape_logits(head(h_NH))

    def shape_logits(self, logits_NV: Tensor) -> Tensor:
        """Multiplier and softcap of this checkpoint; keeps the dtype."""
        if self.config.output_multiplier != 1.0:
            logits_NV = logits_NV * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)
