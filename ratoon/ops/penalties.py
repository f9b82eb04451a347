# Owns: what a draw needs to know of each seat, and the penalties and biases that follow from it.
# Promises: a seat forgets its last tenant; drafted tokens on a path count as if they were committed.
# Never: reads a value on the host.
"""Sampler state and penalties (METHOD section 3). T: places, V: vocabulary, S: seats, R: rows.

D: drafted tokens on a path, E: emitted tokens, B: bias entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.ops.launch import wants_kernel


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
    if wants_kernel(token_RE):
        from ratoon.ops.kernels import penalties

        return penalties.count_tokens(state, seat_R, token_RE)
    vocab = state.output_count_SV.shape[1]
    if vocab:
        index_RE = seat_R.unsqueeze(1) * vocab + token_RE.clamp(min=0)
        real_RE = (token_RE >= 0).to(torch.int32)
        state.output_count_SV.view(-1).scatter_add_(0, index_RE.flatten(), real_RE.flatten())


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


def penalise_own(
    logits_TV: Tensor, state: SamplerState, seat_T: Tensor, path_token_TD: Tensor, mask_TV: Tensor | None = None
) -> Tensor:
    """As `penalise`, for logits that nobody else reads: they may be written over."""
    if wants_kernel(logits_TV):
        from ratoon.ops.kernels import penalties

        return penalties.penalise_own(logits_TV, state, seat_T, path_token_TD, mask_TV)
    return penalise(logits_TV, state, seat_T, path_token_TD, mask_TV)
