# Owns: where top-k, top-p and min-p cut a row, found by kernels.
# Promises: the same cuts as ops/filters.py: integer sums that no order changes, ties by lower id.
# Never: sorts, or holds anything of places x vocabulary.
"""Cuts of scaled logits. T: places, V: vocabulary, S: programs per row.

What a filter keeps is a prefix by value and then lower id: all keys above a cut, and of the keys equal to it those
up to an id. The cut is the least key at which a weight (1 for top-k, the mass for top-p) summed over that key and
all above reaches what is needed. Each pass splits the range of keys that it lies in into 16, so 8 passes find it.

A range, int64 [8] per place and pass: first key, key after the last, weight above the range, weight from the first
key on, weight needed (0: not yet known), key of the largest scaled logit, then of top-k: the cut, how many of its
ties stay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.kernels.order import LOW, TILE, sortable, value_of
from ratoon.ops.launch import launch
from ratoon.ops.penalties import SamplerState

_PASSES = 8
_TIE_TILE = 4096
_END = tl.constexpr(2**31)


@triton.jit
def _begin(x_TV, top_TS, sum_XTQ, V: tl.constexpr, TILE: tl.constexpr, X: tl.constexpr):
    """Keys of the programs' largest logits; sums of all X passes to zero."""
    part, row = tl.program_id(0), tl.program_id(1)
    id_W = part * TILE + tl.arange(0, TILE)
    x_W = tl.load(x_TV + row.to(tl.int64) * V + id_W, mask=id_W < V, other=float("-inf"))
    tl.store(top_TS + row * tl.num_programs(0) + part, tl.max(sortable(x_W), axis=0))
    if part == 0:
        place_X1, q_1Q = tl.arange(0, X)[:, None] * tl.num_programs(1) + row, tl.arange(0, 16)[None, :]
        tl.store(sum_XTQ + place_X1 * 16 + q_1Q, tl.zeros([X, 16], tl.int64))


@triton.jit
def row_top(top_TS, row, PARTS: tl.constexpr, SP: tl.constexpr):
    """Key of a row's largest logit, from those of its programs."""
    part = tl.arange(0, SP)
    return tl.max(tl.load(top_TS + row * PARTS + part, mask=part < PARTS, other=LOW), axis=0)


@triton.jit
def mass(x, largest):
    """As ops/filters.py: unnormalised probability in integers, 2^44 for the largest."""
    return (tl.exp((x - largest).to(tl.float64)) * (2.0**44)).to(tl.int64)


@triton.jit
def needed(total, p):
    """Mass that top-p needs."""
    return tl.minimum(tl.ceil(total.to(tl.float64) * p).to(tl.int64), total)


@triton.jit
def min_p_edge(largest, min_p):
    """Key of the least scaled logit that min-p keeps."""
    distance = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0, sortable(largest + distance), LOW)


@triton.jit
def _load_range(range_T8, row):
    at = range_T8 + row * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _total_mass(range_T8, sum_TQ, row):
    """What top-p is a share of: its first pass sums all that is above top-k's cut; ties of the cut have one mass."""
    at = range_T8 + row * 8
    largest, cut, ties = tl.load(at + 5).to(tl.int32), tl.load(at + 6), tl.load(at + 7)
    tied = tl.where(cut > LOW, mass(value_of(cut.to(tl.int32)), value_of(largest)), 0)
    return tl.load(sum_TQ + row * 16) + ties * tied


@triton.jit
def _narrowed(low, high, above, reach, need, sum_TQ, row):
    """The sixteenth of a range that the cut lies in: first key, key after it, weights above it and from it on."""
    step = (high - low + 15) >> 4
    q = tl.arange(0, 16)
    reach_Q = above + tl.load(sum_TQ + row * 16 + q)
    hit = tl.sum(((q > 0) & (reach_Q >= need)).to(tl.int64), axis=0)
    reach = tl.where(hit > 0, tl.sum(tl.where(q == hit, reach_Q, 0), axis=0), reach)
    above = tl.where(hit < 15, tl.sum(tl.where(q == hit + 1, reach_Q, 0), axis=0), above)
    low += hit * step
    return low, tl.minimum(low + step, high), above, reach


