# Owns: Triton twins of ops/accept.py, and of the K/V move that follows it (ops/attention.py).
# Promises: one warp accepts a row; a row's old state is read before it is written, a moved slot before it is a target.
# Never: lets one program read what another one writes, or moves a slot onto itself.
"""Acceptance kernels. R: rows, T: places, D: places of a path, S: slots of a cache, E: elements of a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.accept import ID_KINDS, REAL_KINDS, SCALARS, AcceptedRows, Ring, Seats
from ratoon.ops.kernels.tree import pow2
from ratoon.ops.launch import launch
from ratoon.ops.sample import Draw
from ratoon.ops.tree import Places

_TILE = 8192
"""Elements that a program of `move` holds: 64 of each thread."""

_SCALARS = tl.constexpr(len(SCALARS))
_IDS = tl.constexpr(len(ID_KINDS))
_REALS = tl.constexpr(len(REAL_KINDS))


# ---- finite -----------------------------------------------------------------------------------------------


@triton.jit
def _finite(hidden, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(hidden + place * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    broken = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32))
    tl.store(out + place, broken == 0)


def finite_rows(hidden_TH: Tensor) -> Tensor:
    """Twin of ops/accept.py `finite_rows`: one program per place."""
    num_places, width = hidden_TH.shape
    finite_T = torch.empty(num_places, dtype=torch.bool, device=hidden_TH.device)
    block = pow2(width, 32)
    launch(_finite, (num_places,), hidden_TH.contiguous(), finite_T, WIDTH=width, BLOCK=block, num_warps=_warps(block))
    return finite_T


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 512))


# ---- accept -----------------------------------------------------------------------------------------------


@triton.jit
def _slot(table, position, mask, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Slot of each position by one row's page table; a position past the table lands on page 0."""
    column = position // PAGE_SIZE
    page = tl.load(table + column, mask=mask & (column < PAGES), other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def _keep(plain, ring, value, kind, row, place, num_rows, step, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """A path's values into the result tensor of its kind, and padded with zeros into the row's place of the ring."""
    tl.store(plain + (kind * num_rows + row) * WIDTH + step, value, mask=step < WIDTH)
    if DEPTH > 0:
        padded = tl.where(step < WIDTH, value, tl.zeros_like(value))
        tl.store(ring + place + kind * DEPTH + step, padded, mask=step < DEPTH)


@triton.jit(do_not_specialize=["num_rows", "ring_rows"])
def _accept(
    row_start, parent, node_token, choice, runner_up, third, edge_token, gap, top_logit, third_gap, edge_gap, finite,
    mass, seats, start, anchor, limit, done, stop_id, page_table, round_number,
    counts, flags, ids, reals, moves, ring_ints, ring_floats, num_rows, ring_rows,
    WIDTH: tl.constexpr, STOPS: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, MASSES: tl.constexpr,
    RING: tl.constexpr, DEPTH: tl.constexpr,
    SLOTS: tl.constexpr, STEPS: tl.constexpr, STOP_SLOTS: tl.constexpr, MASS_SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    begin, end = tl.load(row_start + row), tl.load(row_start + row + 1)
    old_start, old_done = tl.load(start + seat), tl.load(done + seat).to(tl.int32) != 0
    room = tl.load(limit + seat) - 1 - old_start
    number = tl.load(round_number)

    # Walk: at each node, the child that its parent drew.
    node = tl.arange(0, SLOTS)
    inside = (node > 0) & (node < end - begin)
    above = tl.load(parent + begin + node, mask=inside, other=0)
    drawn = tl.load(choice + above, mask=inside, other=-1)
    hit = inside & (drawn == tl.load(node_token + begin + node, mask=inside, other=-2))
    above = tl.where(hit, (above - begin).to(tl.int32), -1)
    step = tl.arange(0, STEPS)
    path = tl.zeros([STEPS], tl.int32)
    walked, last = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    child = tl.max(tl.where(above == last, node, 0))
    while (child > 0) & (walked < WIDTH - 1):
        walked += 1
        last = child
        path = tl.where(step == walked, last, path)
        child = tl.max(tl.where(above == last, node, 0))
    path = tl.where(step > walked, last, path).to(tl.int64)

    # Cut.
    on_path = step < WIDTH
    at = begin + path
    token = tl.load(choice + at, mask=on_path, other=-2)
    stop = tl.arange(0, STOP_SLOTS)
    stops = tl.load(stop_id + seat * STOPS + stop, mask=stop < STOPS, other=-1)
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(is_stop, step, WIDTH))
    emitted = tl.maximum(tl.minimum(tl.minimum(first_stop, walked) + 1, room), 0)
    emitted = tl.where(old_done, 0, emitted)
    new_done = old_done | (first_stop < emitted) | (emitted >= room)
    kept = on_path & (step < emitted)
    is_finite = tl.load(finite + at, mask=on_path, other=1).to(tl.int32) != 0
    bad = tl.max((~is_finite & (step < tl.maximum(emitted, 1))).to(tl.int32))
    accepted = tl.minimum(walked, tl.maximum(emitted - 1, 0))

    # Results.
    ring_place = (number % RING) * ring_rows + row
    ints_place = ring_place * (_SCALARS + _IDS * DEPTH)
    floats_place = ring_place * (_REALS * DEPTH + MASSES)
    tl.store(counts + row, emitted)
    tl.store(counts + num_rows + row, accepted)
    tl.store(flags + row, new_done)
    tl.store(flags + num_rows + row, bad != 0)
    if DEPTH > 0:
        tl.store(ring_ints + ints_place, number)
        tl.store(ring_ints + ints_place + 1, emitted)
        tl.store(ring_ints + ints_place + 2, accepted)
        tl.store(ring_ints + ints_place + 3, new_done.to(tl.int64))
        tl.store(ring_ints + ints_place + 4, bad.to(tl.int64))
        tl.store(ring_ints + ints_place + 5, end - begin - 1)
        size = tl.arange(0, MASS_SLOTS)
        masses = tl.load(mass + row * MASSES + size, mask=size < MASSES, other=0.0)
        tl.store(ring_floats + floats_place + _REALS * DEPTH + size, masses, mask=size < MASSES)
    ints_place += _SCALARS
    id_1 = tl.load(runner_up + at, mask=on_path, other=-1)
    id_2 = tl.load(third + at, mask=on_path, other=-1)
    id_3 = tl.load(edge_token + at, mask=on_path, other=-1)
    real_0 = tl.load(gap + at, mask=on_path, other=0.0)
    real_1 = tl.load(top_logit + at, mask=on_path, other=0.0)
    real_2 = tl.load(third_gap + at, mask=on_path, other=0.0)
    real_3 = tl.load(edge_gap + at, mask=on_path, other=0.0)
    _keep(ids, ring_ints, tl.where(kept, token, -1), 0, row, ints_place, num_rows, step, WIDTH, DEPTH)
    _keep(ids, ring_ints, tl.where(kept, id_1, -1), 1, row, ints_place, num_rows, step, WIDTH, DEPTH)
    _keep(ids, ring_ints, tl.where(kept, id_2, -1), 2, row, ints_place, num_rows, step, WIDTH, DEPTH)
    _keep(ids, ring_ints, tl.where(kept, id_3, -1), 3, row, ints_place, num_rows, step, WIDTH, DEPTH)
    _keep(reals, ring_floats, real_0, 0, row, floats_place, num_rows, step, WIDTH, DEPTH)
    _keep(reals, ring_floats, real_1, 1, row, floats_place, num_rows, step, WIDTH, DEPTH)
    _keep(reals, ring_floats, real_2, 2, row, floats_place, num_rows, step, WIDTH, DEPTH)
    _keep(reals, ring_floats, real_3, 3, row, floats_place, num_rows, step, WIDTH, DEPTH)

    # Slots.
    pages = page_table + seat * PAGES
    source = tl.where(kept, _slot(pages, old_start + path, kept, PAGES, PAGE_SIZE), 0)
    target = tl.where(kept, _slot(pages, old_start + step, kept, PAGES, PAGE_SIZE), 0)
    _keep(moves, moves, at, 0, row, 0, num_rows, step, WIDTH, 0)
    _keep(moves, moves, source, 1, row, 0, num_rows, step, WIDTH, 0)
    _keep(moves, moves, target, 2, row, 0, num_rows, step, WIDTH, 0)
    _keep(moves, moves, old_start + step, 3, row, 0, num_rows, step, WIDTH, 0)

    # Commit, behind a barrier: every thread has read the old state by then. Rows of the dummy seat, which is done,
    # all write what was there.
    tl.debug_barrier()
    final = tl.sum(tl.where(step == emitted - 1, token, 0))
    tl.store(start + seat, old_start + emitted)
    tl.store(anchor + seat, final, mask=emitted > 0)
    tl.store(done + seat, new_done)


def accept_rows(
    places: Places,
    draw: Draw,
    finite_T: Tensor,
    mass_RQ: Tensor,
    seats: Seats,
    seat_R: Tensor,
    depth_limit: int,
    page_size: int,
    ring: Ring | None = None,
) -> AcceptedRows:
    """Twin of ops/accept.py `accept_rows`: one launch, one warp per row, and the count of rounds after it."""
    num_rows, num_places, width = seat_R.shape[0], places.token.shape[0], depth_limit + 1
    depth, masses = (ring.depth, mass_RQ.shape[1]) if ring else (0, 0)
    counts = seat_R.new_empty((2, num_rows))
    flags = torch.empty((2, num_rows), dtype=torch.bool, device=seat_R.device)
    ids, moves = seat_R.new_empty((2, 4, num_rows, width)).unbind(0)
    reals = draw.gap_T.new_empty((4, num_rows, width))
    stop_ids, page_table = seats.stop_id_SE, seats.page_table_SP
    ids_T = (draw.token_T, draw.runner_up_T, draw.third_T, draw.edge_token_T)
    reals_T = (draw.gap_T, draw.top_logit_T, draw.third_gap_T, draw.edge_gap_T)
    # Nodes of a row have a bit each, and every other row has a root.
    most = min(64 * places.bits.shape[1], num_places - num_rows + 1)
    launch(
        _accept,
        (num_rows,),
        *(places.row_start, places.parent, places.token),
        *(each.contiguous() for each in (*ids_T, *reals_T, finite_T, mass_RQ, seat_R)),
        *(seats.start_S, seats.anchor_S, seats.limit_S, seats.done_S, stop_ids, page_table, seats.round_number),
        *(counts, flags, ids, reals, moves, ring.ints if ring else ids, ring.floats if ring else reals),
        *(num_rows, ring.ints.shape[1] if ring else 0),
        WIDTH=width,
        STOPS=stop_ids.shape[1],
        PAGES=page_table.shape[1],
        PAGE_SIZE=page_size,
        MASSES=masses,
        RING=ring.ints.shape[0] if ring else 1,
        DEPTH=depth,
        # Whole warps, so that a step's reduction is one instruction.
        SLOTS=pow2(most, 32),
        STEPS=pow2(max(width, depth), 16),
        STOP_SLOTS=pow2(stop_ids.shape[1], 2),
        MASS_SLOTS=pow2(masses, 2),
        num_warps=1,
    )
    # In the launch, one row could count the round before another one has read its number.
    seats.round_number.add_(1)
    return AcceptedRows(*counts.unbind(0), *flags.unbind(0), *ids.unbind(0), *reals.unbind(0), *moves.unbind(0))


# ---- move -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_slots"])
def _move(
    cache, sources, targets, num_slots,
    WIDTH: tl.constexpr, ELEMENTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    step = tl.arange(0, STEPS)
    source = tl.load(sources + row * WIDTH + step, mask=step < WIDTH, other=0)
    target = tl.load(targets + row * WIDTH + step, mask=step < WIDTH, other=0)
    moved = (target != 0) & (target != source)
    if tl.max(moved.to(tl.int32)) > 0:
        element = part * BLOCK + tl.arange(0, BLOCK)
        mask = moved[:, None] & (element < ELEMENTS)[None, :]
        whole = cache + layer * num_slots * ELEMENTS + element[None, :]
        values = tl.load(whole + source[:, None] * ELEMENTS, mask=mask)
        # A target may be the source of a later place of the row, in another warp's hands.
        tl.debug_barrier()
        tl.store(whole + target[:, None] * ELEMENTS, values, mask=mask)


def move(cache: Tensor, source_RD: Tensor, target_RD: Tensor) -> None:
    """Copies slots over all layers of cache [layers, S, 2, K, D], contiguous: all of a row are read before any is
    written. source, target int64 [R, D]: target 0 is not kept; no slot of one row may be a target of another."""
    layers, num_slots = cache.shape[:2]
    num_rows, width = source_RD.shape
    elements = cache[0, 0].numel()
    steps = pow2(width, 2)
    block = min(pow2(elements), max(_TILE // steps, 32))
    launch(
        _move,
        (num_rows, layers, -(-elements // block)),
        *(cache, source_RD.contiguous(), target_RD.contiguous(), num_slots),
        WIDTH=width,
        ELEMENTS=elements,
        STEPS=steps,
        BLOCK=block,
        num_warps=4,
    )
