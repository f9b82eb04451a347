# Owns: the published table of how often a drafter's ranks are right, and what trees it makes one expect.
# Promises: probabilities are conditional on the path so far; no chance is -inf.
# Never: imports torch, draws a lot.
"""Acceptance by a table (METHOD section 5). L: drafted depths, K: candidates. Ranks count from 0 here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AcceptanceTable:
    """Probabilities of the true token's rank at depths 1, 2, ..., given that the path so far is true.

    first: of rank 0; total: of the first `num_ranks` together. Rank r >= 1 gets c * r^-exponent, c set by the total;
    later ranks get nothing; depths beyond the last repeat it. Raises ValueError for what is no such table.
    """

    first: tuple[float, ...] = (0.854, 0.803, 0.794, 0.783, 0.775, 0.759, 0.729)
    total: tuple[float, ...] = (0.995, 0.973, 0.948, 0.926, 0.908, 0.894, 0.878)
    num_ranks: int = 16
    exponent: float = 1.3

    def __post_init__(self) -> None:
        if not self.first or len(self.first) != len(self.total) or self.num_ranks < 2:
            raise ValueError("an acceptance table needs a first and a total for each depth, and at least 2 ranks")
        if not all(0 <= first <= total <= 1 for first, total in zip(self.first, self.total, strict=True)):
            raise ValueError("an acceptance table needs 0 <= first <= total <= 1 at every depth")
        p_LK = self.probabilities(len(self.first), self.num_ranks)
        if np.any(p_LK[:, 1:] > p_LK[:, :-1]):
            raise ValueError("an acceptance table must not rise with rank: rank 2 is likelier than rank 1")

    def probabilities(self, num_depths: int, num_ranks: int) -> np.ndarray:
        """float64 [num_depths, num_ranks]."""
        at_L = np.minimum(np.arange(num_depths), len(self.first) - 1)
        first_L, total_L = np.array(self.first)[at_L], np.array(self.total)[at_L]
        tail_K = np.arange(1, self.num_ranks, dtype=np.float64) ** -self.exponent
        rest_LK = np.outer((total_L - first_L) / tail_K.sum(), tail_K)
        known_LK = np.concatenate((first_L[:, None], rest_LK), axis=1)
        p_LK = np.zeros((num_depths, num_ranks))
        width = min(num_ranks, self.num_ranks)
        p_LK[:, :width] = known_LK[:, :width]
        return p_LK

    def logprobs(self, num_depths: int, num_ranks: int) -> np.ndarray:
        """float32 [num_depths, num_ranks], -inf where there is no chance."""
        with np.errstate(divide="ignore"):
            return np.log(self.probabilities(num_depths, num_ranks)).astype(np.float32)