@triton.jit
def _top_k_cut(range_T8, sum_TQ, row):
    """(cut, how many of its ties stay, how many there are); the cut is LOW where top-k is off."""
    low, high, above, reach, need = _load_range(range_T8, row)  # pyright: ignore[reportGeneralTypeIssues]
    low, high, above, reach = _narrowed(low, high, above, reach, need, sum_TQ, row)
    return low, need - above, reach - above


@triton.jit
def _sums(x_W, inside_W, low, high, largest, MASS: tl.constexpr, FIRST: tl.constexpr):
    """Weights from each of 16 keys of a range on, int64 [16]; the first counts from just above the range's start."""
    q = tl.arange(0, 16)
    key_W = sortable(x_W)
    live_W = inside_W & (key_W > low.to(tl.int32)) & (key_W.to(tl.int64) < high)
    sum_Q = tl.zeros([16], tl.int64)
    if tl.max(live_W.to(tl.int32), axis=0) > 0:
        weight_W = tl.where(live_W, mass(x_W, largest), 0) if MASS else live_W.to(tl.int32)
        step = (high - low + 15) >> 4
        for part in tl.static_range(0 if FIRST else 1, 16):
            start = tl.minimum(low + part * step, _END - 1).to(tl.int32)
            total = tl.sum(tl.where(key_W >= start, weight_W, 0), axis=0)
            sum_Q = tl.where(q == part, total.to(tl.int64), sum_Q)
    return sum_Q


