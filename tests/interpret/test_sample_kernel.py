# Owns: the Triton twins of draws, filters, noise, penalties and counts.
# Promises: equal to the references in all fields of a draw; memory around logits is NaN, so is unwritten memory.
# Never: needs a GPU.
"""ops/kernels/{sample,filters,noise,penalties}.py against the torch references."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops import noise, penalties, sample
from ratoon.ops.kernels.noise import gumbel_at, gumbel_chunks
from ratoon.ops.launch import Kernels, launch, set_recorder, use_kernels
from ratoon.ops.sample import Draw, SamplerState
from tests.cpu.sampling import ALL_FILTERS, FILTER_CASES, assert_same, places, random_logits, state_for

NARROW_CASES = [
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=64, top_p=0.7),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.999, min_p=0.05),
    SamplingParams(top_k=3, top_p=0.2),
]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Outputs and scratch hold NaN, or the largest integer, before they are written."""
    torch.use_deterministic_algorithms(True)
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    use_kernels("auto")
    set_recorder(None)


def among_nan(x: Tensor) -> Tensor:
    around = torch.full((x.numel() + 64,), math.nan)
    around[32:-32] = x.flatten()
    return around[32:-32].view(x.shape)


def both(x_TV: Tensor, state: SamplerState, kind: SamplerKind) -> tuple[Draw, Draw]:
    """(kernel, reference) for seats 1.. of a state."""
    seat_T, position_T, _ = places(len(x_TV))
    use_kernels("triton")
    ours = sample.draw(among_nan(x_TV), state, seat_T, position_T, kind, edges=False)
    use_kernels("torch")
    return ours, sample.draw(x_TV, state, seat_T, position_T, kind, edges=False)


# ---- noise ------------------------------------------------------------------------------------------------


@triton.jit
def _noise(out_CW, at_K, id_K, seed, sample, position, C: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    chunk_C = 5 + tl.arange(0, C)
    value_CW = gumbel_chunks(tl.load(seed), tl.load(sample), tl.load(position), chunk_C, W)
    tl.store(out_CW + tl.arange(0, C)[:, None] * W + tl.arange(0, W)[None, :], value_CW)
    k = tl.arange(0, K)
    tl.store(at_K + k, gumbel_at(tl.load(seed), tl.load(sample), tl.load(position), tl.load(id_K + k)))


@pytest.mark.parametrize(("seed", "position"), [(7, 40), (2**40 + 3, 2**31 + 11), (-5, 0)])
def test_noise_equals_the_reference(seed: int, position: int) -> None:
    out_CW, at_K = torch.empty(16, 128), torch.empty(64)
    id_K = torch.randint(0, 151936, (64,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    key = (torch.tensor([seed]), torch.tensor([3]), torch.tensor([position]))
    launch(_noise, (1,), out_CW, at_K, id_K, *key, C=16, W=128, K=64)
    expected = noise.gumbel_noise(*key, 21 * 128)[0, 5 * 128 :]
    ulps = (out_CW.flatten().view(torch.int32) - expected.view(torch.int32)).abs()
    assert int(ulps.max()) <= 2 and int((ulps > 0).sum()) <= 1  # a word apart would be thousands
    expected = noise.gumbel_at(*key, id_K.long().unsqueeze(0))[0]
    assert int((at_K.view(torch.int32) - expected.view(torch.int32)).abs().max()) <= 2


# ---- draws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 5, 130, 2048, 4999])
def test_greedy_equals_the_reference(vocab: int) -> None:
    x_TV = random_logits(6, vocab)
    x_TV[1] = x_TV[1].round()
    x_TV[2] = -math.inf
    x_TV[2, vocab // 2] = 1.0
    x_TV[3] = -0.0
    x_TV[3, vocab - 1] = 0.0
    x_TV[4, vocab - 1] = x_TV[4, 0] = 30.0
    x_TV[5, : min(vocab, 3)] = torch.tensor([20.0, 22.0, 21.0])[:vocab]  # all three in one chunk
    assert_same(*both(x_TV, state_for(vocab, [SamplingParams()] * 6), "greedy"))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "nucleus", "general"])
def test_draws_equal_the_reference(kind: SamplerKind, rounded: bool) -> None:
    """Rounded logits tie at the edges of filters."""
    rows = [*FILTER_CASES, SamplingParams(top_k=2, top_p=0.1, min_p=0.9), ALL_FILTERS]
    x_TV = random_logits(len(rows), 700, seed=3)
    assert_same(*both(x_TV.round() if rounded else x_TV, state_for(700, rows), kind))


@pytest.mark.parametrize("kind", ["plain", "nucleus", "general"])
def test_draws_over_several_programs_per_row(kind: SamplerKind) -> None:
    rows = [SamplingParams(temperature=2.5, top_k=1500, top_p=0.98), SamplingParams(temperature=0.7, top_p=0.5)]
    x_TV = random_logits(2, 4999, seed=4, scale=1.0)
    x_TV[1] = (x_TV[1] * 2).round()
    assert_same(*both(x_TV, state_for(4999, rows), kind))


@pytest.mark.parametrize("rounded", [False, True])
def test_narrow_draws_equal_the_reference(rounded: bool) -> None:
    x_TV = random_logits(4, 700, seed=5)
    assert_same(*both(x_TV.round() if rounded else x_TV, state_for(700, NARROW_CASES), "narrow"))


def test_a_narrow_draw_from_few_tokens() -> None:
    assert_same(*both(random_logits(4, 11, seed=6), state_for(11, NARROW_CASES), "narrow"))


@pytest.mark.parametrize(
    ("options", "survivors"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.5}, 2500),
        ({"top_k": 3000, "top_p": 0.5}, 1500),
        ({"top_k": 4097, "top_p": 0.9999}, 4097),
        ({"min_p": 1.0}, 5000),
    ],
)
def test_among_equal_logits_the_lowest_ids_stay(options: dict[str, float], survivors: int) -> None:
    """All of a row tie, over several programs and several steps of the search for the last tie."""
    params = SamplingParams(temperature=1.0, **options)  # type: ignore[arg-type]
    ours, reference = both(torch.full((1, 5000), 2.5), state_for(5000, [params]), "general")
    assert_same(ours, reference)
    noise_V = noise.gumbel_noise(torch.tensor([1]), torch.tensor([0]), torch.tensor([40]), 5000)[0]
    assert int(ours.token_T) == int(noise_V[:survivors].argmax())


