# Owns: the Triton twins of ops/sample.py's `greedy` and `draw` without filter edges.
# Promises: the reference's tokens for the same seed; a row is read by many programs; noise stays in registers.
# Never: holds anything of places x vocabulary.
"""Draws. T: places, V: vocabulary, C: chunks of W ids, S: programs per row, K: candidates.

A first kernel leaves the best score of each chunk; a second one, one program per row, makes the scores of the three
best chunks again and takes their best three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.core.request import SamplerKind
from ratoon.ops.kernels.filters import cuts, mass, min_p_edge, needed, row_top
from ratoon.ops.kernels.noise import gumbel_at, gumbel_chunks
from ratoon.ops.kernels.order import (
    TILE,
    best_three,
    chunks,
    key_of,
    load_ids,
    number_of,
    pair,
    sortable,
    store_peaks,
    three_chunks,
    tile_ids,
    value_of,
)
from ratoon.ops.kernels.rank import rank_candidates
from ratoon.ops.launch import launch
from ratoon.ops.penalties import SamplerState
from ratoon.ops.sample import NARROW_WIDTH, Draw

_WIDTH = 128
_NEG_INF = tl.constexpr(-2139095041)
"""Key of -inf: a token that a filter cut is no runner-up."""


@triton.jit
def _score_keys(
    x_CW,
    chunk_C,
    row,
    seat_T,
    position_T,
    temperature_S,
    seed_S,
    sample_S,
    cut_T4,
    W: tl.constexpr,
    NOISE: tl.constexpr,
    FILTER: tl.constexpr,
):
    """Keys of perturbed scores, [C, W]."""
    if NOISE:
        seat = tl.load(seat_T + row)
        temperature = tl.load(temperature_S + seat)
        if temperature > 0:
            x_CW = tl.div_rn(x_CW, temperature)
            seed, sample = tl.load(seed_S + seat), tl.load(sample_S + seat)
            position = tl.load(position_T + row)
            if FILTER:
                cut, last = tl.load(cut_T4 + row * 4), tl.load(cut_T4 + row * 4 + 1)
                key_CW, id_CW = sortable(x_CW), tile_ids(chunk_C, W)
                kept_CW = (key_CW > cut) | ((key_CW == cut) & (id_CW <= last))
                kept_CW = kept_CW & (key_CW >= tl.load(cut_T4 + row * 4 + 2))
                x_CW = tl.where(kept_CW, x_CW, float("-inf"))
                if tl.max(tl.max(kept_CW.to(tl.int32), axis=1), axis=0) > 0:
                    x_CW += gumbel_chunks(seed, sample, position, chunk_C, W)
            else:
                x_CW += gumbel_chunks(seed, sample, position, chunk_C, W)
    return sortable(x_CW)


@triton.jit
def _scan(
    x_TV,
    peak_TC,
    top_TS,
    seat_T,
    position_T,
    temperature_S,
    seed_S,
    sample_S,
    cut_T4,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    W: tl.constexpr,
    NOISE: tl.constexpr,
    FILTER: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    chunk_C = part * CHUNKS + tl.arange(0, CHUNKS)
    x_CW, _ = load_ids(x_TV, row, tile_ids(chunk_C, W), V)  # pyright: ignore[reportGeneralTypeIssues]
    if NOISE and not FILTER:
        top = tl.max(tl.max(sortable(x_CW), axis=1), axis=0)
        tl.store(top_TS + row * tl.num_programs(0) + part, top)
    key_CW = _score_keys(
        x_CW, chunk_C, row, seat_T, position_T, temperature_S, seed_S, sample_S, cut_T4, W, NOISE, FILTER
    )
    store_peaks(peak_TC, row, chunk_C, key_CW, NUM_CHUNKS)


@triton.jit
def _store_draw(int_4T, real_4T, row, first, second, third, top, scale, V: tl.constexpr):
    """Token, runner-up, edge token, third; gap, top logit, edge gap, third gap."""
    size, infinite = tl.num_programs(0), float("inf")
    best = value_of(key_of(first))
    gap, third_gap = (best - value_of(key_of(second))) * scale, (best - value_of(key_of(third))) * scale
    last: tl.constexpr = V - 1
    token, second, third = number_of(first), number_of(second), number_of(third)
    tl.store(int_4T + row, tl.minimum(token, last).to(tl.int64))
    tl.store(int_4T + size + row, tl.where(gap < infinite, tl.minimum(second, last), -1).to(tl.int64))
    tl.store(int_4T + 2 * size + row, tl.full([], -1, tl.int64))
    tl.store(int_4T + 3 * size + row, tl.where(third_gap < infinite, tl.minimum(third, last), -1).to(tl.int64))
    tl.store(real_4T + row, gap)
    tl.store(real_4T + size + row, top)
    tl.store(real_4T + 2 * size + row, infinite)
    tl.store(real_4T + 3 * size + row, third_gap)


@triton.jit
def _choose(
    x_TV,
    peak_TC,
    top_TS,
    seat_T,
    position_T,
    temperature_S,
    seed_S,
    sample_S,
    cut_T4,
    int_4T,
    real_4T,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    W: tl.constexpr,
    NOISE: tl.constexpr,
    FILTER: tl.constexpr,
    PARTS: tl.constexpr,
    SP: tl.constexpr,
    CP: tl.constexpr,
):
    row = tl.program_id(0)
    chunk_C = three_chunks(peak_TC, row, NUM_CHUNKS, CP)
    id_CW = tile_ids(chunk_C, W)
    x_CW, _ = load_ids(x_TV, row, id_CW, V)
    key_CW = _score_keys(
        x_CW, chunk_C, row, seat_T, position_T, temperature_S, seed_S, sample_S, cut_T4, W, NOISE, FILTER
    )
    first, second, third = best_three(pair(key_CW, id_CW))
    if NOISE:
        temperature = tl.load(temperature_S + tl.load(seat_T + row))
        scale = tl.where(temperature > 0, temperature, 1.0)
        top = value_of(row_top(top_TS, row, PARTS, SP))
    else:
        scale, top = 1.0, value_of(key_of(first))
    _store_draw(int_4T, real_4T, row, first, second, third, top, scale, V)


@triton.jit
def _narrow(
    x_TV,
    token_TK,
    seat_T,
    position_T,
    temperature_S,
    seed_S,
    sample_S,
    top_k_S,
    top_p_S,
    min_p_S,
    int_4T,
    real_4T,
    V: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """A draw among K candidates, which hold all that top-k keeps."""
    row = tl.program_id(0)
    seat, place_K = tl.load(seat_T + row), tl.arange(0, KP)
    inside_K = place_K < K
    temperature, top_k = tl.load(temperature_S + seat), tl.load(top_k_S + seat)
    top_p, min_p = tl.load(top_p_S + seat), tl.load(min_p_S + seat)
    scale = tl.where(temperature > 0, temperature, 1.0)
    id_K = tl.load(token_TK + row.to(tl.int64) * K + place_K, mask=inside_K, other=V).to(tl.int32)
    x_K = tl.load(x_TV + row.to(tl.int64) * V + id_K, mask=inside_K, other=float("-inf"))
    top = value_of(tl.max(sortable(x_K), axis=0))
    # Division makes ties, which go to the lower id. Ids outside come last.
    sorted_K = tl.topk(pair(sortable(tl.div_rn(x_K, scale)), id_K + tl.where(inside_K, 0, place_K)), KP)
    key_K, id_K = key_of(sorted_K), number_of(sorted_K)
    x_K, largest = value_of(key_K), tl.div_rn(top, scale)
    allowed_K = inside_K & (place_K < tl.where(top_k > 0, top_k, K))
    mass_K = tl.where(allowed_K, mass(x_K, largest), 0)
    before_K = tl.cumsum(mass_K, axis=0) - mass_K
    need = tl.where(top_p < 1, needed(tl.sum(mass_K, axis=0), top_p), 2**62)
    kept_K = allowed_K & (before_K < need) & (key_K >= min_p_edge(largest, min_p))
    if temperature > 0:
        x_K += gumbel_at(tl.load(seed_S + seat), tl.load(sample_S + seat), tl.load(position_T + row), id_K)
        x_K = tl.where(kept_K, x_K, float("-inf"))
    first, second, third = best_three(pair(sortable(x_K), id_K))
    _store_draw(int_4T, real_4T, row, first, second, third, top, scale, V)


def _outputs(num_places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    int_4T = torch.empty(4, num_places, dtype=torch.int64, device=device)
    return int_4T, torch.empty(4, num_places, dtype=torch.float32, device=device)


def _draw_of(int_4T: Tensor, real_4T: Tensor) -> Draw:
    token_T, runner_up_T, edge_token_T, third_T = int_4T.unbind(0)
    gap_T, top_logit_T, edge_gap_T, third_gap_T = real_4T.unbind(0)
    return Draw(token_T, gap_T, runner_up_T, top_logit_T, edge_gap_T, edge_token_T, third_T, third_gap_T)


def _best(logits_TV: Tensor, seats: tuple[Tensor | None, ...], cut_T4: Tensor | None, top_TS: Tensor | None) -> Draw:
    """seats: seat, position, temperature, seed and sample index; all None for argmax."""
    num_places, vocab = logits_TV.shape
    (num_chunks, parts), device = chunks(vocab, _WIDTH), logits_TV.device
    peak_TC = torch.empty(num_places, num_chunks, dtype=torch.int32, device=device)
    noise = seats[0] is not None
    if noise and top_TS is None:
        top_TS = torch.empty(num_places, parts, dtype=torch.int32, device=device)
    outputs = _outputs(num_places, device)
    common = (logits_TV, peak_TC, top_TS, *seats, cut_T4)
    sizes = {"V": vocab, "NUM_CHUNKS": num_chunks, "W": _WIDTH, "NOISE": noise, "FILTER": cut_T4 is not None}
    launch(_scan, (parts, num_places), *common, **sizes, CHUNKS=TILE // _WIDTH, num_warps=4)
    launch(
        _choose,
        (num_places,),
        *(*common, *outputs),
        **sizes,
        PARTS=parts,
        SP=triton.next_power_of_2(parts),
        CP=triton.next_power_of_2(max(num_chunks, 4)),
        num_warps=4,
    )
    return _draw_of(*outputs)


def greedy(logits_TV: Tensor) -> Draw:
    """As ops/sample.py."""
    return _best(logits_TV.contiguous(), (None,) * 5, None, None)


def draw(logits_TV: Tensor, state: SamplerState, seat_T: Tensor, position_T: Tensor, kind: SamplerKind) -> Draw:
    """As ops/sample.py without filter edges, which only the reference looks for."""
    if kind in ("argmax", "greedy"):
        return greedy(logits_TV)
    logits_TV = logits_TV.contiguous()
    seats = (seat_T, position_T, state.temperature_S, state.seed_S, state.sample_index_S)
    if kind == "plain":
        return _best(logits_TV, seats, None, None)
    if kind != "narrow":
        return _best(logits_TV, seats, *cuts(logits_TV, state, seat_T, kind == "general"))
    num_places, vocab = logits_TV.shape
    token_TK, _ = rank_candidates(logits_TV, NARROW_WIDTH)
    outputs = _outputs(num_places, logits_TV.device)
    launch(
        _narrow,
        (num_places,),
        *(logits_TV, token_TK, *seats, state.top_k_S, state.top_p_S, state.min_p_S, *outputs),
        V=vocab,
        K=token_TK.shape[1],
        KP=triton.next_power_of_2(max(token_TK.shape[1], 4)),
        num_warps=4,
    )
    return _draw_of(*outputs)
