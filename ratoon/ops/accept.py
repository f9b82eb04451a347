# Owns: how a round's draws become committed rows: walk, cut at stop and limit, results, slots of the K/V move, state.
# Promises: everything is computed from the rows' old state before that is overwritten; seat 0 never changes.
# Never: reads a value on the host, moves K/V, or counts tokens.
"""Acceptance of packed trees (METHOD section 3). R: rows, T: places, D: places of a path (deepest node + 1), S: seats,
E: stop ids, P: pages of a row, Q: forecast sizes, H: hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.attention import slots
from ratoon.ops.launch import wants_kernel
from ratoon.ops.sample import Draw
from ratoon.ops.tree import Places, walk

SCALARS = ("number", "emitted", "accepted", "done", "bad", "num_nodes")
ID_KINDS = ("tokens", "runner_up", "third", "edge_token")
REAL_KINDS = ("gap", "top_logit", "third_gap", "edge_gap")


class Seats(Protocol):
    """Seat-indexed state that acceptance reads and moves (spec/state.py `SeatState`).

    start, anchor, limit int64 [S]; done bool [S]; stop_id int64 [S, E], -1 pads; page_table int32 [S, P];
    round_number int64 [1].
    """

    @property
    def start_S(self) -> Tensor: ...
    @property
    def anchor_S(self) -> Tensor: ...
    @property
    def limit_S(self) -> Tensor: ...
    @property
    def done_S(self) -> Tensor: ...
    @property
    def stop_id_SE(self) -> Tensor: ...
    @property
    def page_table_SP(self) -> Tensor: ...
    @property
    def round_number(self) -> Tensor: ...


@dataclass(frozen=True)
class Ring:
    """Where results wait for the host, at place `round_number mod N`.

    ints int64 [N, rows, len(SCALARS) + len(ID_KINDS) * depth], floats float32 [N, rows, len(REAL_KINDS) * depth + Q]:
    the scalars, then `depth` path places of each kind (zeros past the round's own D), then the forecast mass.
    Rows past the round's keep what they held.
    """

    ints: Tensor
    floats: Tensor
    depth: int


@dataclass(frozen=True)
class AcceptedRows:
    """Per row. emitted, accepted int64 [R]: tokens committed, and drafted nodes among them; done, bad bool [R]:
    `bad` says that a place whose draw counts had a hidden that is not finite.

    tokens, runner_up, third, edge_token int64 [R, D], -1 past the emitted ones; gap, top_logit, third_gap, edge_gap
    float32 [R, D], past the path's end those of its last place. path int64 [R, D]: places from the root down, the
    last accepted one repeated. Token d of the emitted ones has its K/V in slot source[r, d] and belongs in slot
    target[r, d], at `position`; both slots are 0 past the emitted ones. All int64 [R, D].
    """

    emitted_R: Tensor
    accepted_R: Tensor
    done_R: Tensor
    bad_R: Tensor
    tokens_RD: Tensor
    runner_up_RD: Tensor
    third_RD: Tensor
    edge_token_RD: Tensor
    gap_RD: Tensor
    top_logit_RD: Tensor
    third_gap_RD: Tensor
    edge_gap_RD: Tensor
    path_RD: Tensor
    source_RD: Tensor
    target_RD: Tensor
    position_RD: Tensor


def finite_rows(hidden_TH: Tensor) -> Tensor:
    """Whether a place's hidden has no NaN and no infinity, bool [T]."""
    if wants_kernel(hidden_TH):
        from ratoon.ops.kernels import accept as twin

        return twin.finite_rows(hidden_TH)
    return torch.isfinite(hidden_TH).all(dim=1)


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
    """Follows the draws down every row's tree, commits the rows and writes the ring's place of this round.

    finite bool [T] (`finite_rows`); mass float32 [R, Q], handed on; seat int64 [R], each once except seat 0, the
    dummy, which is done and emits nothing. No node is deeper than depth_limit = D - 1. Overwrites start, anchor and
    done of the rows' seats and counts the round.
    """
    if wants_kernel(draw.token_T):
        from ratoon.ops.kernels import accept as twin

        return twin.accept_rows(places, draw, finite_T, mass_RQ, seats, seat_R, depth_limit, page_size, ring)
    walked_R, path_RD, _ = walk(places, draw.token_T, depth_limit)
    # An accepted node's token is what its parent drew, so the draws along the path are the emitted tokens.
    drawn_KRD = torch.stack((draw.token_T, draw.runner_up_T, draw.third_T, draw.edge_token_T))[:, path_RD]
    real_KRD = torch.stack((draw.gap_T, draw.top_logit_T, draw.third_gap_T, draw.edge_gap_T))[:, path_RD]
    emitted_R, done_R = _cut(seats, seat_R, drawn_KRD[0], walked_R)
    step_D = torch.arange(depth_limit + 1, device=seat_R.device)
    kept_RD = step_D < emitted_R[:, None]
    counts_RD = step_D < emitted_R.clamp(min=1)[:, None]
    id_KRD = torch.where(kept_RD, drawn_KRD, -1)
    # A cut at a stop or at the limit keeps the drafted nodes before it, and its last token counts as drawn.
    accepted_R = torch.minimum(walked_R, (emitted_R - 1).clamp(min=0))
    bad_R = (counts_RD & (finite_T[path_RD] == 0)).any(1)
    moves = _move_slots(places, seats, seat_R, path_RD, kept_RD, page_size)
    counts = (emitted_R, accepted_R, done_R, bad_R)
    columns = (*counts, *id_KRD.unbind(0), *real_KRD.unbind(0), path_RD, *moves)
    rows = AcceptedRows(*columns)
    if ring is not None:
        num_nodes_R = places.row_start[1 : len(seat_R) + 1] - places.row_start[: len(seat_R)] - 1
        _write(ring, (*counts, num_nodes_R), id_KRD, real_KRD, mass_RQ, seats.round_number)
    _commit(seats, seat_R, rows)
    return rows


def _cut(seats: Seats, seat_R: Tensor, token_RD: Tensor, walked_R: Tensor) -> tuple[Tensor, Tensor]:
    """(emitted, done): a stop token is the last one emitted, nothing goes past the limit, a done row emits none."""
    width = token_RD.shape[1]
    step_D = torch.arange(width, device=token_RD.device)
    stops_RD = (token_RD[:, :, None] == seats.stop_id_SE[seat_R][:, None, :]).any(-1)
    first_stop_R = torch.where(stops_RD, step_D, width).amin(1)
    room_R = seats.limit_S[seat_R] - 1 - seats.start_S[seat_R]
    emitted_R = torch.minimum(torch.minimum(first_stop_R, walked_R) + 1, room_R).clamp(min=0)
    emitted_R = torch.where(seats.done_S[seat_R], 0, emitted_R)
    return emitted_R, seats.done_S[seat_R] | (first_stop_R < emitted_R) | (emitted_R >= room_R)


def _move_slots(
    places: Places, seats: Seats, seat_R: Tensor, path_RD: Tensor, kept_RD: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(source slot, target slot, target position) of every path place."""
    num_rows, width = path_RD.shape
    start_R1, page_RP = seats.start_S[seat_R].unsqueeze(1), seats.page_table_SP[seat_R]
    row_N = torch.arange(num_rows, device=path_RD.device).repeat_interleave(width)
    position_RD = start_R1 + torch.arange(width, device=path_RD.device)
    scattered_RD = start_R1 + places.local[path_RD]
    source_RD, target_RD = (
        torch.where(kept_RD, slots(page_RP, row_N, position.flatten(), page_size).view_as(path_RD), 0)
        for position in (scattered_RD, position_RD)
    )
    return source_RD, target_RD, position_RD


def _write(
    ring: Ring, counts: tuple[Tensor, ...], id_KRD: Tensor, real_KRD: Tensor, mass_RQ: Tensor, number: Tensor
) -> None:
    num_rows, width = id_KRD.shape[1:]
    scalars_R6 = torch.stack((number.expand(num_rows), *(count.to(torch.int64) for count in counts)), dim=1)
    ids, reals = (F.pad(x_KRD.transpose(0, 1), (0, ring.depth - width)).flatten(1) for x_KRD in (id_KRD, real_KRD))
    place = number % ring.ints.shape[0]
    ring.ints[:, :num_rows].index_copy_(0, place, torch.cat((scalars_R6, ids), dim=1).unsqueeze(0))
    ring.floats[:, :num_rows].index_copy_(0, place, torch.cat((reals, mass_RQ), dim=1).unsqueeze(0))


def _commit(seats: Seats, seat_R: Tensor, rows: AcceptedRows) -> None:
    """The dummy seat emits nothing and is done already."""
    emitted_R = rows.emitted_R
    last_R = rows.tokens_RD.gather(1, (emitted_R - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    anchor_R = torch.where(emitted_R > 0, last_R, seats.anchor_S[seat_R])
    seats.start_S.index_copy_(0, seat_R, seats.start_S[seat_R] + emitted_R)
    seats.anchor_S.index_copy_(0, seat_R, anchor_R)
    seats.done_S.index_copy_(0, seat_R, rows.done_R)
    seats.round_number.add_(1)
