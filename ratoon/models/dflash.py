# Owns: the DFlash v1 draft network (METHOD section 2) and the one visibility rule of its attention.
# Promises: context K/V depend on target taps alone; the block's K/V go to `attend` and are kept nowhere here.
# Never: owns an embedding or a head (both are the target's), a cache or a mask.
"""DFlash drafter. R: rows, B: block, T = R*B places, N: context places (or heads), H: hidden, X: taps wide,
L: draft layers, K: key/value heads, D: head dim, V: vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from ratoon.core.drafter import DrafterConfig
from ratoon.models.layers import Attend, Attention, Layer, Linear, RMSNorm, Rotary
from ratoon.ops.fused import apply_rope
from ratoon.ops.launch import wants_kernel


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


def _layer(config: DrafterConfig) -> Layer:
    attention = Attention(
        config.hidden_size,
        (config.num_heads, config.num_kv_heads, config.head_dim),
        eps=config.rms_norm_eps,
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )
    return Layer(config.hidden_size, config.intermediate_size, config.rms_norm_eps, attention)


class Context(nn.Module):
    """One product for the context keys and values of all draft layers, and their key norms [L, D]."""

    def __init__(self, weight_XH: Tensor, bias_X: Tensor | None, k_norm_LD: Tensor) -> None:
        super().__init__()
        self.proj = Linear(weight_XH.shape[1], weight_XH.shape[0], bias=bias_X is not None)
        self.proj.weight = nn.Parameter(weight_XH.detach(), requires_grad=False)
        if bias_X is not None:
            self.proj.bias = nn.Parameter(bias_X.detach(), requires_grad=False)
        self.k_norm_LD = nn.Parameter(k_norm_LD.detach(), requires_grad=False)


class DFlash(nn.Module):
    """The draft network. Weights are left uninitialised for the loader or the trainer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.tap_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Checkpoints with a learned mask carry one row that stands in for the embedding of the mask id.
        self.mask_embedding: nn.Parameter | None = None
        self.context: Context | None = None

    def stack_context(self) -> None:
        """Call once the weights are in place: the context K/V of all layers become one product."""
        self.context = Context(*self._context_weights())

    def _context_weights(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Rows of the layers' fused products that give keys and values [L*2*K*D, H], their biases, key norms [L, D]."""
        attentions = [cast(Layer, layer).self_attn for layer in self.layers]
        weight = torch.cat([attn.qkv_proj.weight[attn.kv_rows] for attn in attentions])
        biases = [attn.qkv_proj.bias[attn.kv_rows] for attn in attentions if attn.qkv_proj.bias is not None]
        norms: list[Tensor] = [attn.k_norm.weight for attn in attentions if attn.k_norm is not None]
        return weight, torch.cat(biases) if biases else None, torch.stack(norms)

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
        config = self.config
        if self.context is None:
            weight, bias, norm_LD = self._context_weights()
            kv_NX = nn.functional.linear(c_NH, weight, bias)
        else:
            kv_NX, norm_LD = self.context.proj(c_NH), self.context.k_norm_LD
        shape = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        k_NLKD, v_NLKD = kv_NX.unflatten(-1, shape).unbind(2)
        cos_N1D, sin_N1D = self.rotary(position_N, c_NH.dtype)
        normed_NLKD = nn.functional.rms_norm(k_NLKD, (config.head_dim,), None, config.rms_norm_eps)
        k_NLKD = apply_rope(normed_NLKD * norm_LD.unsqueeze(1), cos_N1D.unsqueeze(1), sin_N1D.unsqueeze(1))
        return k_NLKD.transpose(0, 1), v_NLKD.transpose(0, 1)

    def store_context(self, taps_NX: Tensor, position_N: Tensor, slot_N: Tensor, cache_LS2KD: Tensor) -> None:
        """Context K/V of accepted places into the given slots of all draft layers (slot 0 may be named twice)."""
        if self.context is not None and wants_kernel(taps_NX):
            from ratoon.ops.kernels.rowwise import context_store, rotary_table

            kv_NX = self.context.proj(self.fc(taps_NX), norm=self.hidden_norm)
            table_N2P = rotary_table(position_N, self.rotary.inv_freq, self.rotary.rope.amplitude)
            eps = self.config.rms_norm_eps
            context_store(kv_NX, table_N2P, self.context.k_norm_LD, eps, cache_LS2KD, slot_N)
            return
        k, v = self.context_kv(self.context_feature(taps_NX), position_N)
        cache_LS2KD.index_copy_(1, slot_N, torch.stack((k, v), dim=2))

    def block_embeddings(self, embed_weight_VH: Tensor, anchor_R: Tensor, block_size: int) -> Tensor:
        """Input of a draft pass, [R*B, H]: the anchor's raw embedding, then B-1 mask rows."""
        mask_H = embed_weight_VH[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        if wants_kernel(embed_weight_VH):
            from ratoon.ops.kernels import rowwise

            scale = self.config.input_embedding_scale
            return rowwise.block_embeddings(embed_weight_VH, anchor_R, mask_H, scale, block_size)
        anchor_RH = nn.functional.embedding(anchor_R, embed_weight_VH)
        mask_RMH = mask_H.to(anchor_RH.dtype).expand(anchor_R.shape[0], block_size - 1, -1)
        x_RBH = torch.cat((anchor_RH.unsqueeze(1), mask_RMH), dim=1)
        if self.config.input_embedding_scale != 1.0:
            x_RBH = x_RBH * self.config.input_embedding_scale
        return x_RBH.flatten(0, 1)

    def forward(self, x_TH: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Block hidden states after the final norm, [T, H]; `attend` adds the context and owns the mask."""
        attend.begin(self.rotary, position_T, x_TH.dtype)
        for index, layer in enumerate(self.layers):
            x_TH = layer(index, x_TH, attend)
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
