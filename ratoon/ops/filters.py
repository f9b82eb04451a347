# Owns: top-k, top-p and min-p, and how far a draw is from their edges.
# Promises: what is kept is a prefix by value and then lower position; sums that no order changes.
# Never: sorts, or reads a value on the host.
"""Filters of scaled logits (METHOD section 3) and near-ties at their edges (section 5).

T: places, K: candidates (V: the whole vocabulary), in an order that breaks ties; N: few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.ops.order import sortable, top_ordered
from ratoon.ops.penalties import SamplerState

_EDGE_CANDIDATES = 16
_NEG_INF = float("-inf")
_INF = float("inf")


def _cut(x_TK: Tensor, weight_TK: Tensor, need_T1: Tensor) -> Tensor:
    """Shortest prefix, by value and then lower position, whose weights reach `need`; bool [T, K].

    Equal values have equal weights, or 0. weight, need: int64, 1 <= need <= total. Radix selection with integer
    histograms: no sort (5 ms a row of 49152 on a CPU core, 2026-11), and sums that no order changes.
    """
    key_TK = ~sortable(x_TK).to(torch.int64)
    low_T1, before_T1 = torch.full_like(need_T1, -(2**31)), need_T1
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        # Bucket 0 is all that comes before the range, the last one all that comes after it.
        bucket_TK = (key_TK - low_T1).bitwise_right_shift_(shift).clamp_(-1, 2**bits).add_(1)
        hist_TN = torch.zeros(len(x_TK), 2**bits + 2, dtype=torch.int64, device=x_TK.device)
        reach_TN = hist_TN.scatter_add_(1, bucket_TK, weight_TK).cumsum(1)
        # A row with a NaN needs less than nothing; an index of -1 would be an error for all rows.
        place_T1 = ((reach_TN < need_T1).sum(1, keepdim=True) - 1).clamp_(min=0)
        before_T1 = reach_TN.gather(1, place_T1)
        low_T1 = low_T1 + (place_T1 << shift)
    tie_TK = key_TK == low_T1
    tied_TK = torch.where(tie_TK, weight_TK, 0)
    return (key_TK < low_T1) | (tie_TK & (tied_TK.cumsum(1) - tied_TK < need_T1 - before_T1))


def _top_k(x_TK: Tensor, k_T1: Tensor) -> Tensor:
    width = x_TK.shape[1]
    off_T1 = (k_T1 <= 0) | (k_T1 >= width)
    return _cut(x_TK, torch.ones_like(x_TK, dtype=torch.int64), torch.where(off_T1, width, k_T1)) | off_T1


def _mass(x_TK: Tensor, allowed_TK: Tensor | None) -> Tensor:
    """Unnormalised probability in integers, 2^44 for the top candidate; 0 where not allowed."""
    distance_TK = x_TK - x_TK.amax(1, keepdim=True)
    mass_TK = distance_TK.to(torch.float64).exp_().mul_(2.0**44).to(torch.int64)
    return mass_TK if allowed_TK is None else torch.where(allowed_TK, mass_TK, 0)


def _top_p(x_TK: Tensor, allowed_TK: Tensor | None, p_T1: Tensor) -> Tensor:
    """Smallest set whose mass reaches p, among the allowed (those that an earlier filter kept)."""
    mass_TK = _mass(x_TK, allowed_TK)
    total_T1 = mass_TK.sum(1, keepdim=True)
    need_T1 = (total_T1.to(torch.float64) * p_T1).ceil().to(torch.int64)
    keep_TK = _cut(x_TK, mass_TK, torch.minimum(need_T1, total_T1)) | (p_T1 >= 1)
    return keep_TK if allowed_TK is None else keep_TK & allowed_TK


def _min_p_edge(x_TK: Tensor, min_p_T1: Tensor) -> Tensor:
    """Least scaled logit that min-p keeps, [T, 1]; -inf where it is off."""
    return x_TK.amax(1, keepdim=True) + min_p_T1.log()


@dataclass(frozen=True)
class Kept:
    """What the filters keep: top-k (None: not asked), top-p of that, and all of them with greedy rows whole."""

    by_k_TK: Tensor | None
    by_p_TK: Tensor
    all_TK: Tensor


def filter_logits(x_TK: Tensor, state: SamplerState, seat_T: Tensor, with_top_k: bool) -> Kept:
    """Top-k, then top-p of what is left, then min-p. x: logits over temperature, in any order that breaks ties."""
    seat_T1 = seat_T.unsqueeze(1)
    by_k_TK = _top_k(x_TK, state.top_k_S[seat_T1]) if with_top_k else None
    by_p_TK = _top_p(x_TK, by_k_TK, state.top_p_S[seat_T1])
    all_TK = by_p_TK & (x_TK >= _min_p_edge(x_TK, state.min_p_S[seat_T1]))
    return Kept(by_k_TK, by_p_TK, all_TK | (state.temperature_S[seat_T1] == 0))


# ---- edges ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """Where a filter ends, in scaled logits.

    keep: what it keeps. inside: least value kept, outside: largest value cut. leave: how far the last one kept
    is from being cut, enter: how far the first one cut is from being kept, other than by exchanging the two.
    """

    keep_TK: Tensor
    inside_T1: Tensor
    outside_T1: Tensor
    leave_T1: Tensor | float = _INF
    enter_T1: Tensor | float = _INF

    def slack(self, x_TN: Tensor, place_TN: Tensor) -> Tensor:
        """How far candidates are inside (+) or outside (-).

        fmin and fmax pass over inf - inf, which arises where nothing is outside.
        """
        kept_TN = torch.fmin(x_TN - self.outside_T1, x_TN - self.inside_T1 + self.leave_T1)
        cut_TN = torch.fmax(x_TN - self.inside_T1, x_TN - self.outside_T1 - self.enter_T1)
        return torch.where(self.keep_TK.gather(1, place_TN), kept_TN, cut_TN)


def _edge(x_TK: Tensor, keep_TK: Tensor, leave: Tensor | float = _INF, enter: Tensor | float = _INF) -> Edge:
    inside_T1 = torch.where(keep_TK, x_TK, _INF).amin(1, keepdim=True)
    outside_T1 = torch.where(keep_TK, _NEG_INF, x_TK).amax(1, keepdim=True)
    return Edge(keep_TK, inside_T1, outside_T1, leave, enter)


def _odds(share: Tensor) -> Tensor:
    return (share.log() - (-share).log1p()).to(torch.float32)


def filter_edges(x_TK: Tensor, kept: Kept, state: SamplerState, seat_T: Tensor) -> list[Edge]:
    """The edge of each filter; those of filters that are off are infinitely far.

    Top-p distances are in log-odds of the mass: moving every logit by e moves them by at most 2 e, as it moves
    a gap between two logits.
    """
    p_T1, min_p_T1 = state.top_p_S[seat_T].unsqueeze(1), state.min_p_S[seat_T].unsqueeze(1)
    mass_TK = _mass(x_TK, kept.by_k_TK)
    total_T1 = mass_TK.sum(1, keepdim=True).to(torch.float64)
    in_mass_TK = torch.where(kept.by_p_TK, mass_TK, 0)
    in_T1 = in_mass_TK.sum(1, keepdim=True)
    last_T1 = torch.where(kept.by_p_TK, mass_TK, 2**62).amin(1, keepdim=True)
    leave_T1 = _odds(p_T1) - _odds((in_T1 - last_T1) / total_T1)
    enter_T1 = _odds(in_T1 / total_T1) - _odds(p_T1)
    min_p_T1 = _min_p_edge(x_TK, min_p_T1)
    edges = [_edge(x_TK, kept.by_p_TK, leave_T1, enter_T1), Edge(x_TK >= min_p_T1, min_p_T1, min_p_T1)]
    return edges if kept.by_k_TK is None else [_edge(x_TK, kept.by_k_TK), *edges]


def nearest_edge(
    edges: list[Edge], x_TK: Tensor, kept: Kept, score_TK: Tensor, winner_T1: Tensor
) -> tuple[Tensor, Tensor]:
    """(distance in scaled logits, place of the token that comes in), [T, 1] each.

    Either an outsider that beats the drawn token comes in (the best 16 scores are searched for it), or the
    drawn token leaves and the first outsider comes in.
    """
    first_T1 = top_ordered(torch.where(kept.all_TK, _NEG_INF, x_TK), 1)[1]
    best_TN = top_ordered(score_TK, min(_EDGE_CANDIDATES, score_TK.shape[1]))[1]
    place_TN = torch.cat((winner_T1, best_TN), 1)
    x_TN, score_TN = x_TK.gather(1, place_TN), score_TK.gather(1, place_TN)
    slack_TN = torch.full_like(x_TN, _INF)
    for each in edges:
        slack_TN = torch.minimum(slack_TN, each.slack(x_TN, place_TN))
    comes_TN = ~kept.all_TK.gather(1, place_TN) & (score_TN > score_TN[:, :1])
    distance_TN = torch.where(comes_TN, -slack_TN, _INF)
    nearest_T1 = distance_TN.argmin(1, keepdim=True)
    enter_T1, leave_T1 = distance_TN.gather(1, nearest_T1), slack_TN[:, :1]
    place_T1 = torch.where(enter_T1 <= leave_T1, place_TN.gather(1, nearest_T1), first_T1)
    return torch.minimum(enter_T1, leave_T1), place_T1
