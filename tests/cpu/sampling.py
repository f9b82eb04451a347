# Owns: what the tests of sampling share: seats, filters by transformers, and statistics.
# Promises: oracles use nothing of ops but the state's layout.
# Never: tests.
"""Set-up and oracles for tests of sampling."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops.penalties import SamplerState, write_seat
from ratoon.ops.sample import Draw

KINDS: tuple[SamplerKind, ...] = ("plain", "nucleus", "narrow", "general")
ALL_FILTERS = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05)
FILTER_CASES = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.7, top_k=40),
    SamplingParams(temperature=1.0, top_k=10_000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.3),
    SamplingParams(temperature=1.0, top_p=1e-18),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=2.0, min_p=1.0),
    SamplingParams(temperature=1.3, top_k=30, top_p=0.7),
    SamplingParams(temperature=1.3, top_k=300, top_p=0.95, min_p=0.02),
]


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def state_for(vocab: int, params: list[SamplingParams], penalties: bool = False, max_bias: int = 0) -> SamplerState:
    """Seats 1.. for the given parameters (seed: theirs, or the seat), seat 0 left as the dummy."""
    state = SamplerState.allocate(len(params) + 1, vocab, max_bias, penalties)
    for seat, each in enumerate(params, 1):
        seed = seat if each.seed is None else each.seed
        write_seat(state, seat, each, torch.zeros(0, dtype=torch.int64), seed)
    return state


def places(num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seats 1..num, positions, and empty paths."""
    seat_T = torch.arange(1, num + 1)
    return seat_T, torch.arange(num) * 3 + 40, torch.full((num, 4), -1)


def label(params: SamplingParams) -> str:
    return f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


def hugging_face(x_TV: Tensor, params: SamplingParams) -> Tensor:
    """The same filters by transformers, in METHOD's order."""
    ids = torch.zeros(len(x_TV), 0, dtype=torch.int64)
    x_TV = hf.TemperatureLogitsWarper(params.temperature)(ids, x_TV)  # type: ignore[arg-type]
    if params.top_k > 0:
        x_TV = hf.TopKLogitsWarper(params.top_k)(ids, x_TV)  # type: ignore[arg-type]
    if params.top_p < 1:
        x_TV = hf.TopPLogitsWarper(params.top_p)(ids, x_TV)  # type: ignore[arg-type]
    if params.min_p > 0:
        x_TV = hf.MinPLogitsWarper(params.min_p)(ids, x_TV)  # type: ignore[arg-type]
    return x_TV


def by_value_then_id(row: Tensor, k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:k]


def assert_same(left: Draw, right: Draw, rows: slice = slice(None)) -> None:
    for each in fields(Draw):
        assert torch.equal(getattr(left, each.name), getattr(right, each.name)[rows]), each.name


def chi_square(token_T: Tensor, probability_V: Tensor) -> tuple[float, float]:
    """(statistic, bound at 1e-4 by Wilson-Hilferty)."""
    counts_V = torch.bincount(token_T, minlength=len(probability_V)).double()
    expected_V = probability_V.double() * len(token_T)
    assert counts_V[expected_V == 0].sum() == 0
    live = expected_V > 0
    freedom = int(live.sum()) - 1
    spread = 2 / (9 * freedom)
    bound = freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
    return float(((counts_V - expected_V)[live] ** 2 / expected_V[live]).sum()), bound


def over_seeds(state: SamplerState, num: int) -> SamplerState:
    """Seat 1 of a state, once for each of `num` seeds."""
    seats = {each.name: getattr(state, each.name)[1:2].repeat_interleave(num, 0) for each in fields(SamplerState)}
    return SamplerState(**{**seats, "seed_S": torch.arange(num) * 7919})
