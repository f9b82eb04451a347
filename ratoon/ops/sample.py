# Owns: how logits become tokens: the noise, penalties, filters, draws, and the per-seat state they need.
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
import torch.nn.functional as F
from torch import Tensor

from ratoon.core.request import MAX_NARROW_TOP_K, SamplerKind, SamplingParams

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
_EDGE_CANDIDATES = 16
_WORD = 0xFFFFFFFF
_NEG_INF = float("-inf")
_INF = float("inf")


# ---- noise ------------------------------------------------------------------------------------------------


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10 (Salmon et al. 2011, Random123) on int64 tensors that hold 32-bit words and broadcast.

    The 64-bit product wraps in int64, so its high word is an arithmetic shift and a mask away.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((second >> 32) ^ c1 ^ k0) & _WORD, ((first >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = second, first  # high words masked off by the next round's `&`
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _noise_words(seed_T1: Tensor, sample_T1: Tensor, position_T1: Tensor, block: Tensor) -> tuple[Tensor, ...]:
    """Four words for the four token ids 4 * block .. 4 * block + 3."""
    key = (seed_T1 & _WORD, (seed_T1 >> 32) & _WORD)
    counter = (block, position_T1 & _WORD, sample_T1 & _WORD, torch.zeros_like(position_T1))
    return philox(counter, key)


def _gumbel(word: Tensor) -> Tensor:
    """-log(-log1p(-v)), v = (word + 0.5) / 2^32: finest near v = 0, where the maximum is.

    In float64 v is exact and the rounding to float32 is the only one that counts, so a value does not depend
    on the vector width, the batch or the device.
    """
    minus_v = word.to(torch.float64).mul_(-(2.0**-32)).sub_(2.0**-33)
    return minus_v.log1p_().neg_().log_().neg_().to(torch.float32)


def gumbel_noise(seed_T: Tensor, sample_T: Tensor, position_T: Tensor, vocab: int) -> Tensor:
    """Noise of every token id, float32 [T, vocab]. seed, sample, position: int64 [T]; position of the token drawn."""
    block_1B = torch.arange((vocab + 3) // 4, device=seed_T.device).unsqueeze(0)
    words = _noise_words(seed_T.unsqueeze(1), sample_T.unsqueeze(1), position_T.unsqueeze(1), block_1B)
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab])


def gumbel_at(seed_T: Tensor, sample_T: Tensor, position_T: Tensor, token_TK: Tensor) -> Tensor:
    """The same noise at chosen ids, float32 [T, K]."""
    words = _noise_words(seed_T.unsqueeze(1), sample_T.unsqueeze(1), position_T.unsqueeze(1), token_TK >> 2)
    lane_TK = token_TK & 3
    low = torch.where(lane_TK == 0, words[0], words[1])
    high = torch.where(lane_TK == 2, words[2], words[3])
    return _gumbel(torch.where(lane_TK < 2, low, high))


# ---- order ------------------------------------------------------------------------------------------------


def _sortable(x: Tensor) -> Tensor:
    """int32 that orders as the float32 does; -0.0 equals 0.0."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _best_positions(x_TN: Tensor, k: int) -> Tensor:
    """Positions [T, k] of the k largest, equal values by lower position.

    torch.topk leaves ties open, so value and position are packed into one int64 that has none.
    """
    place_N = torch.arange(x_TN.shape[1], device=x_TN.device)
    ranked_TN = (_sortable(x_TN).to(torch.int64) << 32) | (_WORD - place_N)
    return ranked_TN.topk(k, dim=1).indices


def _blocks(x_TV: Tensor, width: int) -> Tensor:
    """[T, V / width, width], padded with -inf where the width does not divide V."""
    surplus = -x_TV.shape[1] % width
    padded = F.pad(x_TV, (0, surplus), value=_NEG_INF) if surplus else x_TV
    return padded.unflatten(1, (-1, width))


def top_ordered(x_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) [T, k], by value and then lower id. k <= V.

    The k best elements lie in the k blocks with the best maxima, so only those are ranked.
    """
    width = 32
    if x_TV.shape[1] <= 4 * k * width:
        position_Tk = _best_positions(x_TV, k)
        return x_TV.gather(1, position_Tk), position_Tk
    x_TNW = _blocks(x_TV, width)
    block_Tk = _best_positions(x_TNW.amax(-1), k).sort(dim=1).values
    inner_TK = x_TNW.gather(1, block_Tk.unsqueeze(-1).expand(-1, -1, width)).flatten(1)
    position_Tk = _best_positions(inner_TK, k)
    id_Tk = block_Tk.gather(1, position_Tk // width) * width + position_Tk % width
    return inner_TK.gather(1, position_Tk), id_Tk


def _top_two(x_TV: Tensor) -> tuple[Tensor, Tensor]:
    """(values, ids) [T, 2], by value and then lower id: one pass over V, then short argmaxes."""
    width = 128
    x_TNW = _blocks(x_TV, width)
    best_TN = x_TNW.amax(-1)
    block_T1 = best_TN.argmax(1, keepdim=True)
    inner_TW = _block_at(x_TNW, block_T1)
    place_T1 = inner_TW.argmax(1, keepdim=True)
    rest_TW = inner_TW.scatter(1, place_T1, _NEG_INF)
    second_T1 = best_TN.scatter(1, block_T1, rest_TW.amax(1, keepdim=True)).argmax(1, keepdim=True)
    other_TW = torch.where(second_T1 == block_T1, rest_TW, _block_at(x_TNW, second_T1))
    other_T1 = other_TW.argmax(1, keepdim=True)
    values = torch.cat((inner_TW.gather(1, place_T1), other_TW.gather(1, other_T1)), 1)
    return values, torch.cat((block_T1 * width + place_T1, second_T1 * width + other_T1), 1)


def _block_at(x_TNW: Tensor, block_T1: Tensor) -> Tensor:
    return x_TNW.gather(1, block_T1.unsqueeze(-1).expand(-1, -1, x_TNW.shape[-1])).squeeze(1)


# ---- state ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplerState:
    """What a draw needs to know of each seat. Role state: made once, written in place.

    `prompt_seen` and `output_count` have width V, or 0 in an engine without penalties; the counts of committed
    tokens include the anchor. `bias_token` pads with -1.
    """

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    seed_S: Tensor
    sample_index_S: Tensor
    bias_token_SB: Tensor
    bias_value_SB: Tensor
    prompt_seen_SV: Tensor
    output_count_SV: Tensor

    @classmethod
    def allocate(
        cls, num_seats: int, vocab: int, max_bias: int, penalties: bool, device: torch.device | str = "cpu"
    ) -> SamplerState:
        """Greedy seats without penalties."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((num_seats, *shape), value, dtype=dtype, device=device)

        width = vocab if penalties else 0
        return cls(
            temperature_S=full(0.0, torch.float32),
            top_k_S=full(0, torch.int64),
            top_p_S=full(1.0, torch.float64),
            min_p_S=full(0.0, torch.float32),
            repetition_S=full(1.0, torch.float32),
            presence_S=full(0.0, torch.float32),
            frequency_S=full(0.0, torch.float32),
            seed_S=full(0, torch.int64),
            sample_index_S=full(0, torch.int64),
            bias_token_SB=full(-1, torch.int64, max_bias),
            bias_value_SB=full(0.0, torch.float32, max_bias),
            prompt_seen_SV=full(0, torch.bool, width),
            output_count_SV=full(0, torch.int32, width),
        )


def write_seat(state: SamplerState, seat: int, params: SamplingParams, prompt: Tensor, seed: int) -> None:
    """Joins a request to a seat: overwrites everything the last tenant left. prompt: int64 ids, any length.

    ValueError if the state was made without what the request needs.
    """
    if params.has_penalties and not state.prompt_seen_SV.shape[1]:
        raise ValueError("this engine was started without penalties: start it with penalties=True")
    if len(params.logit_bias) > state.bias_token_SB.shape[1]:
        raise ValueError(
            f"logit_bias has {len(params.logit_bias)} entries, this engine takes {state.bias_token_SB.shape[1]}"
        )
    state.temperature_S[seat] = params.temperature
    state.top_k_S[seat] = max(params.top_k, 0)
    state.top_p_S[seat] = params.top_p
    state.min_p_S[seat] = params.min_p
    state.repetition_S[seat] = params.repetition_penalty
    state.presence_S[seat] = params.presence_penalty
    state.frequency_S[seat] = params.frequency_penalty
    state.seed_S[seat] = seed - 2**64 if seed >= 2**63 else seed
    state.sample_index_S[seat] = params.sample_index
    _write_history(state, seat, params, prompt)


def _write_history(state: SamplerState, seat: int, params: SamplingParams, prompt: Tensor) -> None:
    device = state.bias_token_SB.device
    num = len(params.logit_bias)
    state.bias_token_SB[seat] = -1
    state.bias_value_SB[seat] = 0.0
    if num:
        state.bias_token_SB[seat, :num] = torch.tensor(list(params.logit_bias), device=device)
        state.bias_value_SB[seat, :num] = torch.tensor(list(params.logit_bias.values()), device=device)
    state.output_count_SV[seat] = 0
    state.prompt_seen_SV[seat] = False
    if state.prompt_seen_SV.shape[1]:
        state.prompt_seen_SV[seat].index_fill_(0, prompt.to(device), True)


def count_tokens(state: SamplerState, seat_R: Tensor, token_RE: Tensor) -> None:
    """Commits emitted tokens [R, E] (-1: none) to the counts of their seats."""
    vocab = state.output_count_SV.shape[1]
    if vocab:
        index_RE = seat_R.unsqueeze(1) * vocab + token_RE.clamp(min=0)
        real_RE = (token_RE >= 0).to(torch.int32)
        state.output_count_SV.view(-1).scatter_add_(0, index_RE.flatten(), real_RE.flatten())


# ---- logits -----------------------------------------------------------------------------------------------


def penalise(
    logits_TV: Tensor, state: SamplerState, seat_T: Tensor, path_token_TD: Tensor, mask_TV: Tensor | None = None
) -> Tensor:
    """Logits after penalties, bias and mask, float32 [T, V].

    path_token_TD: drafted tokens from the root's child down to the place itself (-1: none; the root has none).
    mask_TV: added, 0 or -inf. The repetition rule is Hugging Face's: x * r below zero, x / r above.
    """
    if state.output_count_SV.shape[1]:
        count_TV = state.output_count_SV[seat_T]
        count_TV = count_TV.scatter_add_(1, path_token_TD.clamp(min=0), (path_token_TD >= 0).to(torch.int32))
        out_TV = count_TV > 0
        r_T1 = state.repetition_S[seat_T].unsqueeze(1)
        # One term is 0. A `where` on the sign costs a CPU 5 times as much (mispredicted branches, 2026-11).
        scaled_TV = logits_TV.clamp(max=0) * r_T1 + logits_TV.clamp(min=0) / r_T1
        logits_TV = torch.where(state.prompt_seen_SV[seat_T] | out_TV, scaled_TV, logits_TV)
        logits_TV = logits_TV - state.frequency_S[seat_T].unsqueeze(1) * count_TV
        logits_TV = logits_TV - state.presence_S[seat_T].unsqueeze(1) * out_TV
    if state.bias_token_SB.shape[1]:
        logits_TV = logits_TV.scatter_add(1, state.bias_token_SB[seat_T].clamp(min=0), state.bias_value_SB[seat_T])
    return logits_TV if mask_TV is None else logits_TV + mask_TV


def _cut(x_TK: Tensor, weight_TK: Tensor, need_T1: Tensor) -> Tensor:
    """Shortest prefix, by value and then lower position, whose weights reach `need`; bool [T, K].

    Equal values have equal weights, or 0. weight, need: int64, 1 <= need <= total. Radix selection with integer
    histograms: no sort (5 ms a row of 49152 on a CPU core, 2026-11), and sums that no order changes.
    """
    key_TK = ~_sortable(x_TK).to(torch.int64)
    low_T1, before_T1 = torch.full_like(need_T1, -(2**31)), need_T1
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        # Bucket 0 is all that comes before the range, the last one all that comes after it.
        bucket_TK = (key_TK - low_T1).bitwise_right_shift_(shift).clamp_(-1, 2**bits).add_(1)
        hist_TN = torch.zeros(len(x_TK), 2**bits + 2, dtype=torch.int64, device=x_TK.device)
        reach_TN = hist_TN.scatter_add_(1, bucket_TK, weight_TK).cumsum(1)
        place_T1 = (reach_TN < need_T1).sum(1, keepdim=True) - 1
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
class _Kept:
    """What the filters keep: top-k (None: not asked), top-p of that, and all of them with greedy rows whole."""

    by_k_TK: Tensor | None
    by_p_TK: Tensor
    all_TK: Tensor


def _filter(x_TK: Tensor, state: SamplerState, seat_T: Tensor, with_top_k: bool) -> _Kept:
    """Top-k, then top-p of what is left, then min-p. x: logits over temperature, in any order that breaks ties."""
    seat_T1 = seat_T.unsqueeze(1)
    by_k_TK = _top_k(x_TK, state.top_k_S[seat_T1]) if with_top_k else None
    by_p_TK = _top_p(x_TK, by_k_TK, state.top_p_S[seat_T1])
    all_TK = by_p_TK & (x_TK >= _min_p_edge(x_TK, state.min_p_S[seat_T1]))
    return _Kept(by_k_TK, by_p_TK, all_TK | (state.temperature_S[seat_T1] == 0))


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
    return torch.where(_filter(x_TV, state, seat_T, True).all_TK, x_TV, _NEG_INF)


# ---- draws ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One token per place, [T] each. Distances are in logits (perturbed scores times temperature).

    gap: to the runner-up (inf and -1 where there is none). edge_gap: to the nearest filter edge whose move
    brings `edge_token` in before the drawn token, or puts the drawn token out; inf and -1 where none would, or
    where edges were not asked for.
    top_logit: largest logit after penalties.
    """

    token_T: Tensor
    gap_T: Tensor
    runner_up_T: Tensor
    top_logit_T: Tensor
    edge_gap_T: Tensor
    edge_token_T: Tensor


def _unfiltered(value_T2: Tensor, id_T2: Tensor, top_T: Tensor, scale_T: Tensor) -> Draw:
    """A draw that no filter had a part in."""
    gap_T = (value_T2[:, 0] - value_T2[:, 1]) * scale_T
    runner_up_T = torch.where(gap_T < _INF, id_T2[:, 1], -1)
    return Draw(id_T2[:, 0], gap_T, runner_up_T, top_T, torch.full_like(gap_T, _INF), torch.full_like(runner_up_T, -1))


def greedy(logits_TV: Tensor) -> Draw:
    """Argmax of float32 logits [T, V]."""
    value_T2, id_T2 = _top_two(logits_TV)
    return _unfiltered(value_T2, id_T2, value_T2[:, 0], torch.ones_like(value_T2[:, 0]))


def greedy_rescored(logits_TV: Tensor, hidden_TH: Tensor, rescore: RescoreFn) -> Draw:
    """Argmax of unrounded logits among the best few (exact ties by id) of logits that were rounded to bf16."""
    _, id_TK = top_ordered(logits_TV, min(GREEDY_RESCORED, logits_TV.shape[1]))
    id_TK = id_TK.sort(dim=1).values
    value_T2, place_T2 = _top_two(rescore(hidden_TH, id_TK))
    id_T2 = id_TK.gather(1, place_T2.clamp(max=id_TK.shape[1] - 1))
    return _unfiltered(value_T2, id_T2, value_T2[:, 0], torch.ones_like(value_T2[:, 0]))


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
    value_T2, id_T2 = _top_two(_scores(_temper(logits_TV, temperature_T), noise_TV, temperature_T))
    return _unfiltered(value_T2, id_T2, logits_TV.amax(1), _scale(temperature_T))


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
    kept = _filter(x_TK, state, seat_T, with_top_k)
    score_TK = _scores(x_TK, noise_TK, temperature_T)
    value_T2, place_T2 = _top_two(torch.where(kept.all_TK, score_TK, _NEG_INF))
    place_T2 = place_T2.clamp(max=id_TK.shape[1] - 1)
    drawn = _unfiltered(value_T2, id_TK.gather(1, place_T2), logits_TK.amax(1), _scale(temperature_T))
    if not edges:
        return drawn
    edge_T1, place_T1 = _nearest_edge(_edges(x_TK, kept, state, seat_T), x_TK, kept, score_TK, place_T2[:, :1])
    edge_T = torch.where(temperature_T > 0, edge_T1.squeeze(1) * temperature_T, _INF)
    edge_token_T = torch.where(edge_T < _INF, id_TK.gather(1, place_T1).squeeze(1), -1)
    return replace(drawn, edge_gap_T=edge_T, edge_token_T=edge_token_T)


# ---- edges ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Edge:
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


def _edge(x_TK: Tensor, keep_TK: Tensor, leave: Tensor | float = _INF, enter: Tensor | float = _INF) -> _Edge:
    inside_T1 = torch.where(keep_TK, x_TK, _INF).amin(1, keepdim=True)
    outside_T1 = torch.where(keep_TK, _NEG_INF, x_TK).amax(1, keepdim=True)
    return _Edge(keep_TK, inside_T1, outside_T1, leave, enter)


def _odds(share: Tensor) -> Tensor:
    return (share.log() - (-share).log1p()).to(torch.float32)


def _edges(x_TK: Tensor, kept: _Kept, state: SamplerState, seat_T: Tensor) -> list[_Edge]:
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
    edges = [_edge(x_TK, kept.by_p_TK, leave_T1, enter_T1), _Edge(x_TK >= min_p_T1, min_p_T1, min_p_T1)]
    return edges if kept.by_k_TK is None else [_edge(x_TK, kept.by_k_TK), *edges]


def _nearest_edge(
    edges: list[_Edge], x_TK: Tensor, kept: _Kept, score_TK: Tensor, winner_T1: Tensor
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


# ---- head -------------------------------------------------------------------------------------------------


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

    seat, position int64 [T]; path_token int64 [T, D] (see `penalise`). `rescore` for heads that round.
    """
    parts = []
    for start in range(0, hidden_TH.shape[0], group):
        at = slice(start, start + group)
        hidden_GH, mask_GV = hidden_TH[at], None if mask_TV is None else mask_TV[at]
        logits_GV = logits_fn(hidden_GH)
        if kind == "argmax" and mask_GV is None:
            parts.append(greedy_rescored(logits_GV, hidden_GH, rescore) if rescore else greedy(logits_GV))
            continue
        logits_GV = rescored(logits_GV, hidden_GH, rescore) if rescore else logits_GV
        logits_GV = penalise(logits_GV, state, seat_T[at], path_token_TD[at], mask_GV)
        parts.append(draw(logits_GV, state, seat_T[at], position_T[at], kind, edges))
    return _joined(parts)


def _joined(parts: list[Draw]) -> Draw:
    if len(parts) == 1:
        return parts[0]
    return Draw(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Draw)))
