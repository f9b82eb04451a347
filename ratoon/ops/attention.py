# Owns: attention of packed places over paged K/V: where they are stored, what each place sees.
# Promises: page tables, lengths and trees are read on the device; sizes come from shapes and the given ints alone.
# Never: reads a value on the host, or lets a dummy place read or write beyond page 0.
"""Paged attention, torch reference. T: packed places, R: rows, N: places of a row (most), C: context slots,
P: pages of a row, H: query heads, K: key/value heads, D: head dim, S: slots, W: words of ancestor bits.

A cache of one layer is [S, 2, K, D]: slot-major with the key before its value, so that one copy moves both and
a page is one contiguous piece. Places of a row are stored at consecutive slots from the row's `base` on; a tree's
siblings therefore have slots of their own while they share a RoPE position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.launch import wants_kernel

NUM_COUNTERS = 1024
"""Tiles times K/V heads that one attention kernel may count while its ranges of keys come in."""


@dataclass(frozen=True)
class Layout:
    """Where a pass stores its places and reads its context; made once, used by every layer.

    slot_T: slot of each place (dummy places: page 0). page_RP: pages that hold slots 0..C-1 of a row. end_R: slots
    of a row that hold anything: what lies beyond is never read, be it NaN (None: C is the end of every row).
    place_RN: packed place at (row, local), the last one repeated; rect_T: its inverse, row * N + local, 0 for a
    dummy; dummy_T: places of the dummy row. All three are None where the places are an R x N rectangle.
    first_slot: set where one row's pages are neighbours and C ends with its last place: its cache is then read and
    written in place, without a copy of every page in every layer.
    """

    slot_T: Tensor
    page_RP: Tensor
    end_R: Tensor | None
    place_RN: Tensor | None
    rect_T: Tensor | None
    dummy_T: Tensor | None
    num_rows: int
    first_slot: int | None = None


def packed_layout(
    row_start: Tensor, row_of_T: Tensor, local_T: Tensor, base_R: Tensor, page_RP: Tensor, page_size: int, width: int
) -> Layout:
    """Layout of packed places: row_start int64 [R + 2], row_of and local int64 [T], width N >= places of any row."""
    num_rows = base_R.shape[0]
    dummy_T = row_of_T >= num_rows
    row_T = torch.where(dummy_T, 0, row_of_T)
    local_T = torch.where(dummy_T, 0, local_T)
    slot_T = slots(page_RP, row_T, base_R[row_T] + local_T, page_size)
    count_R = row_start[1 : num_rows + 1] - row_start[:num_rows]
    column_N = torch.arange(width, device=row_of_T.device)
    place_RN = row_start[:num_rows, None] + torch.minimum(column_N, count_R[:, None] - 1)
    rect_T = torch.where(dummy_T, 0, row_T * width + local_T)
    slot_T = torch.where(dummy_T, 0, slot_T)
    return Layout(slot_T, page_RP, base_R + count_R, place_RN, rect_T, dummy_T, num_rows)


def block_layout(
    base_R: Tensor, page_RP: Tensor, page_size: int, width: int, exact: bool = False, first_slot: int | None = None
) -> Layout:
    """Layout of `width` consecutive places per row, row-major: a draft block, a chain or a prefill chunk.

    exact: there is one row and the context ends with its last place, so nothing lies beyond.
    """
    num_rows = base_R.shape[0]
    row_T = torch.arange(num_rows, device=base_R.device).repeat_interleave(width)
    local_RN = base_R[:, None] + torch.arange(width, device=base_R.device)
    slot_T = slots(page_RP, row_T, local_RN.flatten(), page_size)
    return Layout(slot_T, page_RP, None if exact else base_R + width, None, None, None, num_rows, first_slot)


def slots(page_RP: Tensor, row_T: Tensor, position_T: Tensor, page_size: int) -> Tensor:
    """Slot of each (row, position), int64 [T]. A position past the table lands on page 0."""
    column_T = position_T // page_size
    inside_T = column_T < page_RP.shape[1]
    page_T = torch.where(inside_T, page_RP[row_T, torch.where(inside_T, column_T, 0)], 0)
    return page_T.to(torch.int64) * page_size + position_T % page_size


def tree_mask(layout: Layout, bits_TW: Tensor, base_R: Tensor, context: int) -> Tensor:
    """bool [R, N, C]: the whole prefix (slots below base), and ancestors-or-self among the row's own places."""
    bits_RNW = _rectangle(layout, bits_TW)
    width = bits_RNW.shape[1]
    node_J = torch.arange(width, device=base_R.device)
    word_RNJ = bits_RNW.index_select(2, node_J // 64)
    ancestor_RNJ = (word_RNJ >> (node_J % 64)) & 1
    relative_RC = torch.arange(context, device=base_R.device) - base_R[:, None]
    inside_RC = (relative_RC >= 0) & (relative_RC < width)
    index_R1C = torch.where(inside_RC, relative_RC, 0).unsqueeze(1).expand(-1, width, -1)
    seen_RNC = ancestor_RNJ.gather(2, index_R1C).to(torch.bool) & inside_RC.unsqueeze(1)
    return seen_RNC | (relative_RC < 0).unsqueeze(1)


def additive(mask_RNC: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The mask as 0 / -inf, [R, 1, group * N, C]: query heads of one K/V head are folded with the places."""
    num_rows, width, context = mask_RNC.shape
    bias = torch.zeros(mask_RNC.shape, dtype=dtype, device=mask_RNC.device).masked_fill_(~mask_RNC, -torch.inf)
    return bias.unsqueeze(1).expand(-1, group, -1, -1).reshape(num_rows, 1, group * width, context)


@dataclass(frozen=True)
class Span:
    """What the places of a pass belong to and may see; made once per pass, read by the kernels of every layer.

    seat_R int64 [R]. Slots below base are a row's prefix: base_S int64 [S] by seat, or base_R int64 [R] where given
    (prefill). page_table_SP int32 [S, P]. context: most slots that any row may hold, its own places included; width:
    most places of a row. Packed trees: row_start int64 [R + 2], depth_T int64 [T], bits_TW int64 [T, W]; all None
    for R rows of exactly `width` consecutive places (a draft block, a prefill chunk).
    """

    seat_R: Tensor
    base_S: Tensor
    base_R: Tensor | None
    page_table_SP: Tensor
    page_size: int
    context: int
    width: int
    row_start: Tensor | None = None
    depth_T: Tensor | None = None
    bits_TW: Tensor | None = None


def store(cache: Tensor, layout: Layout, kv_T2KD: Tensor) -> None:
    """Writes keys and values into a layer's cache [S, 2, K, D]. Slot 0 may be named twice: its content is nobody's."""
    cache.index_copy_(0, layout.slot_T, kv_T2KD)


def _read(cache: Tensor, layout: Layout, context: int, page_size: int) -> Tensor:
    """K/V of slots 0..C-1 of every row, [R, C, 2, K, D], finite beyond the rows' ends."""
    pages = cache.view(-1, page_size * cache[0].numel()).index_select(0, layout.page_RP.flatten())
    kv_RC2KD = pages.view(layout.num_rows, -1, *cache.shape[1:])[:, :context]
    if layout.end_R is None:
        return kv_RC2KD
    # A masked score has probability 0, but 0 * NaN is NaN: memory that nobody wrote must not reach the product.
    beyond_RC = torch.arange(context, device=cache.device) >= layout.end_R[:, None]
    return kv_RC2KD.masked_fill(beyond_RC[:, :, None, None, None], 0)


def paged_attention(
    q_THD: Tensor, cache: Tensor, v_THD: Tensor, layout: Layout, bias: Tensor, page_size: int
) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v over each row's pages, [T, H, D].

    cache [S, 2, K, D] already holds the places' own K/V; bias from `additive`. A dummy place sees itself alone,
    so its output is its own value (v_THD [T, K, D]).
    """
    kv_RC2KD = _read(cache, layout, bias.shape[3], page_size)
    k_RKCD, v_RKCD = kv_RC2KD[:, :, 0].transpose(1, 2), kv_RC2KD[:, :, 1].transpose(1, 2)
    out = attend_rows(_rectangle(layout, q_THD), k_RKCD, v_RKCD, bias).flatten(0, 1)
    if layout.rect_T is None or layout.dummy_T is None:
        return out
    own = v_THD.repeat_interleave(q_THD.shape[1] // cache.shape[2], dim=1)
    return torch.where(layout.dummy_T[:, None, None], own, out.index_select(0, layout.rect_T))


def attend_rows(q_RNHD: Tensor, k_RKCD: Tensor, v_RKCD: Tensor, bias: Tensor) -> Tensor:
    """Grouped attention of R rows of N places, [R, N, H, D]; a group's query heads are folded with the places."""
    num_rows, width, heads, head_dim = q_RNHD.shape
    kv_heads = k_RKCD.shape[1]
    if width == 1:
        q_RKGD = q_RNHD.view(num_rows, kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(q_RKGD, k_RKCD, v_RKCD, attn_mask=bias).view_as(q_RNHD)
    q_RKMD = q_RNHD.view(num_rows, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q_RKMD, k_RKCD, v_RKCD, attn_mask=bias)
    out = out.view(num_rows, kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_rows, width, heads, head_dim)


@dataclass(frozen=True)
class InPlace:
    """One row's cache as views of all layers, made once per pass: keys and values [1, K, C, D], and where the pass
    writes its own N places, [N, 2, K, D]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    own: tuple[Tensor, ...]


def in_place(cache: Tensor, first_slot: int, context: int, width: int) -> InPlace:
    """Views of cache [layers, S, 2, K, D] for a row whose slots 0..C-1 lie side by side from `first_slot` on."""
    kv_L2KCD = cache[:, first_slot : first_slot + context].permute(0, 2, 3, 1, 4).unsqueeze(2)
    own_LN2KD = cache[:, first_slot + context - width : first_slot + context]
    keys, values = (part.unbind(0) for part in kv_L2KCD.unbind(1))
    return InPlace(keys, values, own_LN2KD.unbind(0))


def _rectangle(layout: Layout, x: Tensor) -> Tensor:
    """[T, ...] as [R, N, ...]."""
    if layout.place_RN is None:
        return x.view(layout.num_rows, -1, *x.shape[1:])
    return x.index_select(0, layout.place_RN.flatten()).view(*layout.place_RN.shape, *x.shape[1:])


def move(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies slots over all layers of cache [layers, S, 2, K, D]: all are read before any is written.

    source, target: int64 slots of one shape, [R, D] where a row's slots are read and written by itself alone.
    """
    if source.dim() == 2 and wants_kernel(cache):
        from ratoon.ops.kernels import accept

        return accept.move(cache, source, target)
    cache.index_copy_(1, target.flatten(), cache.index_select(1, source.flatten()))
