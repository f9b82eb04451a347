# Owns: what simulated acceptance puts in the place of the target's draws.
# Promises: a row's true tokens depend on its seed, its start and its candidates alone.
# Never: reads a value on the host, holds random state.
"""Simulated acceptance (METHOD section 5). R: rows, L: depths, K: candidates, N: lots, S: seats, T: places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.launch import wants_kernel
from ratoon.ops.tree import Places

# Odd multipliers: neighbouring starts and seeds get lots far apart.
SEED_FACTOR, LOT_FACTOR, LOT_SHIFT = 0x369DEA0F31A53F85, 0x2545F4914F6CDD1D, 40


def true_tokens(seat_R: Tensor, start_S: Tensor, seed_S: Tensor, rank_NL: Tensor, token_RLK: Tensor) -> Tensor:
    """The token that is true at each depth, int64 [R + 1, L + 1]; -1 in the last row and column: nothing is forced.

    A row's lot is a hash of its seed and start; where the lot's rank is none of the K candidates, the smallest id
    that is no candidate. Candidates of a depth are distinct, and fewer than the vocabulary. rank: N a power of two.
    """
    if wants_kernel(token_RLK):
        from ratoon.ops.kernels import simulate

        return simulate.true_tokens(seat_R, start_S, seed_S, rank_NL, token_RLK)
    num_depths, num_ranks = token_RLK.shape[1:]
    mixed_R = (seed_S[seat_R] * SEED_FACTOR + start_S[seat_R]) * LOT_FACTOR
    lot_R = (mixed_R >> LOT_SHIFT) & (rank_NL.shape[0] - 1)
    rank_RL1 = rank_NL[lot_R, :num_depths].clamp(max=num_ranks).unsqueeze(2)
    # The sorted candidates agree with 0, 1, 2, ... up to the first id that is missing.
    dense_RLK = token_RLK.sort(dim=2).values == torch.arange(num_ranks, device=token_RLK.device)
    miss_RL1 = dense_RLK.to(torch.int64).cumprod(2).sum(2, keepdim=True)
    token_RL = torch.cat((token_RLK, miss_RL1), dim=2).gather(2, rank_RL1).squeeze(2)
    return F.pad(token_RL, (0, 1, 0, 1), value=-1)


def force(token_T: Tensor, places: Places, truth_RL: Tensor) -> Tensor:
    """Draws int64 [T] that the walk follows: at depth d of row r truth [r, d], the target's own where that is -1.

    truth int64 [R + 1, L + 1], L no less than the deepest place. Off the true path a draw is forced too; no walk
    comes there.
    """
    forced_T = truth_RL[places.row_of, places.depth]
    return torch.where(forced_T >= 0, forced_T, token_T)
