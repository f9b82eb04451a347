# Owns: the target network (Llama, Qwen2, Qwen3) as one decoder with two switches (qkv bias, q/k norm).
# Promises: shapes depend on the arguments' shapes alone; logits are float32, on CUDA never rounded to bfloat16.
# Never: stores keys and values, masks, samples, or reads a value on the host.
"""Target decoder. T: places, H: hidden, N: query heads, K: key/value heads, D: head dim, V: vocabulary, X: taps * H."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratoon.core.config import ModelConfig
from ratoon.models.layers import (
    Attend,
    Attention,
    Layer,
    Linear,
    RMSNorm,
    Rotary,
    can_pack,
    packed,
    packed_linear,
    prepare,
)
from ratoon.ops.launch import wants_kernel


def float_product(h_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """h W^T as float32 [T, V], from the float32 accumulator on CUDA.

    torch has no bfloat16 product with a float32 result on CPU: there it is rounded to bfloat16 first,
    and `Decoder.rescore` gives exact values for the few candidates that matter.
    """
    if h_TH.dtype == torch.float32:
        return F.linear(h_TH, weight_VH)
    if h_TH.is_cuda:
        return torch.mm(h_TH, weight_VH.t(), out_dtype=torch.float32)
    return F.linear(h_TH, weight_VH).float()


class Embedding(nn.Module):
    """Token table [V, H], left uninitialised for the loader."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)


def _layer(config: ModelConfig) -> Layer:
    attention = Attention(
        config.hidden_size,
        (config.num_heads, config.num_kv_heads, config.head_dim),
        eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        o_bias=False,
    )
    return Layer(config.hidden_size, config.intermediate_size, config.rms_norm_eps, attention)


class Decoder(nn.Module):
    """The target. Parameters are uninitialised: models/weights.py fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self._packed_head: Tensor | None = None
        self._lone_head: Tensor | None = None

    @property
    def head_weight(self) -> Tensor:
        """The head matrix [V, H]: the embedding table when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self, ids_T: Tensor, position_T: Tensor, attend: Attend, tap_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden [T, H] after the final norm, and the taps [T, len(tap_ids) * H] (None without tap ids).

        ids and positions are int64 [T]. A tap is the residual stream after that 0-based layer (METHOD section 2),
        concatenated in list order. Raises ValueError for the last layer or an id outside 0..num_layers-2.
        """
        check_tap_ids(tap_ids, self.config.num_layers)
        h_TH = self.embed(ids_T)
        attend.begin(self.rotary, position_T, h_TH.dtype)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            h_TH = layer(index, h_TH, attend)
            if index in tap_ids:
                # By kernels the next layer writes into the same memory.
                tapped[index] = h_TH.clone() if wants_kernel(h_TH) else h_TH
        taps_TX = torch.cat([tapped[index] for index in tap_ids], dim=-1) if tap_ids else None
        return self.norm(h_TH), taps_TX

    def prepare(self) -> None:
        """Readies all products for a CPU (models/layers.py), the head's too; the embedding stays as it is."""
        prepare(self)
        for layer in self.layers:
            cast(Layer, layer).prepare_lone()
        if can_pack(self.head_weight.dtype):
            self._packed_head = packed(self.head_weight)
        elif self.head_weight.dtype == torch.float32:
            self._lone_head = self.head_weight.detach().t().contiguous()

    def logits(self, h_TH: Tensor) -> Tensor:
        """The bare head: float32 [T, V] of hidden after the final norm."""
        if self._packed_head is not None:
            return packed_linear(h_TH, self._packed_head).float()
        if self._lone_head is not None and len(h_TH) == 1:
            return torch.mm(h_TH, self._lone_head)  # see models/lone.py
        return float_product(h_TH, self.head_weight)

    def rescore(self, h_TH: Tensor, token_TK: Tensor) -> Tensor:
        """Exact float32 logits [T, K] of the given token ids: float32 dot products with gathered head rows.

        A row's value does not depend on how many rows are asked together.
        """
        rows_TKH = F.embedding(token_TK, self.head_weight).float()
        return (rows_TKH * h_TH.float().unsqueeze(-2)).sum(-1)


def check_tap_ids(tap_ids: Sequence[int], num_layers: int) -> None:
    """Raises ValueError unless every id is in 0..num_layers-2 (METHOD section 2)."""
    for tap in tap_ids:
        if not 0 <= tap < num_layers - 1:
            raise ValueError(
                f"tap on layer {tap} refused: target_layer_ids are 0-based ids in 0..{num_layers - 2} "
                f"of a target of {num_layers} layers, and its last layer is never tapped"
            )
