# Owns: where the places of a pass lie (slots, positions) and what they see: verify, draft block, prefill chunk.
# Promises: a kernel pass reads no host value and makes no mask; a reference pass is the same pass by dense masks.
# Never: runs a network, or moves a row.
"""Passes over the paged caches. R: rows, N: places of a row, T: places, C: context slots, S: seats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.core.drafter import DrafterConfig
from ratoon.models.dflash import visible
from ratoon.models.layers import Attend
from ratoon.ops.attention import Layout, Span, additive, block_layout, packed_layout, tree_mask
from ratoon.ops.launch import wants_kernel
from ratoon.ops.places import block_places, tree_places
from ratoon.ops.tree import Places
from ratoon.spec.paged import KernelAttend, LoneAttend, PagedAttend
from ratoon.spec.state import Limits, RoundShape, SeatState


@dataclass(frozen=True)
class Pass:
    """Positions of the places and slots of their K/V, int64 [T], and how they attend."""

    position_T: Tensor
    slot_T: Tensor
    attend: Attend


class Passes:
    """Makes the passes of one engine. group: query heads per K/V head of the target."""

    def __init__(self, state: SeatState, limits: Limits, group: int, drafter: DrafterConfig | None) -> None:
        self.state, self.limits, self.group, self.drafter = state, limits, group, drafter

    # ---- the three passes -------------------------------------------------------------------------------------

    def verify(self, cache: Tensor, seat_R: Tensor, places: Places, shape: RoundShape) -> Pass:
        """The packed places of all rows: each sees its row's prefix and its ancestors."""
        state = self.state
        width = min(shape.nodes, places.token.shape[0] - shape.rows) + 1
        if wants_kernel(cache):
            slot_T, position_T = tree_places(
                seat_R, state.start_S, state.page_table_SP, self.limits.page_size,
                places.row_of, places.local, places.depth,
            )  # fmt: skip
            span = self._span(seat_R, None, width, places)
            return self._kernel_pass(cache, position_T, slot_T, span, (None,), (True,))
        start_R = state.start_S[seat_R]
        context = self._context(start_R, width, shape.live)
        if shape.live and shape.rows == width == 1 and cache.dtype == torch.float32:
            first_slot = self._first_slot(seat_R, context)
            if first_slot is not None:
                return Pass(start_R, start_R + first_slot, LoneAttend(cache, first_slot, context))
        layout = self._verify_layout(seat_R, places, start_R, context, width, shape)
        row_T = places.row_of.clamp(max=shape.rows - 1)
        position_T = torch.where(places.row_of < shape.rows, start_R[row_T], 0) + places.depth
        return self._masked_pass(cache, position_T, layout, tree_mask(layout, places.bits, start_R, context))

    def block(self, cache: Tensor, seat_R: Tensor, shape: RoundShape) -> Pass:
        """A draft block per row, at start .. start + B - 1: each layer sees by its own window and causality."""
        assert self.drafter is not None
        state, config, block = self.state, self.drafter, shape.block
        if wants_kernel(cache):
            slot_T, position_T = block_places(seat_R, state.start_S, state.page_table_SP, self.limits.page_size, block)
            span = self._span(seat_R, None, block)
            return self._kernel_pass(cache, position_T, slot_T, span, config.windows, config.causal)
        start_R = state.start_S[seat_R]
        context = self._context(start_R, block, shape.live)
        layout = self._block_layout(seat_R, start_R, context, block, shape.live and shape.rows == 1)
        position_RB = start_R[:, None] + torch.arange(block, device=start_R.device)
        attend = PagedAttend(cache, layout, self._block_bias(position_RB, context, cache.dtype), self.limits.page_size)
        return Pass(position_RB.flatten(), layout.slot_T, attend)

    def chunk(self, cache: Tensor, seat_R: Tensor, base_R: Tensor, width: int, context: int) -> Pass:
        """`width` prompt places per row from position base_R on, causal. context: slots to read."""
        state, page_size = self.state, self.limits.page_size
        if wants_kernel(cache):
            slot_T, position_T = block_places(seat_R, state.start_S, state.page_table_SP, page_size, width, base_R)
            span = self._span(seat_R, base_R, width)
            return self._kernel_pass(cache, position_T, slot_T, span, (None,), (True,))
        position_RN = base_R[:, None] + torch.arange(width, device=base_R.device)
        layout = block_layout(base_R, self._pages(seat_R, context), page_size, width)
        seen_RNC = torch.arange(context, device=base_R.device) <= position_RN[:, :, None]
        return self._masked_pass(cache, position_RN.flatten(), layout, seen_RNC)

    # ---- by kernels -------------------------------------------------------------------------------------------

    def _span(self, seat_R: Tensor, base_R: Tensor | None, width: int, places: Places | None = None) -> Span:
        state, limits = self.state, self.limits
        span = Span(seat_R, state.start_S, base_R, state.page_table_SP, limits.page_size, limits.context, width)
        if places is None:
            return span
        return Span(
            *(span.seat_R, span.base_S, span.base_R, span.page_table_SP, span.page_size, span.context, span.width),
            row_start=places.row_start,
            depth_T=places.depth,
            bits_TW=places.bits,
        )

    def _kernel_pass(
        self,
        cache: Tensor,
        position_T: Tensor,
        slot_T: Tensor,
        span: Span,
        windows: tuple[int | None, ...],
        causal: tuple[bool, ...],
    ) -> Pass:
        """One entry of windows and causal serves all layers."""
        layers = cache.shape[0]
        spread = layers if len(windows) == 1 else 1
        counters = self.state.attend_counters
        attend = KernelAttend(cache, span, slot_T, windows * spread, causal * spread, counters)
        return Pass(position_T, slot_T, attend)

    # ---- by masks ---------------------------------------------------------------------------------------------

    def _masked_pass(self, cache: Tensor, position_T: Tensor, layout: Layout, seen_RNC: Tensor) -> Pass:
        bias = additive(seen_RNC, self.group, cache.dtype)
        attend = PagedAttend(cache, layout, [bias] * cache.shape[0], self.limits.page_size)
        return Pass(position_T, layout.slot_T, attend)

    def _verify_layout(
        self, seat_R: Tensor, places: Places, start_R: Tensor, context: int, width: int, shape: RoundShape
    ) -> Layout:
        alone = shape.live and shape.rows == 1
        if places.token.shape[0] == shape.rows * width and (width == 1 or alone):
            return self._block_layout(seat_R, start_R, context, width, alone)
        page_RP, page_size = self._pages(seat_R, context), self.limits.page_size
        return packed_layout(places.row_start, places.row_of, places.local, start_R, page_RP, page_size, width)

    def _block_layout(self, seat_R: Tensor, start_R: Tensor, context: int, width: int, alone: bool) -> Layout:
        """alone: one row, whose context ends with its last place."""
        first_slot = self._first_slot(seat_R, context) if alone else None
        return block_layout(start_R, self._pages(seat_R, context), self.limits.page_size, width, alone, first_slot)

    def _first_slot(self, seat_R: Tensor, context: int) -> int | None:
        """Where a lone row's cache begins, if its pages are neighbours."""
        pages = self._pages(seat_R, context)[0].tolist()
        together = pages == list(range(pages[0], pages[0] + len(pages)))
        return pages[0] * self.limits.page_size if together else None

    def _block_bias(self, position_RB: Tensor, context: int, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks of the draft layers; layers of one kind share theirs."""
        assert self.drafter is not None
        config = self.drafter
        key_C = torch.arange(context, device=position_RB.device)
        inside_R1C = (key_C <= position_RB[:, -1:]).unsqueeze(1)
        group = config.num_heads // config.num_kv_heads
        kinds = list(zip(config.windows, config.causal, strict=True))
        bias = {
            kind: additive(visible(position_RB.unsqueeze(2), key_C, *kind) & inside_R1C, group, dtype)
            for kind in dict.fromkeys(kinds)
        }
        return [bias[kind] for kind in kinds]

    def _context(self, start_R: Tensor, width: int, live: bool) -> int:
        """Slots that a pass reads: the engine's most, or in a live round just enough for its longest row."""
        if not live:
            return self.limits.context
        return int(start_R.max()) + width

    def _pages(self, seat_R: Tensor, context: int) -> Tensor:
        return self.state.page_table_SP[seat_R, : -(-context // self.limits.page_size)]
