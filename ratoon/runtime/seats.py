# Owns: seating a request on the device: one record of words from the host, unpacked into the seat's state.
# Promises: a record overwrites all that the last tenant left; nothing waits for rounds in flight.
# Never: decides who gets a seat.
"""Seat records. S: seats, P: pages of a row, E: stop ids, B: bias entries, W: words of 8 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.ops.sample import SamplerState
from ratoon.spec.state import SeatState

_INTS = ("done_S", "start_S", "anchor_S", "limit_S", "budget_S", "topk_cap_S", "top_k_S", "seed_S", "sample_index_S")
_REALS = ("temperature_S", "top_p_S", "min_p_S", "repetition_S", "presence_S", "frequency_S")
_LISTS = ("stop_id_SE", "page_table_SP", "bias_token_SB", "bias_value_SB")
_HISTORY = ("prompt_seen_SV", "output_count_SV")


@dataclass(frozen=True)
class Tenant:
    """What a seat is told of its request: the row starts at its last prompt token; no token past number limit - 1."""

    prompt: Sequence[int]
    pages: Sequence[int] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Sequence[int] = ()
    seed: int = 0
    limit: int = 1
    budget: int = 0
    topk_cap: int = 1
    done: bool = False


DUMMY = Tenant(prompt=(0,), limit=0, done=True)
"""Seat 0's tenant: what capture and warm-up seat."""


class SeatRecords:
    """Composes records int64 [W] on the host and unpacks them on the device.

    Words: the seat, the integers, the reals as float64, then stop ids, pages, bias tokens, bias values (float64).
    """

    def __init__(self, state: SeatState) -> None:
        known = {*_INTS, *_REALS, *_LISTS, *_HISTORY, "round_number", "attend_counters", "sampler"}
        have = {each.name for holder in (SeatState, SamplerState) for each in fields(holder)}
        assert have == known, f"seat state that no record writes, or that is gone: {have ^ known}"
        self._state = {name: _tensor(state, name) for name in (*_INTS, *_REALS, *_LISTS)}
        self._vocab = state.sampler.output_count_SV.shape[1]
        self._seen, self._count = state.sampler.prompt_seen_SV, state.sampler.output_count_SV
        self._first_real = 1 + len(_INTS)
        begin = self._first_real + len(_REALS)
        self._at: dict[str, slice] = {}
        for name in _LISTS:
            self._at[name] = slice(begin, begin := begin + self._state[name].shape[1])
        self.words = begin

    @classmethod
    def num_words(cls, stop_ids: int, pages: int, bias: int) -> int:
        """Words of a record, before there is a state to ask."""
        return 1 + len(_INTS) + len(_REALS) + stop_ids + pages + 2 * bias

    def compose(self, seat: int, tenant: Tenant) -> np.ndarray:
        """int64 [W]."""
        words = np.zeros(self.words, dtype=np.int64)
        reals, params, at = words.view(np.float64), tenant.params, self._at
        seed = tenant.seed - 2**64 if tenant.seed >= 2**63 else tenant.seed
        words[: self._first_real] = (
            *(seat, tenant.done, len(tenant.prompt) - 1, tenant.prompt[-1], tenant.limit, tenant.budget),
            *(tenant.topk_cap, max(params.top_k, 0), seed, params.sample_index),
        )
        reals[self._first_real : self._first_real + len(_REALS)] = (
            *(params.temperature, params.top_p, params.min_p),
            *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        )
        words[at["stop_id_SE"]] = -1
        words[at["bias_token_SB"]] = -1
        _lay(words[at["stop_id_SE"]], tenant.stop_ids, "stop ids")
        _lay(words[at["page_table_SP"]], tenant.pages, "pages")
        if params.logit_bias:
            _lay(words[at["bias_token_SB"]], list(params.logit_bias), "entries of logit_bias")
            _lay(reals[at["bias_value_SB"]], list(params.logit_bias.values()), "entries of logit_bias")
        return words

    def unpack(self, words_W: Tensor) -> None:
        """A record into its seat's state, without a token in its history; what a graph of kind 'seat' captures."""
        seat = words_W[:1]
        for column, name in enumerate(_INTS, start=1):
            self._write(name, seat, words_W[column : column + 1])
        for column, name in enumerate(_REALS, start=self._first_real):
            self._write(name, seat, words_W[column : column + 1].view(torch.float64))
        for name in _LISTS:
            values = words_W[self._at[name]]
            self._write(name, seat, (values.view(torch.float64) if name == "bias_value_SB" else values).unsqueeze(0))
        self._count.index_fill_(0, seat, 0)
        self._seen.index_fill_(0, seat, False)

    def _write(self, name: str, seat: Tensor, value: Tensor) -> None:
        state = self._state[name]
        state.index_copy_(0, seat, value.to(state.dtype))

    def compose_history(self, seat: int, prompt: Sequence[int], width: int) -> np.ndarray:
        """int64 [1 + width]: the seat, and the prompt with its last token repeated."""
        words = np.full(1 + width, prompt[-1], dtype=np.int64)
        words[0], words[1 : 1 + len(prompt)] = seat, prompt
        return words

    def unpack_history(self, words_W: Tensor) -> None:
        """Marks the tokens of a seat's prompt, after its record. Only a row with penalties needs it."""
        self._seen.view(-1).index_fill_(0, words_W[1:] + words_W[:1] * self._vocab, True)


def _tensor(state: SeatState, name: str) -> Tensor:
    return getattr(state if hasattr(state, name) else state.sampler, name)


def _lay(part: np.ndarray, values: Sequence[float], what: str) -> None:
    assert len(values) <= len(part), f"{len(values)} {what}, but a seat holds {len(part)}"
    part[: len(values)] = values
