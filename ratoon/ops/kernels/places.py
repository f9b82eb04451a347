# Owns: the Triton twins of ops/places.py.
# Promises: one launch each; the same integers as the reference, and every element of a result is written.
# Never: follows a page entry outside a row's table, or reads a seat of the dummy row.
"""Slots and positions of a pass. R: rows, S: seats, P: pages of a row, T: places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.launch import launch

_BLOCK = 64
"""Places of one program, a chain of dependent loads each: few per program, so that chains run side by side."""


@triton.jit
def _slot(
    page_table, seat_T, position_T, live_T, PAGE_SIZE: tl.constexpr, NUM_PAGES: tl.constexpr, STRIDE: tl.constexpr
):
    """Slot of each position of a seat; page 0 past its table, slot 0 where not live."""
    column_T = position_T // PAGE_SIZE
    held_T = live_T & (column_T < NUM_PAGES)
    page_T = tl.load(page_table + seat_T * STRIDE + column_T, mask=held_T, other=0).to(tl.int64)
    return tl.where(live_T, page_T * PAGE_SIZE + position_T % PAGE_SIZE, 0)


@triton.jit(do_not_specialize=["num_places", "num_rows"])
def _tree_places(
    slot_T,
    position_T,
    seat_R,
    start_S,
    page_table_SP,
    row_of_T,
    local_T,
    depth_T,
    num_places,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = place < num_places
    row = tl.load(row_of_T + place, mask=inside, other=num_rows)
    local = tl.load(local_T + place, mask=inside, other=0)
    depth = tl.load(depth_T + place, mask=inside, other=0)
    live = row < num_rows
    seat = tl.load(seat_R + row, mask=live, other=0)
    start = tl.load(start_S + seat, mask=live, other=0)
    slot = _slot(page_table_SP, seat, start + local, live, PAGE_SIZE, NUM_PAGES, STRIDE)
    tl.store(slot_T + place, slot, mask=inside)
    tl.store(position_T + place, start + depth, mask=inside)


@triton.jit(do_not_specialize=["num_places", "width"])
def _block_places(
    slot_T,
    position_T,
    seat_R,
    start_S,
    page_table_SP,
    base_R,
    num_places,
    width,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = place < num_places
    row = place // width
    seat = tl.load(seat_R + row, mask=inside, other=0)
    if base_R is None:
        first = tl.load(start_S + seat, mask=inside, other=0)
    else:
        first = tl.load(base_R + row, mask=inside, other=0)
    position = first + place % width
    slot = _slot(page_table_SP, seat, position, inside, PAGE_SIZE, NUM_PAGES, STRIDE)
    tl.store(slot_T + place, slot, mask=inside)
    tl.store(position_T + place, position, mask=inside)


def _run(
    kernel: object, page_table_SP: Tensor, page_size: int, num_places: int, *args: object
) -> tuple[Tensor, Tensor]:
    """Launches over places; `args` follow the two results."""
    assert page_table_SP.stride(1) == 1
    slot_T, position_T = torch.empty(2, num_places, dtype=torch.int64, device=page_table_SP.device)
    launch(
        kernel,
        (-(-num_places // _BLOCK),),
        *(slot_T, position_T, *args),
        PAGE_SIZE=page_size,
        NUM_PAGES=page_table_SP.shape[1],
        STRIDE=page_table_SP.stride(0),
        BLOCK_T=_BLOCK,
        num_warps=2,
    )
    return slot_T, position_T


def tree_places(
    seat_R: Tensor,
    start_S: Tensor,
    page_table_SP: Tensor,
    page_size: int,
    row_of_T: Tensor,
    local_T: Tensor,
    depth_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ops/places.py."""
    num_places = row_of_T.shape[0]
    given = (seat_R, start_S, page_table_SP, row_of_T, local_T, depth_T, num_places, seat_R.shape[0])
    return _run(_tree_places, page_table_SP, page_size, num_places, *given)


def block_places(
    seat_R: Tensor,
    start_S: Tensor,
    page_table_SP: Tensor,
    page_size: int,
    width: int,
    base_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ops/places.py."""
    num_places = seat_R.shape[0] * width
    given = (seat_R, start_S, page_table_SP, base_R, num_places, width)
    return _run(_block_places, page_table_SP, page_size, num_places, *given)
