# Owns: how logits become tokens: draws and the loop over groups of places.
# Promises: a draw depends on its row alone (seed, sample, position, history, logits); ties go to the lower id.
# Never: holds random state, reads a value on the host, or makes a tensor of places x vocabulary beyond one group.
"""Sampling (METHOD section 3). T: places, G: places of a group, V: vocabulary, K: candidates, S: seats, R: rows.

D: drafted tokens on a path, B: bias entries. Order: repetition penalty, presence/frequency, bias, mask,
temperature, top-k, top-p, min-p, then argmax of score + Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ratoon.core.request import MAX_NARROW_TOP_K, SamplerKind
from ratoon.ops.filters import filter_edges, filter_logits, nearest_edge
from ratoon.ops.launch import wants_kernel
from ratoon.ops.noise import gumbel_at, gumbel_noise
from ratoon.ops.order import top_ordered, top_three
from ratoon.ops.penalties import SamplerState, count_tokens, penalise, penalise_own, write_seat

__all__ = [
    "Draw",
    "SamplerState",
    "count_tokens",
    "draw",
    "greedy",
    "greedy_rescored",
    "penalise",
    "process_logits",
    "rescored",
    "sample_places",
    "write_seat",
]

LogitsFn = Callable[[Tensor], Tensor]
"""hidden [G, H] -> float32 logits [G, V]."""
RescoreFn = Callable[[Tensor, Tensor], Tensor]
"""(hidden [G, H], token ids [G, K]) -> float32 logits [G, K], not rounded to the model's dtype."""

GREEDY_RESCORED = 8
GENERAL_RESCORED = 64
# Candidates beyond the widest narrow top-k, so that the nearest outsiders of the filter edge are seen.
NARROW_WIDTH = MAX_NARROW_TOP_K + 16

# Rows of V-wide temporaries that stay in a core's cache: 4 rows cost 8 times as much as 1 (2026-11).
_CPU_ROWS = 2
_NEG_INF = float("-inf")
_INF = float("inf")


def _scale(temperature_T: Tensor) -> Tensor:
    return torch.where(temperature_T > 0, temperature_T, 1.0)


def _temper(logits_TK: Tensor, temperature_T: Tensor) -> Tensor:
    """Logits over temperature; greedy rows as they are."""
    return logits_TK / _scale(temperature_T).unsqueeze(1)


def process_logits(
    logits_TV: Tensor, state: SamplerState, seat_T: Tensor, path_token_TD: Tensor, mask_TV: Tensor | None = None
) -> Tensor:
    """The target's distribution as logits, float32 [T, V]: all of the order, -inf where cut.

    What `draw` draws from, in full; greedy rows keep every token.
    """
    temperature_T = state.temperature_S[seat_T]
    x_TV = _temper(penalise(logits_TV, state, seat_T, path_token_TD, mask_TV), temperature_T)
    return torch.where(filter_logits(x_TV, state, seat_T, True).all_TK, x_TV, _NEG_INF)


