# Owns: the Triton twins of ops/penalties.py.
# Promises: equal to the references bit for bit; a row that asks for nothing costs no pass over the vocabulary.
# Never: makes a tensor of places x vocabulary: logits are changed where they are.
"""Penalties, biases and counts. T: places, V: vocabulary, S: seats, D: drafted tokens on a path, B: bias entries,
R: rows, E: emitted tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.kernels.order import TILE
from ratoon.ops.launch import launch
from ratoon.ops.penalties import SamplerState


@triton.jit(do_not_specialize=["depth"])
def _penalise(
    x_TV,
    seat_T,
    repetition_S,
    presence_S,
    frequency_S,
    seen_SV,
    count_SV,
    path_TD,
    depth,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seat = tl.load(seat_T + row)
    repetition, presence = tl.load(repetition_S + seat), tl.load(presence_S + seat)
    frequency = tl.load(frequency_S + seat)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        id_W = part * TILE + tl.arange(0, TILE)
        inside_W = id_W < V
        x_W = tl.load(x_TV + row * V + id_W, mask=inside_W, other=0.0)
        seen_W = tl.load(seen_SV + seat * V + id_W, mask=inside_W, other=0) != 0
        count_W = tl.load(count_SV + seat * V + id_W, mask=inside_W, other=0)
        for step in range(depth):
            count_W += (id_W == tl.load(path_TD + row * depth + step)).to(tl.int32)
        out_W = count_W > 0
        scaled_W = tl.minimum(x_W, 0.0) * repetition + tl.div_rn(tl.maximum(x_W, 0.0), repetition)
        x_W = tl.where(seen_W | out_W, scaled_W, x_W) - frequency * count_W.to(tl.float32)
        tl.store(x_TV + row * V + id_W, x_W - presence * out_W.to(tl.float32), mask=inside_W)


@triton.jit
def _bias(x_TV, seat_T, token_SB, value_SB, V: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    entry_B = tl.arange(0, BP)
    place_B = tl.load(seat_T + row) * B + entry_B
    token_B = tl.load(token_SB + place_B, mask=entry_B < B, other=-1)
    real_B = token_B >= 0
    value_B = tl.load(value_SB + place_B, mask=real_B, other=0.0)
    x_B = tl.load(x_TV + row * V + token_B, mask=real_B, other=0.0)
    tl.store(x_TV + row * V + token_B, x_B + value_B, mask=real_B)


@triton.jit(do_not_specialize=["num_emitted"])
def _count(count_SV, seat_R, token_RE, num_emitted, V: tl.constexpr, EP: tl.constexpr):
    row = tl.program_id(0)
    step_E = tl.arange(0, EP)
    token_E = tl.load(token_RE + row * num_emitted + step_E, mask=step_E < num_emitted, other=-1)
    tl.atomic_add(count_SV + tl.load(seat_R + row) * V + token_E, 1, mask=token_E >= 0)


def penalise_own(
    logits_TV: Tensor, state: SamplerState, seat_T: Tensor, path_token_TD: Tensor, mask_TV: Tensor | None = None
) -> Tensor:
    """As ops/penalties.py; contiguous logits are changed in place."""
    logits_TV = logits_TV.contiguous()
    num_places, vocab = logits_TV.shape
    if state.output_count_SV.shape[1]:
        launch(
            _penalise,
            (-(-vocab // TILE), num_places),
            *(logits_TV, seat_T, state.repetition_S, state.presence_S, state.frequency_S),
            *(state.prompt_seen_SV.view(torch.uint8), state.output_count_SV, path_token_TD.contiguous()),
            path_token_TD.shape[1],
            V=vocab,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    num_bias = state.bias_token_SB.shape[1]
    if num_bias:
        launch(
            _bias,
            (num_places,),
            *(logits_TV, seat_T, state.bias_token_SB, state.bias_value_SB),
            V=vocab,
            B=num_bias,
            BP=triton.next_power_of_2(num_bias),
            num_warps=4,
        )
    return logits_TV if mask_TV is None else logits_TV.add_(mask_TV)


def count_tokens(state: SamplerState, seat_R: Tensor, token_RE: Tensor) -> None:
    """As ops/penalties.py."""
    vocab = state.output_count_SV.shape[1]
    if vocab:
        num_rows, num_emitted = token_RE.shape
        launch(
            _count,
            (num_rows,),
            *(state.output_count_SV, seat_R, token_RE.contiguous(), num_emitted),
            V=vocab,
            EP=triton.next_power_of_2(num_emitted),
            num_warps=1,
        )
