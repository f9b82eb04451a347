# Owns: what one training step looks at: anchors, blocks, who sees whom, and the weighted loss through the frozen head.
# Promises: one visibility function makes the explicit and the block-sparse mask; all logits never exist at once.
# Never: updates a weight, reads a value on the host.
"""DFlash training loss. N: packed rows, S: their length, A: anchors per row, B: block, Q = A*B, P: predictions,
L: draft layers, H: hidden, X: taps wide, K: key/value heads, D: head dim, V: vocabulary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ratoon.core.drafter import DrafterConfig
from ratoon.models.decoder import Decoder, float_product
from ratoon.models.dflash import DFlash, visible
from ratoon.models.layers import Apart

BACKENDS = ("explicit", "flex")
PADDING, NO_ANCHOR = -1, -2
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Packed rows [N, S] on the device: ids, position within the sample, sample number (-1: padding), may-be-anchor."""

    ids: Tensor
    position: Tensor
    document: Tensor
    anchor: Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks [N, A] of one step. Labels and weights are [N, A, L] over predictions, weight 0 where there is none."""

    token: Tensor
    start: Tensor
    document: Tensor
    position: Tensor
    label: Tensor
    weight: Tensor
    place: Tensor


def slot_weights(num_drafts: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """exp(-(k-1)/gamma) for the k-th drafted token, k = 1..num_drafts."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32, device=device) / gamma)


def draw_blocks(batch: Batch, config: DrafterConfig, num_anchors: int, gamma: float) -> Blocks:
    """`num_anchors` random anchors of every row, in order; a row with fewer places gets empty blocks for the rest."""
    length = batch.ids.shape[1]
    score, index = torch.where(batch.anchor, torch.rand(batch.ids.shape, device=batch.ids.device), -1.0).topk(
        num_anchors
    )
    used, order = torch.where(score >= 0, index, length).sort(dim=1)
    return blocks_at(batch, config, index.gather(1, order), used < length, gamma)


def blocks_at(batch: Batch, config: DrafterConfig, index_NA: Tensor, valid_NA: Tensor, gamma: float) -> Blocks:
    """The blocks anchored at the given places of each row."""
    length = batch.ids.shape[1]
    start, document = batch.position.gather(1, index_NA), batch.document.gather(1, index_NA)
    place = index_NA[..., None] + torch.arange(1, config.num_drafts + 1, device=index_NA.device)
    inside = place < length
    place = place.clamp(max=length - 1)
    label = batch.ids.gather(1, place.flatten(1)).view_as(place)
    same = batch.document.gather(1, place.flatten(1)).view_as(place) == document[..., None]
    weight = slot_weights(config.num_drafts, gamma, index_NA.device)
    return Blocks(
        token=batch.ids.gather(1, index_NA),
        start=start,
        document=torch.where(valid_NA, document, NO_ANCHOR),
        position=start[..., None] + torch.arange(config.block_size, device=index_NA.device),
        label=label,
        weight=(inside & same & valid_NA[..., None]) * weight,
        place=place,
    )


def draft_mask(batch: Batch, blocks: Blocks, window: int | None, causal: bool) -> MaskFunction:
    """Who sees whom, for queries [A*B] and keys [S context places | A*B block places] of each row.

    A block sees its own sample's context before its anchor, and itself; windows and causality by RoPE position.
    """
    length, size = batch.ids.shape[1], blocks.position.shape[-1]
    q_position = blocks.position.flatten(1)
    q_start, q_document = (value.repeat_interleave(size, 1) for value in (blocks.start, blocks.document))
    k_position = torch.cat((batch.position, q_position), 1)
    k_document = torch.cat((batch.document, q_document), 1)

    def mask(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        earlier = (k_document[row, k] == q_document[row, q]) & (k_position[row, k] < q_start[row, q])
        own = (k - length) // size == q // size
        seen = visible(q_position[row, q], k_position[row, k], window, causal)
        return seen & torch.where(k < length, earlier, own)

    return mask


def target_mask(batch: Batch) -> MaskFunction:
    """Causal attention within each packed sample (padding sees itself)."""

    def mask(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (batch.document[row, q] == batch.document[row, k])

    return mask


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    """torch.compile once per process; a failure to compile is raised, never replaced by something slower."""
    functions = {"flex": flex_attention, "block_mask": create_block_mask, "head": _head_chunk}
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(functions[name], dynamic=False)


def build_mask(mask: MaskFunction, rows: int, queries: int, keys: int, device: torch.device, backend: str) -> Any:
    """The mask in the form that `attention` takes: a BlockMask, or bool [N, 1, Q, K]."""
    if backend == "flex":
        return _compiled("block_mask")(mask, rows, None, queries, keys, device=device)
    row, q, k = (torch.arange(n, device=device) for n in (rows, queries, keys))
    return mask(row[:, None, None], row[:1, None, None], q[:, None], k).unsqueeze(1)


def attention(q_NHQD: Tensor, k_NHKD: Tensor, v_NHKD: Tensor, mask: Any, backend: str) -> Tensor:
    """Grouped-query attention under a mask of `build_mask`."""
    if backend == "flex":
        return _compiled("flex")(q_NHQD, k_NHKD, v_NHKD, block_mask=mask, enable_gqa=True)
    groups = q_NHQD.shape[1] // k_NHKD.shape[1]
    keys, values = k_NHKD.repeat_interleave(groups, 1), v_NHKD.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q_NHQD, keys, values, attn_mask=mask)


@torch.no_grad()
def target_pass(target: Decoder, batch: Batch, tap_ids: Sequence[int], backend: str) -> tuple[Tensor, Tensor]:
    """Final hidden [N*S, H] and taps [N*S, X] of packed rows, from the frozen target."""
    rows, length = batch.ids.shape
    mask = build_mask(target_mask(batch), rows, length, length, batch.ids.device, backend)

    def attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q_TND, k_TKD, v_TKD))
        return attention(q, k, v, mask, backend).transpose(1, 2).flatten(0, 1)

    hidden, taps = target(batch.ids.flatten(), batch.position.flatten(), Apart(attend), tap_ids)
    assert taps is not None
    return hidden, taps