@triton.jit
def _bisect(
    x_TV,
    seat_T,
    temperature_S,
    limit_S,
    top_TS,
    past_range_T8,
    past_sum_TQ,
    range_T8,
    sum_TQ,
    V: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    SP: tl.constexpr,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """One pass of top-k (MASS False) or top-p. The past of top-p's first pass is the end of top-k, if TOP_K."""
    part, row = tl.program_id(0), tl.program_id(1)
    seat = tl.load(seat_T + row)
    temperature = tl.load(temperature_S + seat)
    scale = tl.where(temperature > 0, temperature, 1.0)
    limit = tl.load(limit_S + seat)
    at = range_T8 + row * 8
    if FIRST:
        on = (temperature > 0) & ((limit < 1) if MASS else ((limit > 0) & (limit < V)))
        largest = sortable(tl.div_rn(value_of(row_top(top_TS, row, PARTS, SP)), scale)).to(tl.int64)
        cut, ties = tl.full([], LOW, tl.int64), tl.full([], 0, tl.int64)
        if TOP_K:
            cut, ties, _ = _top_k_cut(past_range_T8, past_sum_TQ, row)
        low, high, above = cut, tl.where(on, _END, cut + 1), tl.full([], 0, tl.int64)
        if MASS:
            reach, need = above, above
        else:
            reach, need = tl.where(on, V, above), tl.where(on, limit, above + 1)
    else:
        low, high, above, reach, need = _load_range(past_range_T8, row)  # pyright: ignore[reportGeneralTypeIssues]
        past = past_range_T8 + row * 8
        largest, cut, ties = tl.load(past + 5), tl.load(past + 6), tl.load(past + 7)
        if MASS:
            total = _total_mass(past_range_T8, past_sum_TQ, row)
            reach, need = tl.where(need > 0, reach, total), tl.where(need > 0, need, needed(total, limit))
        low, high, above, reach = _narrowed(low, high, above, reach, need, past_sum_TQ, row)
    if part == 0:
        tl.store(at, low)
        tl.store(at + 1, high)
        tl.store(at + 2, above)
        tl.store(at + 3, reach)
        tl.store(at + 4, need)
        tl.store(at + 5, largest)
        tl.store(at + 6, cut)
        tl.store(at + 7, ties)
    if high - low > 1:
        id_W = part * TILE + tl.arange(0, TILE)
        inside_W = id_W < V
        x_W = tl.load(x_TV + row.to(tl.int64) * V + id_W, mask=inside_W, other=float("-inf"))
        sum_Q = _sums(tl.div_rn(x_W, scale), inside_W, low, high, value_of(largest.to(tl.int32)), MASS, FIRST)
        q = tl.arange(0, 16)
        tl.atomic_add(sum_TQ + row * 16 + q, sum_Q, mask=sum_Q != 0)


@triton.jit
def _last_tie(x_TV, row, scale, cut, stay, V: tl.constexpr, TILE: tl.constexpr):
    """Id of the stay-th key that equals the cut."""
    start, before, last = 0, tl.full([], 0, tl.int64), V
    while (before < stay) & (start < V):
        id_W = start + tl.arange(0, TILE)
        x_W = tl.load(x_TV + row.to(tl.int64) * V + id_W, mask=id_W < V, other=float("-inf"))
        tie_W = (id_W < V) & (sortable(tl.div_rn(x_W, scale)) == cut)
        rank_W = before + tl.cumsum(tie_W.to(tl.int32), axis=0)
        found = tl.max(tl.where(tie_W & (rank_W == stay), id_W, -1), axis=0)
        last = tl.where(found >= 0, found, last)
        before += tl.sum(tie_W.to(tl.int32), axis=0)
        start += TILE
    return last


@triton.jit
def _settle(
    x_TV,
    seat_T,
    temperature_S,
    top_p_S,
    min_p_S,
    count_range_T8,
    count_sum_TQ,
    range_T8,
    sum_TQ,
    cut_T4,
    V: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Writes int32 [4] per place: the cut, the last id that stays among its ties, min-p's edge as a key, 0."""
    row = tl.program_id(0)
    seat = tl.load(seat_T + row)
    temperature, p, min_p = tl.load(temperature_S + seat), tl.load(top_p_S + seat), tl.load(min_p_S + seat)
    largest = value_of(tl.load(range_T8 + row * 8 + 5).to(tl.int32))
    cut, stay, present = tl.full([], LOW, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if TOP_K:
        cut, stay, present = _top_k_cut(count_range_T8, count_sum_TQ, row)
    if p < 1:
        low, high, above, reach, need = _load_range(range_T8, row)
        low, high, above, reach = _narrowed(low, high, above, reach, need, sum_TQ, row)
        weight = tl.maximum(mass(value_of(low.to(tl.int32)), largest), 1)
        present = tl.where(low == cut, present, (reach - above) // weight)
        stay = (need - above + weight - 1) // weight
        cut = low
    last = V
    if (temperature > 0) & (stay < present):
        last = _last_tie(x_TV, row, temperature, cut.to(tl.int32), stay, V, TILE)
    edge, place = min_p_edge(largest, min_p), tl.arange(0, 4)
    value = tl.where(place == 0, cut.to(tl.int32), tl.where(place == 1, last, tl.where(place == 2, edge, 0)))
    tl.store(cut_T4 + row * 4 + place, value)


def cuts(logits_TV: Tensor, state: SamplerState, seat_T: Tensor, with_top_k: bool) -> tuple[Tensor, Tensor]:
    """(int32 [T, 4] of `_settle`, keys int32 [T, S] of the programs' largest logits) of contiguous logits."""
    num_places, vocab = logits_TV.shape
    parts, device = -(-vocab // TILE), logits_TV.device
    top_TS = torch.empty(num_places, parts, dtype=torch.int32, device=device)
    cut_T4 = torch.empty(num_places, 4, dtype=torch.int32, device=device)
    phases = 2 if with_top_k else 1
    range_FPT8 = torch.empty(phases, _PASSES, num_places, 8, dtype=torch.int64, device=device)
    sum_FPTQ = torch.empty(phases, _PASSES, num_places, 16, dtype=torch.int64, device=device)
    grid, sizes = (parts, num_places), {"V": vocab, "TILE": TILE}
    launch(_begin, grid, logits_TV, top_TS, sum_FPTQ, **sizes, X=phases * _PASSES, num_warps=4)
    past = (top_TS, top_TS)
    for phase in range(phases):
        is_mass = phase == phases - 1
        for step in range(_PASSES):
            now = (range_FPT8[phase, step], sum_FPTQ[phase, step])
            launch(
                _bisect,
                grid,
                *(logits_TV, seat_T, state.temperature_S, state.top_p_S if is_mass else state.top_k_S, top_TS),
                *(*past, *now),
                **sizes,
                PARTS=parts,
                SP=triton.next_power_of_2(parts),
                MASS=is_mass,
                FIRST=step == 0,
                TOP_K=is_mass and with_top_k,
                num_warps=4,
            )
            past = now
    launch(
        _settle,
        (num_places,),
        *(logits_TV, seat_T, state.temperature_S, state.top_p_S, state.min_p_S),
        *(range_FPT8[0, -1], sum_FPTQ[0, -1], *past, cut_T4),
        V=vocab,
        TILE=_TIE_TILE,
        TOP_K=with_top_k,
        num_warps=8,
    )
    return cut_T4, top_TS
