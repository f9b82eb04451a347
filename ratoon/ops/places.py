# Owns: slot and position of every place of a pass, from seats, starts and page tables.
# Promises: a dummy place and a place past its page table get a slot of page 0; tables and starts stay on the device.
# Never: reads a value on the host, or knows what a place sees (ops/attention.py does).
"""Places of a pass. R: rows, S: seats, P: pages of a row, T: packed places.

A row's places are stored side by side from its start on, so that a tree's siblings have slots of their own, while
their RoPE positions are start + depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.ops.attention import slots
from ratoon.ops.launch import wants_kernel


def tree_places(
    seat_R: Tensor,
    start_S: Tensor,
    page_table_SP: Tensor,
    page_size: int,
    row_of_T: Tensor,
    local_T: Tensor,
    depth_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """(slot, position), int64 [T], of packed trees: row_of R marks a dummy place, which gets (0, its depth).

    seat int64 [R], start int64 [S], page_table int32 [S, P]; row_of, local and depth int64 [T].
    """
    if wants_kernel(row_of_T):
        from ratoon.ops.kernels import places

        return places.tree_places(seat_R, start_S, page_table_SP, page_size, row_of_T, local_T, depth_T)
    num_rows = seat_R.shape[0]
    dummy_T = row_of_T >= num_rows
    seat_T = seat_R[row_of_T.clamp(max=num_rows - 1)]
    start_T = torch.where(dummy_T, 0, start_S[seat_T])
    slot_T = slots(page_table_SP, seat_T, start_T + local_T, page_size)
    return torch.where(dummy_T, 0, slot_T), start_T + depth_T


def block_places(
    seat_R: Tensor,
    start_S: Tensor,
    page_table_SP: Tensor,
    page_size: int,
    width: int,
    base_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(slot, position), int64 [R * width], of `width` places per row: from base_R int64 [R] on, else from its start."""
    if wants_kernel(seat_R):
        from ratoon.ops.kernels import places

        return places.block_places(seat_R, start_S, page_table_SP, page_size, width, base_R)
    first_R = start_S[seat_R] if base_R is None else base_R
    position_T = (first_R[:, None] + torch.arange(width, device=seat_R.device)).flatten()
    seat_T = seat_R.repeat_interleave(width)
    return slots(page_table_SP, seat_T, position_T, page_size), position_T
