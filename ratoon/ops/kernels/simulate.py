# Owns: the Triton twin of ops/simulate.py's `true_tokens`.
# Promises: the same tokens as the reference, bit for bit, in one launch; every element of the output is written.
# Never: reads a lot of a row that is not there.
"""True tokens of simulated acceptance. R: rows, L: depths, K: candidates, N: lots, S: seats."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.launch import launch
from ratoon.ops.simulate import LOT_FACTOR, LOT_SHIFT, SEED_FACTOR


@triton.jit(do_not_specialize=["num_rows", "num_depths", "num_ranks", "width"])
def _true_tokens(
    seat_R,
    start_S,
    seed_S,
    rank_NL,
    token_RLK,
    out_RL,
    num_rows,
    num_depths,
    num_ranks,
    width,
    LOT_MASK: tl.constexpr,
    SEED_FACTOR: tl.constexpr,
    LOT_FACTOR: tl.constexpr,
    LOT_SHIFT: tl.constexpr,
    KP: tl.constexpr,
):
    row, depth = tl.program_id(0), tl.program_id(1)
    live = (row < num_rows) & (depth < num_depths)
    seat = tl.load(seat_R + row, mask=live, other=0)
    seed, start = tl.load(seed_S + seat), tl.load(start_S + seat)
    lot = (((seed * SEED_FACTOR + start) * LOT_FACTOR) >> LOT_SHIFT) & LOT_MASK
    rank = tl.load(rank_NL + lot * width + depth, mask=live, other=0)
    k = tl.arange(0, KP)
    token_K = tl.load(token_RLK + (row * num_depths + depth) * num_ranks + k, mask=live & (k < num_ranks), other=-1)
    hit = tl.sum(tl.where(k == rank, token_K, 0), axis=0)
    # KP exceeds K, so one of the ids 0 .. KP - 1 is no candidate.
    taken = tl.sum((token_K[None, :] == k[:, None]).to(tl.int32), axis=1)
    miss = tl.min(tl.where(taken == 0, k, KP), axis=0)
    token = tl.where(rank < num_ranks, hit, miss.to(tl.int64))
    tl.store(out_RL + row * (num_depths + 1) + depth, tl.where(live, token, -1))


def true_tokens(seat_R: Tensor, start_S: Tensor, seed_S: Tensor, rank_NL: Tensor, token_RLK: Tensor) -> Tensor:
    """As ops/simulate.py: int64 [R + 1, L + 1]."""
    num_rows, num_depths, num_ranks = token_RLK.shape
    out_RL = torch.empty(num_rows + 1, num_depths + 1, dtype=torch.int64, device=token_RLK.device)
    launch(
        _true_tokens,
        (num_rows + 1, num_depths + 1),
        *(seat_R, start_S, seed_S, rank_NL, token_RLK.contiguous(), out_RL),
        *(num_rows, num_depths, num_ranks, rank_NL.shape[1]),
        LOT_MASK=rank_NL.shape[0] - 1,
        SEED_FACTOR=SEED_FACTOR,
        LOT_FACTOR=LOT_FACTOR,
        LOT_SHIFT=LOT_SHIFT,
        KP=triton.next_power_of_2(num_ranks + 1),
        num_warps=4,
    )
    return out_RL