@pytest.mark.parametrize("inside", [True, False])
def test_the_tie_that_reaches_top_p_is_the_last_to_stay(inside: bool) -> None:
    """The best token is the last of the tied that top-p keeps, or the first that it cuts."""
    noise_V = noise.gumbel_noise(torch.tensor([1]), torch.tensor([0]), torch.tensor([40]), 5000)[0]
    best = int(noise_V.argmax())
    params = SamplingParams(temperature=1.0, top_p=(best + (0.5 if inside else -0.5)) / 5000)
    ours, reference = both(torch.zeros(1, 5000), state_for(5000, [params]), "nucleus")
    assert_same(ours, reference)
    assert (int(ours.token_T) == best) is inside


@pytest.mark.parametrize("kind", ["greedy", "plain", "nucleus", "general"])
def test_banned_and_broken_rows_draw_tokens_of_the_vocabulary(kind: SamplerKind) -> None:
    x_TV = random_logits(4, 300)
    x_TV[0] = -math.inf
    x_TV[0, 77] = -3.0
    x_TV[1, 5] = math.nan
    x_TV[2] = -torch.tensor(math.nan)
    x_TV[3] = -math.inf
    params = SamplingParams() if kind == "greedy" else SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1)
    ours, _ = both(x_TV, state_for(300, [params] * 4), kind)
    assert (int(ours.token_T[0]), int(ours.runner_up_T[0]), float(ours.gap_T[0])) == (77, -1, math.inf)
    for each in (ours.token_T, ours.runner_up_T, ours.third_T):
        assert ((each >= -1) & (each < 300)).all()
    assert (ours.token_T >= 0).all()


def test_the_same_bits_twice() -> None:
    x_TV, state = random_logits(3, 700), state_for(700, [ALL_FILTERS] * 3)
    assert_same(both(x_TV, state, "general")[0], both(x_TV, state, "general")[0])


# ---- penalties --------------------------------------------------------------------------------------------


def history(vocab: int) -> tuple[SamplerState, Tensor]:
    """Three seats with penalties, one with a bias alone, one with nothing; and paths."""
    rows = [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, logit_bias={0: 2.0, vocab - 1: -1.5}),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.3),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(logit_bias={7: 3.0}),
        SamplingParams(),
    ]
    state = state_for(vocab, rows, penalties=True, max_bias=3)
    generator = torch.Generator().manual_seed(vocab)
    state.prompt_seen_SV.copy_(torch.rand(6, vocab, generator=generator) < 0.2)
    state.output_count_SV.copy_(torch.randint(-3, 4, (6, vocab), generator=generator).clamp(min=0))
    path_TD = torch.randint(-1, vocab, (5, 7), generator=generator)
    path_TD[1, 2:] = path_TD[1, 1]
    return state, path_TD


