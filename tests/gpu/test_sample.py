# Owns: candidates, draws, penalties and counts on a GPU, at the vocabularies of known models.
# Promises: the tokens of the torch references, ties included; bits repeat; memory starts as NaN.
# Never: measures speed.
"""ops/kernels/{rank,sample,filters,penalties}.py. T: places, V: vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch on a GPU machine")

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops import penalties, sample, tree
from ratoon.ops.launch import use_kernels
from ratoon.ops.sample import Draw, SamplerState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARIES = [151936, 49152, 50257]
Result = TypeVar("Result")
FILTERED = [
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.5, min_p=0.02),
    SamplingParams(temperature=1.3, min_p=0.1),
    SamplingParams(),
    SamplingParams(temperature=1.6, top_p=0.999),
    SamplingParams(temperature=1.0, top_p=1e-18),
    SamplingParams(temperature=2.0),
]
TOP_K = [
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.0, top_k=65, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=1.4, top_k=30000, top_p=0.97),
]
NARROW = [
    SamplingParams(temperature=1.0, top_k=64),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(),
]
CASES: list[tuple[SamplerKind, list[SamplingParams]]] = [
    ("greedy", [SamplingParams()] * 5),
    ("plain", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.3), SamplingParams()]),
    ("nucleus", FILTERED),
    ("general", FILTERED + TOP_K),
    ("narrow", NARROW),
]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    use_kernels("auto")


def by_kernel(function: Callable[[], Result]) -> Result:
    """Deterministic mode fills what torch allocates with NaN; the references have operations that it refuses."""
    use_kernels("triton")
    torch.use_deterministic_algorithms(True)
    result = function()
    torch.use_deterministic_algorithms(False)
    use_kernels("torch")
    return result


def logits(rows: int, vocab: int, rounded: bool = False) -> Tensor:
    x_TV = torch.randn(rows, vocab, device="cuda") * 3
    return x_TV.bfloat16().float() if rounded else x_TV


def state_of(rows: list[SamplingParams], vocab: int, penalised: bool = False) -> SamplerState:
    state = SamplerState.allocate(len(rows) + 1, vocab, 300, penalised, "cuda")
    for seat, params in enumerate(rows, 1):
        penalties.write_seat(state, seat, params, torch.arange(0, vocab, 5), 1234567 * seat)
    return state


def assert_same(ours: Draw, reference: Draw) -> None:
    for each in fields(Draw):
        assert torch.equal(getattr(ours, each.name), getattr(reference, each.name)), each.name


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("vocab", "rows", "k"), [(151936, 15, 16), (49152, 30, 16), (151936, 7, 63), (50257, 3, 127)])
def test_candidates(vocab: int, rows: int, k: int, rounded: bool) -> None:
    logits_NV = logits(rows, vocab, rounded)
    token_NK, logprob_NK = by_kernel(lambda: tree.rank_candidates(logits_NV, k))
    assert torch.equal(token_NK, tree.rank_candidates(logits_NV, k)[0])
    exact_NK = logits_NV.double().log_softmax(1).gather(1, token_NK)
    torch.testing.assert_close(logprob_NK.double(), exact_NK, rtol=0, atol=6e-6)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(("kind", "rows"), CASES, ids=[kind for kind, _ in CASES])
def test_draws(kind: SamplerKind, rows: list[SamplingParams], vocab: int, rounded: bool) -> None:
    """Bit for bit: the logarithms are float64's, so the float32 noise is that of the reference."""
    x_TV, state = logits(len(rows), vocab, rounded), state_of(rows, vocab)
    seat_T = torch.arange(1, len(rows) + 1, device="cuda")
    given = (x_TV, state, seat_T, seat_T * 1000 + 77, kind, False)
    ours = by_kernel(lambda: sample.draw(*given))
    assert_same(ours, sample.draw(*given))
    assert_same(by_kernel(lambda: sample.draw(*given)), ours)


def test_equal_logits_at_a_cut() -> None:
    rows = [SamplingParams(temperature=1.0, top_p=0.4), SamplingParams(temperature=1.0, top_k=70_000, top_p=0.5)]
    x_TV, state, seat_T = torch.ones(2, 151936, device="cuda"), state_of(rows, 151936), torch.tensor([1, 2]).cuda()
    given = (x_TV, state, seat_T, seat_T, "general", False)
    assert_same(by_kernel(lambda: sample.draw(*given)), sample.draw(*given))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_penalties_and_counts(vocab: int) -> None:
    rows = [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, logit_bias={0: 2.0, vocab - 1: -1.5}),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.3),
        SamplingParams(logit_bias={token: 0.1 * token for token in range(300)}),
        SamplingParams(),
    ]
    state, seat_T = state_of(rows, vocab, True), torch.tensor([1, 2, 3, 4, 2], device="cuda")
    token_RE = torch.randint(-1, vocab, (5, 64), device="cuda")
    expected = state_of(rows, vocab, True)
    use_kernels("torch")
    penalties.count_tokens(expected, seat_T, token_RE)
    by_kernel(lambda: penalties.count_tokens(state, seat_T, token_RE))
    assert torch.equal(state.output_count_SV, expected.output_count_SV)
    path_TD = torch.randint(-1, vocab, (5, 15), device="cuda")
    x_TV = logits(5, vocab)
    expected_TV = penalties.penalise(x_TV, state, seat_T, path_TD)
    ours_TV = by_kernel(lambda: penalties.penalise_own(x_TV.clone(), state, seat_T, path_TD))
    assert torch.equal(ours_TV, expected_TV)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = (FILTERED + TOP_K) * 13
    x_TV, state = logits(len(rows), 49152), state_of(rows, 49152)
    seat_T = torch.arange(1, len(rows) + 1, device="cuda")
    whole = by_kernel(lambda: sample.draw(x_TV, state, seat_T, seat_T, "general", False))
    for row in (0, 9, 100):
        at = slice(row, row + 1)
        alone = by_kernel(lambda at=at: sample.draw(x_TV[at], state, seat_T[at], seat_T[at], "general", False))
        for each in fields(Draw):
            assert torch.equal(getattr(alone, each.name), getattr(whole, each.name)[at]), each.name