def draft_pass(
    drafter: DFlash, embed_weight_VH: Tensor, taps_TX: Tensor, batch: Batch, blocks: Blocks, backend: str
) -> Tensor:
    """Hidden states [N, A, num_drafts, H] that predict the blocks' tokens, all rows and anchors at once."""
    config = drafter.config
    rows, length = batch.ids.shape
    queries = blocks.position[0].numel()
    keys, values = drafter.context_kv(drafter.context_feature(taps_TX), batch.position.flatten())
    keys = keys.unflatten(1, (rows, length)).transpose(2, 3)
    values = values.unflatten(1, (rows, length)).transpose(2, 3)
    masks = {
        kind: build_mask(draft_mask(batch, blocks, *kind), rows, queries, length + queries, taps_TX.device, backend)
        for kind in set(zip(config.windows, config.causal, strict=True))
    }

    def attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, queries)).transpose(1, 2) for x in (q_TND, k_TKD, v_TKD))
        k, v = torch.cat((keys[layer], k), 2), torch.cat((values[layer], v), 2)
        mask = masks[config.windows[layer], config.causal[layer]]
        return attention(q, k, v, mask, backend).transpose(1, 2).flatten(0, 1)

    x_TH = drafter.block_embeddings(embed_weight_VH, blocks.token.flatten(), config.block_size)
    hidden = drafter(x_TH, blocks.position.flatten(), Apart(attend))
    return hidden.unflatten(0, (rows, -1, config.block_size))[:, :, config.first_prediction :]


@dataclass(frozen=True)
class HeadShape:
    """What lies between the bare head product and the drafter's logits, and how soft the labels are."""

    multiplier: float = 1.0
    softcap: float | None = None
    soft_labels: float = 0.0