# ---- draws ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One token per place, [T] each. Distances are in logits (perturbed scores times temperature).

    gap, third_gap: from the drawn token to the runner-up and to the third (inf and -1 where there is none).
    edge_gap: to the nearest filter edge whose move brings `edge_token` in before the drawn token, or puts the
    drawn token out; inf and -1 where none would, or where edges were not asked for.
    top_logit: largest logit after penalties.
    """

    token_T: Tensor
    gap_T: Tensor
    runner_up_T: Tensor
    top_logit_T: Tensor
    edge_gap_T: Tensor
    edge_token_T: Tensor
    third_T: Tensor
    third_gap_T: Tensor


def _unfiltered(value_T3: Tensor, id_T3: Tensor, top_T: Tensor, scale_T: Tensor) -> Draw:
    """A draw that no filter had a part in."""
    gap_T2 = (value_T3[:, :1] - value_T3[:, 1:]) * scale_T.unsqueeze(1)
    other_T2 = torch.where(gap_T2 < _INF, id_T3[:, 1:], -1)
    return Draw(
        token_T=id_T3[:, 0],
        gap_T=gap_T2[:, 0],
        runner_up_T=other_T2[:, 0],
        top_logit_T=top_T,
        edge_gap_T=torch.full_like(top_T, _INF),
        edge_token_T=torch.full_like(id_T3[:, 0], -1),
        third_T=other_T2[:, 1],
        third_gap_T=gap_T2[:, 1],
    )


def greedy(logits_TV: Tensor) -> Draw:
    """Argmax of float32 logits [T, V]."""
    if wants_kernel(logits_TV):
        from ratoon.ops.kernels import sample

        return sample.greedy(logits_TV)
    value_T3, id_T3 = top_three(logits_TV)
    return _unfiltered(value_T3, id_T3, value_T3[:, 0], torch.ones_like(value_T3[:, 0]))


def greedy_rescored(logits_TV: Tensor, hidden_TH: Tensor, rescore: RescoreFn) -> Draw:
    """Argmax of unrounded logits among the best few (exact ties by id) of logits that were rounded to bf16."""
    _, id_TK = top_ordered(logits_TV, min(GREEDY_RESCORED, logits_TV.shape[1]))
    id_TK = id_TK.sort(dim=1).values
    value_T3, place_T3 = top_three(rescore(hidden_TH, id_TK))
    id_T3 = id_TK.gather(1, place_T3.clamp(max=id_TK.shape[1] - 1))
    return _unfiltered(value_T3, id_T3, value_T3[:, 0], torch.ones_like(value_T3[:, 0]))


def rescored(logits_GV: Tensor, hidden_GH: Tensor, rescore: RescoreFn) -> Tensor:
    """Rounded logits with their best 64 replaced by unrounded ones; tokens outside those keep the rounding."""
    _, id_GK = top_ordered(logits_GV, min(GENERAL_RESCORED, logits_GV.shape[1]))
    return logits_GV.scatter(1, id_GK, rescore(hidden_GH, id_GK))


def draw(
    logits_TV: Tensor,
    state: SamplerState,
    seat_T: Tensor,
    position_T: Tensor,
    kind: SamplerKind,
    edges: bool = True,
) -> Draw:
    """Draws from penalised logits. position_T: absolute position of the token drawn, int64.

    Greedy rows may be among sampled ones; "argmax" and "greedy" take no others. "plain" has no filters,
    "nucleus" top-p and min-p, "narrow" all with top_k 1..64, "general" all. A row's token does not depend on
    the kind that serves it. `edges` False skips the search for the nearest filter edge, a third of the time of
    "nucleus" and "general": only the reference run of a near-tie needs it.
    """
    if kind in ("argmax", "greedy"):
        return greedy(logits_TV)
    if (kind == "plain" or not edges) and wants_kernel(logits_TV):
        from ratoon.ops.kernels import sample

        return sample.draw(logits_TV, state, seat_T, position_T, kind)
    group = _CPU_ROWS if kind != "narrow" and logits_TV.device.type == "cpu" else len(logits_TV)
    parts = []
    for start in range(0, len(logits_TV), group):
        at = slice(start, start + group)
        parts.append(_draw_rows(logits_TV[at], state, seat_T[at], position_T[at], kind, edges))
    return _joined(parts)


def _draw_rows(
    logits_TV: Tensor, state: SamplerState, seat_T: Tensor, position_T: Tensor, kind: SamplerKind, edges: bool
) -> Draw:
    vocab = logits_TV.shape[1]
    seed_T, sample_T = state.seed_S[seat_T], state.sample_index_S[seat_T]
    if kind == "narrow":
        # Ids ascend, so that a tie goes to the lower one here too.
        id_TK = top_ordered(logits_TV, min(NARROW_WIDTH, vocab))[1].sort(dim=1).values
        noise_TK = gumbel_at(seed_T, sample_T, position_T, id_TK)
        return _filtered(logits_TV.gather(1, id_TK), id_TK, noise_TK, state, seat_T, True, edges)
    noise_TV = gumbel_noise(seed_T, sample_T, position_T, vocab)
    if kind == "plain":
        return _plain(logits_TV, noise_TV, state.temperature_S[seat_T])
    id_TV = torch.arange(vocab, device=logits_TV.device).expand_as(logits_TV)
    return _filtered(logits_TV, id_TV, noise_TV, state, seat_T, kind == "general", edges)


def _scores(x_TK: Tensor, noise_TK: Tensor, temperature_T: Tensor) -> Tensor:
    """Perturbed scores; noise is finite, so a factor of 0 turns it off in greedy rows."""
    return x_TK + noise_TK * (temperature_T > 0).unsqueeze(1)


def _plain(logits_TV: Tensor, noise_TV: Tensor, temperature_T: Tensor) -> Draw:
    value_T3, id_T3 = top_three(_scores(_temper(logits_TV, temperature_T), noise_TV, temperature_T))
    return _unfiltered(value_T3, id_T3, logits_TV.amax(1), _scale(temperature_T))


def _filtered(
    logits_TK: Tensor,
    id_TK: Tensor,
    noise_TK: Tensor,
    state: SamplerState,
    seat_T: Tensor,
    with_top_k: bool,
    edges: bool,
) -> Draw:
    """A draw among the survivors of the filters. id: ascending in every row."""
    temperature_T = state.temperature_S[seat_T]
    x_TK = _temper(logits_TK, temperature_T)
    kept = filter_logits(x_TK, state, seat_T, with_top_k)
    score_TK = _scores(x_TK, noise_TK, temperature_T)
    value_T3, place_T3 = top_three(torch.where(kept.all_TK, score_TK, _NEG_INF))
    place_T3 = place_T3.clamp(max=id_TK.shape[1] - 1)
    drawn = _unfiltered(value_T3, id_TK.gather(1, place_T3), logits_TK.amax(1), _scale(temperature_T))
    if not edges:
        return drawn
    edge_T1, place_T1 = nearest_edge(filter_edges(x_TK, kept, state, seat_T), x_TK, kept, score_TK, place_T3[:, :1])
    edge_T = torch.where(temperature_T > 0, edge_T1.squeeze(1) * temperature_T, _INF)
    edge_token_T = torch.where(edge_T < _INF, id_TK.gather(1, place_T1).squeeze(1), -1)
    return replace(drawn, edge_gap_T=edge_T, edge_token_T=edge_token_T)


# ---- head -------------------------------------------------------------------------------------------------


def greedy_places(hidden_TH: Tensor, logits_fn: LogitsFn, group: int, rescore: RescoreFn | None = None) -> Draw:
    """Head and argmax over `group` places at a time: what "argmax" rows need, and nothing of their seats."""
    parts = []
    for hidden_GH in hidden_TH.split(group):
        logits_GV = logits_fn(hidden_GH)
        parts.append(greedy_rescored(logits_GV, hidden_GH, rescore) if rescore else greedy(logits_GV))
    return _joined(parts)


def sample_places(
    hidden_TH: Tensor,
    logits_fn: LogitsFn,
    state: SamplerState,
    seat_T: Tensor,
    position_T: Tensor,
    path_token_TD: Tensor,
    kind: SamplerKind,
    group: int,
    mask_TV: Tensor | None = None,
    rescore: RescoreFn | None = None,
    edges: bool = True,
) -> Draw:
    """Head and sampler over `group` places at a time, so that only [group, V] logits exist at once.

    seat, position int64 [T]; path_token int64 [T, D] (see `penalise`). `rescore` for heads that round. What
    `logits_fn` returns may be written over.
    """
    parts = []
    for start in range(0, hidden_TH.shape[0], group):
        at = slice(start, start + group)
        hidden_GH, mask_GV = hidden_TH[at], None if mask_TV is None else mask_TV[at]
        logits_GV = logits_fn(hidden_GH)
        logits_GV = rescored(logits_GV, hidden_GH, rescore) if rescore else logits_GV
        logits_GV = penalise_own(logits_GV, state, seat_T[at], path_token_TD[at], mask_GV)
        parts.append(draw(logits_GV, state, seat_T[at], position_T[at], kind, edges))
    return _joined(parts)


def _joined(parts: list[Draw]) -> Draw:
    if len(parts) == 1:
        return parts[0]
    return Draw(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Draw)))
