# Owns: simulated acceptance in a round: the lots, drawn once from a table of probabilities.
# Promises: the walk follows the table's distribution whatever the weights; a lot depends on seed and start alone.
# Never: reads a value on the host in a round, holds random state, changes what a round computes or costs beyond this.
"""Simulated acceptance for random weights (METHOD section 5).

R: rows, L: drafted depths, K: candidates, N: lots, S: seats. Ranks count from 0 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.ops.noise import philox
from ratoon.ops.simulate import true_tokens
from ratoon.spec.acceptance import AcceptanceTable

NUM_LOTS = 1 << 16
OUTSIDE = 1 << 15
"""Rank of a true token that is in no table."""
_WIDTH = 128


@dataclass(frozen=True)
class Simulation:
    """What a round needs, on its device. rank int64 [N, L]: the true ranks of a lot (OUTSIDE: in no table).

    logprob float32 [L, 128] builds the trees; None with a fixed mean, where a chain keeps its own.
    """

    rank_NL: Tensor
    logprob_LK: Tensor | None
    tau: float | None = None

    @classmethod
    def of_table(
        cls, num_depths: int, device: torch.device | str, table: AcceptanceTable | None = None, seed: int = 0
    ) -> Simulation:
        """Trees are built and accepted by `table` (default: METHOD section 5)."""
        table = table or AcceptanceTable()
        ranks = draw_ranks(table.probabilities(num_depths, _WIDTH), seed)
        logprob_LK = torch.from_numpy(table.logprobs(num_depths, _WIDTH))
        return cls(ranks.to(device), logprob_LK.to(device))

    @classmethod
    def of_tau(cls, tau: float, num_depths: int, device: torch.device | str, seed: int = 0) -> Simulation:
        """Every round commits floor(tau) or ceil(tau) tokens, on average tau. Raises ValueError outside 1 .. L + 1."""
        if not 1 <= tau <= num_depths + 1:
            raise ValueError(f"simulated tau must be from 1 to {num_depths + 1} with this block, got {tau}")
        p_L1 = np.clip(tau - np.arange(1, num_depths + 1, dtype=np.float64), 0.0, 1.0)[:, None]
        return cls(draw_ranks(p_L1, seed).to(device), None, tau)

    def check(self, method: str, budget: int | None) -> None:
        """ValueError for a request that a fixed mean says nothing about (budget None: auto)."""
        if self.tau is None or method == "ar" or budget == 0:
            return
        needed = math.ceil(self.tau) - 1
        if method != "chain" or budget is None or budget < needed:
            shown = "auto" if budget is None else budget
            raise ValueError(
                f"simulated tau {self.tau:g} needs method chain with a fixed budget of at least {needed}, got "
                f"{method} with budget {shown}: a tree or a shorter chain would be given what it cannot earn"
            )

    def constants(self) -> dict[str, Tensor]:
        """Tensors that a round reads, by name."""
        named = {"simulate.rank": self.rank_NL}
        return named if self.logprob_LK is None else {**named, "simulate.logprob": self.logprob_LK}

    def logprobs(self, logprob_RLK: Tensor) -> Tensor:
        """What builds the trees in the place of the drafter's own log-probabilities, same shape."""
        if self.logprob_LK is None:
            return logprob_RLK
        num_rows, num_depths, num_ranks = logprob_RLK.shape
        assert num_ranks <= _WIDTH and num_depths <= self.logprob_LK.shape[0], "the table is too small for this round"
        return self.logprob_LK[:num_depths, :num_ranks].expand(num_rows, -1, -1)

    def truth(self, seat_R: Tensor, start_S: Tensor, seed_S: Tensor, token_RLK: Tensor) -> Tensor:
        """True tokens of this round's rows, as `true_tokens` gives them."""
        return true_tokens(seat_R, start_S, seed_S, self.rank_NL, token_RLK)


def draw_ranks(p_LK: np.ndarray, seed: int = 0, num_lots: int = NUM_LOTS) -> Tensor:
    """Ranks int64 [N, L], one of each lot and depth, independent, by the rows of p; OUTSIDE for what p leaves over."""
    num_depths = p_LK.shape[0]
    lot_N1 = torch.arange(num_lots).unsqueeze(1)
    depth_1L, zero = torch.arange(num_depths).unsqueeze(0), torch.zeros(1, 1, dtype=torch.int64)
    key = (zero + (seed & 0xFFFFFFFF), zero + (seed >> 32 & 0xFFFFFFFF))
    word_NL = philox((lot_N1, depth_1L, zero, zero), key)[0]
    uniform_LN = ((word_NL.to(torch.float64) + 0.5) * 2.0**-32).t().contiguous()
    edge_LK = torch.from_numpy(p_LK.cumsum(axis=1))
    rank_NL = torch.searchsorted(edge_LK, uniform_LN, right=True).t().contiguous()
    return rank_NL.masked_fill(rank_NL >= p_LK.shape[1], OUTSIDE)