@pytest.mark.parametrize("vocab", [40, 2500])
def test_penalties_equal_the_reference(vocab: int) -> None:
    state, path_TD = history(vocab)
    x_TV, seat_T = random_logits(5, vocab), torch.arange(1, 6)
    mask_TV = torch.where(random_logits(5, vocab, seed=1) > 2, -math.inf, 0.0)
    for mask in (None, mask_TV):
        expected_TV = penalties.penalise(x_TV, state, seat_T, path_TD, mask)
        use_kernels("triton")
        own_TV = among_nan(x_TV)
        assert torch.equal(penalties.penalise_own(own_TV, state, seat_T, path_TD, mask), expected_TV)
        assert torch.equal(penalties.penalise_own(x_TV.T.contiguous().T, state, seat_T, path_TD, mask), expected_TV)
        use_kernels("torch")


def test_a_state_without_penalties_or_bias_changes_nothing() -> None:
    x_TV, (seat_T, _, path_TD) = random_logits(2, 50), places(2)
    use_kernels("triton")
    state = state_for(50, [SamplingParams()] * 2)
    assert torch.equal(penalties.penalise_own(x_TV.clone(), state, seat_T, path_TD), x_TV)
    penalties.count_tokens(state, seat_T, path_TD)


def test_counts_equal_the_reference() -> None:
    state, seat_R = SamplerState.allocate(4, 9, 0, True), torch.tensor([2, 1, 0, 0])
    token_RE = torch.tensor([[4, 4, -1], [0, -1, -1], [8, 8, 8], [8, -1, 2]])
    penalties.count_tokens(state, seat_R, token_RE)
    expected_SV = state.output_count_SV.clone()
    use_kernels("triton")
    penalties.count_tokens(state, seat_R, token_RE)
    assert torch.equal(state.output_count_SV, 2 * expected_SV)


# ---- all of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "plain", "nucleus", "narrow", "general"])
def test_recorded_launches_draw_from_new_values(kind: SamplerKind) -> None:
    """What a captured graph does: the launches again, with their tensors as they then are, and nothing else."""
    params = SamplingParams(temperature=0.0 if kind == "greedy" else 1.1, top_k=9, top_p=0.9, presence_penalty=0.5)
    state, calls = state_for(60, [params] * 2, penalties=True, max_bias=2), []
    x_TV, (seat_T, position_T, path_TD) = random_logits(2, 60), places(2)

    def step(own_TV: Tensor) -> Draw:
        own_TV = penalties.penalise_own(own_TV, state, seat_T, path_TD)
        return sample.draw(own_TV, state, seat_T, position_T, kind, edges=False)

    use_kernels("triton")
    set_recorder(lambda run, *args: (calls.append((run, args)), run(*args))[1])
    own_TV = x_TV.clone()
    ours = step(own_TV)
    set_recorder(None)
    x_TV = random_logits(2, 60, seed=8)
    position_T.add_(7)
    state.output_count_SV.copy_(torch.arange(60) % 3)
    for each in fields(Draw):
        getattr(ours, each.name).zero_()
    own_TV.copy_(x_TV)
    for run, args in calls:
        run(*args)
    use_kernels("torch")
    assert_same(ours, step(x_TV))


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow"])
def test_places_in_groups_equal_the_reference(kind: SamplerKind) -> None:
    greedy = kind in ("argmax", "greedy")
    params = SamplingParams(temperature=0.0 if greedy else 1.1, top_k=9, top_p=0.9, repetition_penalty=1.2)
    state, path_TD = history(60)
    for seat in range(1, 6):
        penalties.write_seat(state, seat, params, torch.arange(seat, 60, 7), seat)
    x_TV, (seat_T, position_T, _) = random_logits(5, 60), places(5)
    drawn: list[Draw] = []
    choices: tuple[Kernels, ...] = ("triton", "torch")
    for kernels in choices:
        use_kernels(kernels)
        given = (x_TV, torch.clone, state, seat_T, position_T, path_TD)
        drawn.append(sample.sample_places(*given, kind, group=2, edges=False))
    assert_same(drawn[0], drawn[1])


def test_a_draw_has_all_fields() -> None:
    ours, reference = both(random_logits(2, 50), state_for(50, [SamplingParams()] * 2), "greedy")
    for each in fields(Draw):
        assert getattr(ours, each.name).dtype == getattr(reference, each.name).dtype
        assert getattr(ours, each.name).is_contiguous()