def _head_chunk(
    h_CH: Tensor, head_VH: Tensor, label_C: Tensor, weight_C: Tensor, teacher_CH: Tensor | None, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, gradient towards h, and hits (label is an argmax) of one chunk.

    The gradient is formed here, beside the loss: one head product less than recomputing it in backward, and nothing
    of size V outlives the chunk.
    """
    logits = F.linear(h_CH, head_VH).float() * shape.multiplier
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    top = logits.amax(-1, keepdim=True)
    normaliser = top + (logits - top).exp().sum(-1, keepdim=True).log()
    picked = logits.gather(-1, label_C[:, None])
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    aim = torch.where(vocabulary == label_C[:, None], 1.0 - shape.soft_labels, 0.0)
    loss_C = normaliser - (1.0 - shape.soft_labels) * picked
    if teacher_CH is not None:
        teacher = F.linear(teacher_CH, head_VH).float().softmax(-1)
        loss_C = loss_C - shape.soft_labels * (teacher * logits).sum(-1, keepdim=True)
        aim = aim + shape.soft_labels * teacher
    slope = ((logits - normaliser).exp() - aim) * weight_C[:, None]
    if shape.softcap is not None:
        slope = slope * (1.0 - (logits / shape.softcap).square())
    grad_CH = (slope * shape.multiplier).to(h_CH.dtype) @ head_VH
    return (loss_C[:, 0] * weight_C).sum(), grad_CH, (picked >= top)[:, 0]


class _HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy through the frozen head; backward only scales what forward prepared."""

    @staticmethod
    def forward(
        ctx: Any,
        h_PH: Tensor,
        head_VH: Tensor,
        label_P: Tensor,
        weight_P: Tensor,
        teacher_PH: Tensor | None,
        shape: HeadShape,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        function = _compiled("head") if compiled else _head_chunk
        grad_PH, hit_P = torch.empty_like(h_PH), torch.empty_like(label_P, dtype=torch.bool)
        total = torch.zeros((), dtype=torch.float32, device=h_PH.device)
        for first in range(0, h_PH.shape[0], chunk):
            part = slice(first, first + chunk)
            teacher = None if teacher_PH is None else teacher_PH[part]
            loss, grad_PH[part], hit_P[part] = function(
                h_PH[part], head_VH, label_P[part], weight_P[part], teacher, shape
            )
            total += loss
        ctx.save_for_backward(grad_PH)
        ctx.mark_non_differentiable(hit_P)
        return total, hit_P

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_PH,) = ctx.saved_tensors
        return (grad_PH * grads[0].to(grad_PH.dtype), *([None] * 7))


def head_loss(
    h_PH: Tensor,
    head_VH: Tensor,
    label_P: Tensor,
    weight_P: Tensor,
    shape: HeadShape,
    *,
    teacher_PH: Tensor | None = None,
    chunk: int = 4096,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum of weight * cross-entropy (float32 scalar) and hits [P] (the label is an argmax).

    With `teacher_PH` (the target's hidden states that predict the same tokens) the label is mixed with the target's
    own distribution by `shape.soft_labels`. Chunks are of equal size: the last is padded with weight 0.
    """
    extra = -h_PH.shape[0] % min(chunk, h_PH.shape[0])
    chunk = min(chunk, h_PH.shape[0])
    if extra:
        h_PH, label_P, weight_P = F.pad(h_PH, (0, 0, 0, extra)), F.pad(label_P, (0, extra)), F.pad(weight_P, (0, extra))
        teacher_PH = None if teacher_PH is None else F.pad(teacher_PH, (0, 0, 0, extra))
    total, hit = _HeadLoss.apply(h_PH, head_VH, label_P, weight_P, teacher_PH, shape, chunk, compiled)
    return total, hit[: hit.shape[0] - extra]


def step_loss(
    drafter: DFlash,
    target: Decoder,
    batch: Batch,
    blocks: Blocks,
    *,
    backend: str,
    chunk: int = 4096,
    soft_labels: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weighted mean loss of a batch (scalar) and the share of right first choices per drafted position [num_drafts]."""
    hidden_TH, taps_TX = target_pass(target, batch, drafter.config.target_layer_ids, backend)
    h_PH = draft_pass(drafter, target.embed.weight, taps_TX, batch, blocks, backend).flatten(0, 2)
    teacher = None
    if soft_labels:
        length = batch.ids.shape[1]
        row = torch.arange(batch.ids.shape[0], device=batch.ids.device)[:, None, None] * length
        teacher = hidden_TH[(row + blocks.place - 1).flatten()]
    shape = HeadShape(drafter.config.output_multiplier, drafter.config.final_logit_softcapping, soft_labels)
    weight = blocks.weight / blocks.weight.sum().clamp(min=1e-6)
    loss, hit = head_loss(
        h_PH,
        target.head_weight,
        blocks.label.flatten(),
        weight.flatten(),
        shape,
        teacher_PH=teacher,
        chunk=chunk,
        compiled=backend == "flex",
    )
    real = blocks.weight > 0
    hits = (hit.view_as(real) & real).sum((0, 1)) / real.sum((0, 1)).clamp(min=1)
    return loss, hits


@torch.no_grad()
def rank_drafts(
    drafter: DFlash, target: Decoder, taps_TX: Tensor, batch: Batch, blocks: Blocks, cap: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of every block for offline evaluation: (ids, log-probabilities) [N, A, num_drafts, cap] and the rank
    of the true token [N, A, num_drafts] (0 = first choice)."""
    h_NADH = draft_pass(drafter, target.embed.weight, taps_TX, batch, blocks, backend)
    flat, label = h_NADH.flatten(0, 2), blocks.label.flatten()
    ids, scores, ranks = [], [], []
    for first in range(0, flat.shape[0], 2048):
        logits = drafter.shape_logits(float_product(flat[first : first + 2048], target.head_weight))
        picked = logits.gather(-1, label[first : first + 2048, None])
        ranks.append((logits > picked).sum(-1))
        score, token = (logits - logits.logsumexp(-1, keepdim=True)).topk(cap, dim=-1)
        ids.append(token)
        scores.append(score.clamp(max=0.0))
    shape = h_NADH.shape[:3]
    return torch.cat(ids).view(*shape, cap), torch.cat(scores).view(*shape, cap), torch.cat(ranks).view(shape)


def default_gamma(block_size: int) -> float:
    """The published decay: 7 at a block of 16, 4 at 8; in between and beyond by the same slope on log2."""
    return 7.0 if block_size == 16 else 4.0 if block_size == 8 else max(1.0, 4.0 + 3.0 * (math.log2(block_size) - 3.0))
