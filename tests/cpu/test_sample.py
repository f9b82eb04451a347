# Owns: the tests of ops/sample.py.
# Promises: each filter and penalty is held against an oracle written by others or in plain Python.
# Never: needs a model.
"""Noise, penalties, filters and draws."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import logits_process as hf

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.ops import sample
from ratoon.ops.sample import Draw, SamplerState
from ratoon.runtime.emulator import EmulatorBackend

WORD = 0xFFFFFFFF
KINDS: tuple[SamplerKind, ...] = ("plain", "nucleus", "narrow", "general")
ALL_FILTERS = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05)


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def state_for(vocab: int, params: list[SamplingParams], penalties: bool = False, max_bias: int = 0) -> SamplerState:
    """Seats 1.. for the given parameters (seed: theirs, or the seat), seat 0 left as the dummy."""
    state = SamplerState.allocate(len(params) + 1, vocab, max_bias, penalties)
    for seat, each in enumerate(params, 1):
        seed = seat if each.seed is None else each.seed
        sample.write_seat(state, seat, each, torch.zeros(0, dtype=torch.int64), seed)
    return state


def places(num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seats 1..num, positions, and empty paths."""
    seat_T = torch.arange(1, num + 1)
    return seat_T, torch.arange(num) * 3 + 40, torch.full((num, 4), -1)


# ---- noise ------------------------------------------------------------------------------------------------


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & WORD, (first >> 32) ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return tuple(c)


PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(  # Random123's known answers for philox4x32, 10 rounds
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    ours = sample.philox(tuple(torch.tensor([c]) for c in counter), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in ours) == words
    assert philox_in_python(counter, key) == words


@pytest.mark.parametrize("seed", [7, 2**40 + 3, -5])
def test_noise_is_philox_of_seed_sample_position_token(seed: int) -> None:
    position, index, vocab = 2**31 + 11, 3, 23
    noise_V = sample.gumbel_noise(torch.tensor([seed]), torch.tensor([index]), torch.tensor([position]), vocab)[0]
    assert noise_V.shape == (vocab,) and noise_V.dtype == torch.float32
    for token in range(vocab):
        words = philox_in_python((token // 4, position, index, 0), (seed & WORD, seed >> 32 & WORD))
        v = (words[token % 4] + 0.5) / 2**32
        assert math.isclose(float(noise_V[token]), -math.log(-math.log1p(-v)), rel_tol=1e-7, abs_tol=1e-9)


def test_noise_at_chosen_tokens_is_the_same_bits() -> None:
    seed_T, index_T, position_T = torch.tensor([1, -9]), torch.tensor([0, 2]), torch.tensor([5, 6])
    token_TK = torch.randint(0, 1003, (2, 50), generator=torch.Generator().manual_seed(1))
    full_TV = sample.gumbel_noise(seed_T, index_T, position_T, 1003)
    assert torch.equal(sample.gumbel_at(seed_T, index_T, position_T, token_TK), full_TV.gather(1, token_TK))


def test_gumbel_is_finite_and_finest_at_its_maximum() -> None:
    g = sample._gumbel(torch.tensor([0, 1, 2, 3, 2**32 - 2, 2**32 - 1]))
    assert torch.isfinite(g).all()
    assert float(g[0]) == pytest.approx(33 * math.log(2), rel=1e-7)
    assert (g[:4].diff() < -0.1).all()  # neighbouring words differ where the maximum is
    assert float(g[5]) == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)


def test_noise_follows_the_gumbel_law() -> None:
    row_T = torch.arange(8)
    noise = sample.gumbel_noise(row_T, torch.zeros_like(row_T), row_T * 100, 5000).flatten().double().sort().values
    expected = torch.exp(-torch.exp(-noise))
    steps = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
    assert float((expected - steps).abs().max()) < 1.63 / math.sqrt(len(noise))  # Kolmogorov-Smirnov, 1 %
    best = sample.gumbel_noise(torch.arange(400), torch.zeros(400, dtype=torch.int64), torch.arange(400), 5000).amax(1)
    assert float(best.mean()) == pytest.approx(math.log(5000) + 0.57722, abs=0.2)


# ---- order ------------------------------------------------------------------------------------------------


def by_value_then_id(row: Tensor, k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:k]


@pytest.mark.parametrize(("vocab", "k"), [(7, 3), (97, 97), (1024, 5), (1031, 6), (5000, 1), (5000, 30)])
def test_top_ordered_breaks_ties_by_id(vocab: int, k: int) -> None:
    x_TV = random_logits(4, vocab, scale=2.0).round()
    x_TV[1] = -0.0
    x_TV[1, vocab // 2] = 0.0
    x_TV[2] = -math.inf
    value_Tk, id_Tk = sample.top_ordered(x_TV, k)
    for row in range(4):
        assert id_Tk[row].tolist() == by_value_then_id(x_TV[row], k)
    assert torch.equal(value_Tk, x_TV.gather(1, id_Tk))


@pytest.mark.parametrize("vocab", [5, 128, 1000, 1024])
def test_greedy_is_argmax_with_gap_and_runner_up(vocab: int) -> None:
    x_TV = random_logits(6, vocab, scale=2.0)
    x_TV[1] = x_TV[1].round()
    x_TV[2] = 1.5
    x_TV[3, vocab - 1] = x_TV[3, 2] = 9.0
    x_TV[4] = -math.inf
    x_TV[4, 0] = 1.0
    x_TV[5, vocab - 2 :] = torch.tensor([20.0, 19.0])
    drawn = sample.greedy(x_TV)
    for row in (0, 1, 2, 3, 5):
        best, second = by_value_then_id(x_TV[row], 2)
        assert (int(drawn.token_T[row]), int(drawn.runner_up_T[row])) == (best, second)
        assert float(drawn.gap_T[row]) == float(x_TV[row, best] - x_TV[row, second])
        assert float(drawn.top_logit_T[row]) == float(x_TV[row, best])
    assert (int(drawn.token_T[4]), int(drawn.runner_up_T[4]), float(drawn.gap_T[4])) == (0, -1, math.inf)
    assert drawn.edge_gap_T.isinf().all() and (drawn.edge_token_T == -1).all()


# ---- filters ----------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("params", FILTER_CASES, ids=label)
def test_filters_equal_hugging_face(params: SamplingParams) -> None:
    x_TV = random_logits(24, 501, seed=5)
    seat_T, _, path_TD = places(24)
    ours_TV = sample.process_logits(x_TV, state_for(501, [params] * 24), seat_T, path_TD)
    assert torch.equal(ours_TV, hugging_face(x_TV, params))


def test_filters_differ_per_row_and_greedy_rows_keep_all() -> None:
    rows = [*FILTER_CASES, SamplingParams(top_k=3, top_p=0.1, min_p=0.5)]
    x_TV = random_logits(len(rows), 501, seed=6)
    seat_T, _, path_TD = places(len(rows))
    ours_TV = sample.process_logits(x_TV, state_for(501, rows), seat_T, path_TD)
    for row, params in enumerate(FILTER_CASES):
        assert torch.equal(ours_TV[row : row + 1], hugging_face(x_TV[row : row + 1], params))
    assert torch.equal(ours_TV[-1], x_TV[-1])


@pytest.mark.parametrize(
    ("options", "survivors"),
    [
        ({"top_k": 3}, [1, 2, 3]),  # 1 is best; 2, 3, 5, 6 tie: the lower ids stay
        ({"top_k": 4}, [1, 2, 3, 5]),
        ({"top_p": 0.4}, [1]),  # of 18 parts 1 has 8, the four 2 each, 0 and 4 one each
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.6}, [1, 2, 3]),
        ({"top_p": 0.85}, [1, 2, 3, 5, 6]),
        ({"top_p": 0.9}, [0, 1, 2, 3, 5, 6]),
        ({"min_p": 0.2}, [1, 2, 3, 5, 6]),
        ({"top_k": 3, "top_p": 0.7}, [1, 2]),  # of 12 parts now
        ({"top_k": 3, "top_p": 0.9}, [1, 2, 3]),
    ],
)
def test_ties_at_a_filter_edge(options: dict[str, float], survivors: list[int]) -> None:
    x_V = torch.tensor([1.0, 8.0, 2.0, 2.0, 1.0, 2.0, 2.0]).log()
    state = state_for(7, [SamplingParams(temperature=1.0, **options)])  # type: ignore[arg-type]
    kept_TV = sample.process_logits(x_V.unsqueeze(0), state, *places(1)[::2])
    assert kept_TV[0].isfinite().nonzero().flatten().tolist() == survivors


# ---- penalties --------------------------------------------------------------------------------------------


def test_repetition_penalty_equals_hugging_face() -> None:
    vocab, history = 50, [3, 3, 7, 20, 41]
    state = SamplerState.allocate(2, vocab, 0, True)
    for penalty in (1.3, 0.7):
        sample.write_seat(state, 1, SamplingParams(repetition_penalty=penalty), torch.tensor(history[:3]), 0)
        sample.count_tokens(state, torch.tensor([1]), torch.tensor([history[3:]]))
        x_TV = random_logits(1, vocab)
        theirs = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), x_TV)  # type: ignore[arg-type]
        assert torch.equal(sample.penalise(x_TV, state, *places(1)[::2]), theirs)


def test_presence_and_frequency_count_output_only_and_bias_adds() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 2.0, 4: -3.0})
    state = SamplerState.allocate(3, 6, 3, True)
    sample.write_seat(state, 1, params, torch.tensor([5, 1]), 0)
    sample.write_seat(state, 2, SamplingParams(), torch.tensor([5, 1]), 0)
    sample.count_tokens(state, torch.tensor([1, 2]), torch.tensor([[1, 1, 2, -1], [1, 1, 2, -1]]))
    x_TV = random_logits(2, 6)
    ours_TV = sample.penalise(x_TV, state, *places(2)[::2])
    delta = torch.tensor([2.0, -1.0, -0.75, 0.0, -3.0, 0.0])
    torch.testing.assert_close(ours_TV[0], x_TV[0] + delta)
    assert torch.equal(ours_TV[1], x_TV[1])


def test_path_tokens_equal_sequential_commits() -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4)
    x_TV = random_logits(4, 12, seed=3)
    path_TD = torch.tensor([[-1, -1, -1], [2, -1, -1], [2, 2, -1], [0, 9, 0]])
    state = SamplerState.allocate(2, 12, 0, True)
    sample.write_seat(state, 1, params, torch.tensor([9]), 0)
    sample.count_tokens(state, torch.tensor([1]), torch.tensor([[7]]))
    seat_T = torch.ones(4, dtype=torch.int64)
    tree_TV = sample.penalise(x_TV, state, seat_T, path_TD)
    assert int(state.output_count_SV.sum()) == 1  # the path is not committed
    for row in range(4):
        sample.write_seat(state, 1, params, torch.tensor([9]), 0)
        sample.count_tokens(state, torch.tensor([1]), torch.tensor([[7, *path_TD[row].tolist()]]))
        alone_TV = sample.penalise(x_TV[row : row + 1], state, seat_T[:1], path_TD[:1])
        assert torch.equal(tree_TV[row], alone_TV[0])
    assert not torch.equal(tree_TV[0], tree_TV[1] - x_TV[1] + x_TV[0])


def test_counts_go_to_their_seat_and_padding_to_nobody() -> None:
    state = SamplerState.allocate(3, 5, 0, True)
    sample.count_tokens(state, torch.tensor([2, 1]), torch.tensor([[4, 4, -1], [0, -1, -1]]))
    assert state.output_count_SV.tolist() == [[0] * 5, [1, 0, 0, 0, 0], [0, 0, 0, 0, 2]]


def test_a_seat_forgets_its_last_tenant() -> None:
    state = SamplerState.allocate(2, 8, 2, True)
    first = SamplingParams(
        temperature=0.5,
        top_k=2,
        top_p=0.5,
        min_p=0.5,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={1: 1.0, 2: 1.0},
        sample_index=4,
    )
    fresh = SamplerState.allocate(2, 8, 2, True)
    sample.write_seat(state, 1, first, torch.tensor([1, 2]), 2**64 - 1)
    assert int(state.seed_S[1]) == -1
    sample.count_tokens(state, torch.tensor([1]), torch.tensor([[1]]))
    for each in fields(SamplerState):
        before, after = getattr(fresh, each.name), getattr(state, each.name)
        assert not torch.equal(before, after), each.name
    sample.write_seat(state, 1, SamplingParams(), torch.zeros(0, dtype=torch.int64), 0)
    for each in fields(SamplerState):
        assert torch.equal(getattr(fresh, each.name), getattr(state, each.name)), each.name


def test_a_state_refuses_what_it_was_not_made_for() -> None:
    state = SamplerState.allocate(2, 8, 1, False)
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="without penalties"):
        sample.write_seat(state, 1, SamplingParams(presence_penalty=1.0), empty, 0)
    with pytest.raises(ValueError, match="logit_bias has 2 entries, this engine takes 1"):
        sample.write_seat(state, 1, SamplingParams(logit_bias={0: 1.0, 1: 1.0}), empty, 0)


# ---- draws ------------------------------------------------------------------------------------------------


def assert_same(left: Draw, right: Draw, rows: slice = slice(None)) -> None:
    for each in fields(Draw):
        assert torch.equal(getattr(left, each.name), getattr(right, each.name)[rows]), each.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_a_batch(kind: SamplerKind) -> None:
    rows = [SamplingParams(temperature=0.5 + 0.1 * row, top_k=20, top_p=0.9, min_p=0.01) for row in range(5)]
    x_TV = random_logits(5, 3001)
    state, (seat_T, position_T, _) = state_for(3001, rows), places(5)
    batch = sample.draw(x_TV, state, seat_T, position_T, kind, edges=True)
    for row in range(5):
        at = slice(row, row + 1)
        assert_same(sample.draw(x_TV[at], state, seat_T[at], position_T[at], kind, edges=True), batch, at)
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = sample.draw(x_TV[order], state, seat_T[order], position_T[order], kind)
    assert torch.equal(shuffled.token_T, batch.token_T[order]) and torch.equal(shuffled.gap_T, batch.gap_T[order])


def test_kinds_agree_where_they_overlap() -> None:
    num, vocab = 64, 777
    seat_T, position_T, _ = places(num)
    x_TV = random_logits(num, vocab, seed=2)

    def tokens(kind: SamplerKind, params: SamplingParams) -> Draw:
        return sample.draw(x_TV, state_for(vocab, [params] * num), seat_T, position_T, kind, edges=True)

    free = SamplingParams(temperature=1.0)
    assert_same(tokens("plain", free), tokens("general", free))
    nucleus = SamplingParams(temperature=1.0, top_p=0.7, min_p=0.02)
    assert_same(tokens("nucleus", nucleus), tokens("general", nucleus))
    narrow, general = tokens("narrow", ALL_FILTERS), tokens("general", ALL_FILTERS)
    for name in ("token_T", "gap_T", "runner_up_T", "top_logit_T"):
        assert torch.equal(getattr(narrow, name), getattr(general, name)), name
    for kind in KINDS:
        assert_same(sample.greedy(x_TV), tokens(kind, SamplingParams(top_k=2, top_p=0.1, min_p=0.9)))


def test_greedy_and_sampled_rows_mix() -> None:
    x_TV = random_logits(4, 300)
    rows = [SamplingParams(), ALL_FILTERS, SamplingParams(top_k=1), SamplingParams(temperature=1.0, top_k=50)]
    seat_T, position_T, _ = places(4)
    mixed = sample.draw(x_TV, state_for(300, rows), seat_T, position_T, "general")
    assert mixed.token_T[::2].tolist() == x_TV[::2].argmax(1).tolist()
    sampled = sample.draw(x_TV[1:2], state_for(300, rows), seat_T[1:2], position_T[1:2], "general")
    assert int(mixed.token_T[1]) == int(sampled.token_T[0])


def test_a_draw_is_the_best_perturbed_score_and_its_gap_is_in_logits() -> None:
    params = SamplingParams(temperature=1.6, seed=11)
    x_TV = random_logits(1, 40)
    seat_T, position_T, _ = places(1)
    drawn = sample.draw(x_TV, state_for(40, [params]), seat_T, position_T, "plain")
    noise_TV = sample.gumbel_noise(torch.tensor([11]), torch.tensor([0]), position_T, 40)
    value, order = (x_TV / 1.6 + noise_TV).sort(dim=1, descending=True)
    assert (int(drawn.token_T), int(drawn.runner_up_T)) == (int(order[0, 0]), int(order[0, 1]))
    assert float(drawn.gap_T) == pytest.approx(1.6 * float(value[0, 0] - value[0, 1]), rel=1e-5)
    assert float(drawn.top_logit_T) == float(x_TV.max())


def test_sample_index_and_position_change_the_noise() -> None:
    rows = [SamplingParams(temperature=1.0, seed=5, sample_index=index) for index in range(40)]
    x_TV = torch.zeros(40, 1000)
    seat_T = torch.arange(1, 41)
    state = state_for(1000, rows)
    by_index = sample.draw(x_TV, state, seat_T, torch.full((40,), 9), "plain").token_T
    by_position = sample.draw(x_TV, state, torch.ones(40, dtype=torch.int64), torch.arange(40), "plain").token_T
    assert len(set(by_index.tolist())) > 30 and len(set(by_position.tolist())) > 30


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


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("plain", SamplingParams(temperature=1.2)),
        ("nucleus", SamplingParams(temperature=1.2, top_p=0.9, min_p=0.02)),
        ("narrow", SamplingParams(temperature=1.2, top_k=7, top_p=0.95, min_p=0.02)),
        ("general", SamplingParams(temperature=1.2, top_k=7, top_p=0.95, min_p=0.02)),
    ],
)
def test_draws_follow_the_exact_distribution_over_seeds(
    kind: SamplerKind, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_CPU_ROWS", 6000)
    num, x_V = 6000, random_logits(11, seed=8, scale=1.5)
    state = over_seeds(state_for(11, [params]), num)
    drawn = sample.draw(x_V.expand(num, 11), state, torch.arange(num), torch.full((num,), 77), kind)
    statistic, bound = chi_square(drawn.token_T, hugging_face(x_V.unsqueeze(0), params).softmax(1)[0])
    assert statistic < bound


def test_penalised_draws_follow_the_exact_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_CPU_ROWS", 6000)
    num, x_V = 6000, random_logits(11, seed=9, scale=1.5)
    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={1: 1.5},
    )
    state = state_for(11, [params], penalties=True, max_bias=1)
    sample.write_seat(state, 1, params, torch.tensor([3, 4]), 0)
    sample.count_tokens(state, torch.tensor([1]), torch.tensor([[4, 5]]))
    path_TD = torch.tensor([[5, 6]]).expand(num, 2)
    expected_V = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 4, 5, 6]]), x_V.unsqueeze(0))[0]  # type: ignore[arg-type]
    expected_V = expected_V - 0.2 * torch.tensor([0, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0])
    expected_V = expected_V - 0.4 * torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
    expected_V[1] += 1.5
    state, row_T = over_seeds(state, num), torch.arange(num)
    logits_TV = sample.penalise(x_V.expand(num, 11), state, row_T, path_TD)
    drawn = sample.draw(logits_TV, state, row_T, torch.full((num,), 5), "nucleus")
    statistic, bound = chi_square(drawn.token_T, hugging_face(expected_V.unsqueeze(0), params).softmax(1)[0])
    assert statistic < bound


# ---- near-ties --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "token", "edge_token", "edge_gap"),
    [
        ([0.0, 1.0, 2.0, 0.0, 3.0], 1, 2, 0.02),  # 2 comes in and wins
        ([1.0, 0.0, 0.0, 2.0, 3.0], 0, 3, 0.03),  # 2 would lose, 3 comes in and wins
        ([2.0, 0.0, 0.0, 0.0, 3.0], 0, 2, 0.12),  # none wins: 0 would have to leave for 2
    ],
)
def test_top_k_edge(noise: list[float], token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[5.0, 4.9, 4.88, 4.87, -9.0]])
    state = state_for(5, [SamplingParams(temperature=2.0, top_k=2)])
    drawn = sample._filtered(
        x_TV, torch.arange(5).unsqueeze(0), torch.tensor([noise]), state, torch.tensor([1]), True, True
    )
    assert (int(drawn.token_T), int(drawn.runner_up_T), int(drawn.edge_token_T)) == (token, 1 - token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize(
    ("top_p", "noise", "token", "edge_token", "edge_gap"),
    [
        (0.79, [0.0, 0.0, 9.0, 0.0], 0, 2, log_odds(0.8) - log_odds(0.79)),  # .5 and .3 suffice, just
        (0.81, [0.0, 0.0, 9.0, 0.0], 2, 3, log_odds(0.81) - log_odds(0.8)),  # .15 is needed, just, and drawn
        (0.81, [9.0, 0.0, 0.0, 0.0], 0, 3, math.log(0.5 / 0.15) + log_odds(0.81) - log_odds(0.8)),  # 0 would be last
    ],
)
def test_top_p_edge(top_p: float, noise: list[float], token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    state = state_for(4, [SamplingParams(temperature=1.0, top_p=top_p)])
    drawn = sample._filtered(
        x_TV, torch.arange(4).unsqueeze(0), torch.tensor([noise]), state, torch.tensor([1]), False, True
    )
    assert (int(drawn.token_T), int(drawn.edge_token_T)) == (token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


@pytest.mark.parametrize(("noise", "token", "edge_token", "edge_gap"), [(9.0, 0, 2, 0.05), (0.0, 1, 2, 0.05)])
def test_min_p_edge(noise: float, token: int, edge_token: int, edge_gap: float) -> None:
    x_TV = torch.tensor([[0.0, math.log(0.5) + 0.2, math.log(0.5) - 0.05]])
    noise_TV = torch.tensor([[noise, 5.0, 20.0]])
    state = state_for(3, [SamplingParams(temperature=1.0, min_p=0.5)])
    drawn = sample._filtered(x_TV, torch.arange(3).unsqueeze(0), noise_TV, state, torch.tensor([1]), False, True)
    assert (int(drawn.token_T), int(drawn.edge_token_T)) == (token, edge_token)
    assert float(drawn.edge_gap_T) == pytest.approx(edge_gap, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_of_scores_goes_to_the_lower_id(kind: SamplerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TV = random_logits(1, 200)
    monkeypatch.setattr(sample, "gumbel_noise", lambda *_: -x_TV)
    monkeypatch.setattr(sample, "gumbel_at", lambda seed, index, position, token_TK: -x_TV.gather(1, token_TK))
    params = SamplingParams(temperature=1.0) if kind == "plain" else SamplingParams(temperature=1.0, top_k=5)
    seat_T, position_T, _ = places(1)
    drawn = sample.draw(x_TV, state_for(200, [params]), seat_T, position_T, kind)
    best = range(200) if kind in ("plain", "nucleus") else by_value_then_id(x_TV[0], 5)
    assert [int(drawn.token_T), int(drawn.runner_up_T)] == sorted(best)[:2]
    assert float(drawn.gap_T) == 0.0


@pytest.mark.parametrize("params", [*FILTER_CASES, ALL_FILTERS], ids=label)
def test_every_divergence_under_rounding_is_a_near_tie(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves each logit by at most e: a changed token must be the runner-up or edge token within 2 e."""
    monkeypatch.setattr(sample, "_CPU_ROWS", 2000)
    num, vocab, e = 2000, 60, 0.02
    state, row_T = over_seeds(state_for(vocab, [params]), num), torch.arange(num)
    x_TV = random_logits(num, vocab, seed=4, scale=2.0)
    moved_TV = x_TV + (torch.rand(num, vocab, generator=torch.Generator().manual_seed(5)) * 2 - 1) * e
    ours = sample.draw(x_TV, state, row_T, row_T, "general", edges=True)
    theirs = sample.draw(moved_TV, state, row_T, row_T, "general").token_T
    tie_T = (ours.gap_T <= 2 * e) & (theirs == ours.runner_up_T)
    edge_T = (ours.edge_gap_T <= 2 * e) & ((theirs == ours.runner_up_T) | (theirs == ours.edge_token_T))
    differs_T = theirs != ours.token_T
    assert int(differs_T.sum()) > 0
    unexplained = int((differs_T & ~(tie_T | edge_T)).sum())
    assert unexplained <= 2  # three scores within 2 e: the third won
    assert float((edge_T | (ours.gap_T <= 2 * e)).double().mean()) < 0.15  # and not by calling all a near-tie


# ---- groups, masks, rounding ------------------------------------------------------------------------------


class Head:
    """A head in float32, and the same one rounded to bf16."""

    def __init__(self, vocab: int, hidden: int) -> None:
        self.weight_VH = random_logits(vocab, hidden, seed=1, scale=1.0)

    def exact(self, hidden_TH: Tensor) -> Tensor:
        return (hidden_TH.unsqueeze(1) * self.weight_VH).sum(-1)

    def rounded(self, hidden_TH: Tensor) -> Tensor:
        return self.exact(hidden_TH).bfloat16().float()

    def rescore(self, hidden_TH: Tensor, token_TK: Tensor) -> Tensor:
        return self.exact(hidden_TH).gather(1, token_TK)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_groups_do_not_change_a_draw(kind: SamplerKind) -> None:
    head, rows = Head(200, 8), 7
    greedy = kind in ("argmax", "greedy")
    params = SamplingParams(
        temperature=0.0 if greedy else 0.9,
        top_k=10,
        top_p=0.9,
        repetition_penalty=1.0 if kind == "argmax" else 1.4,
    )
    state = state_for(200, [params] * rows, penalties=kind != "argmax")
    seat_T, position_T, path_TD = places(rows)
    path_TD = torch.randint(-1, 200, path_TD.shape, generator=torch.Generator().manual_seed(3))
    hidden_TH = random_logits(rows, 8, seed=2, scale=1.0)
    common = (hidden_TH, head.exact, state, seat_T, position_T, path_TD, kind)
    whole = sample.sample_places(*common, group=rows)
    for group in (1, 3, 100):
        assert_same(sample.sample_places(*common, group=group), whole)
    logits_TV = head.exact(hidden_TH)
    if kind != "argmax":
        logits_TV = sample.penalise(logits_TV, state, seat_T, path_TD)
    assert_same(sample.draw(logits_TV, state, seat_T, position_T, kind), whole)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "general"])
def test_rescoring_undoes_the_rounding(kind: SamplerKind) -> None:
    head, rows = Head(400, 64), 300
    params = SamplingParams(temperature=0.0 if kind in ("argmax", "greedy") else 0.3, top_k=5)
    state, (seat_T, position_T, path_TD) = state_for(400, [params] * rows), places(rows)
    hidden_TH = random_logits(rows, 64, seed=2, scale=3.0)
    common = (state, seat_T, position_T, path_TD, kind)
    exact = sample.sample_places(hidden_TH, head.exact, *common, group=50)
    rounded = sample.sample_places(hidden_TH, head.rounded, *common, group=50)
    rescored = sample.sample_places(hidden_TH, head.rounded, *common, group=50, rescore=head.rescore)
    assert not torch.equal(rounded.token_T, exact.token_T)
    assert torch.equal(rescored.token_T, exact.token_T)
    assert torch.equal(rescored.gap_T, exact.gap_T) and torch.equal(rescored.runner_up_T, exact.runner_up_T)


def test_rescored_ties_go_to_the_lower_id() -> None:
    x_TV = torch.tensor([[1.0, 4.0, 2.0, 4.0, 3.0]])
    drawn = sample.greedy_rescored(x_TV, x_TV, lambda _, token_TK: torch.full(token_TK.shape, 7.0))
    assert (int(drawn.token_T), int(drawn.runner_up_T), float(drawn.gap_T)) == (0, 1, 0.0)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_a_mask_bans_tokens(kind: SamplerKind) -> None:
    head, rows = Head(90, 8), 30
    params = SamplingParams(temperature=0.0 if kind in ("argmax", "greedy") else 1.5, top_k=40)
    state, (seat_T, position_T, path_TD) = state_for(90, [params] * rows), places(rows)
    mask_TV = torch.full((rows, 90), -math.inf)
    mask_TV.scatter_(1, torch.arange(rows).unsqueeze(1), 0.0)
    hidden_TH = random_logits(rows, 8, seed=2)
    common = (hidden_TH, head.rounded, state, seat_T, position_T, path_TD, kind)
    drawn = sample.sample_places(*common, group=8, mask_TV=mask_TV, rescore=head.rescore)
    assert drawn.token_T.tolist() == list(range(rows))


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_nothing_is_read_on_the_host(kind: SamplerKind) -> None:
    """Fake tensors have no values, so a read or a data-dependent shape raises."""
    with FakeTensorMode():
        state = SamplerState.allocate(4, 500, 2, True)
        seat_T, position_T = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
        path_TD = torch.ones(3, 2, dtype=torch.int64)
        drawn = sample.sample_places(
            torch.ones(3, 8),
            lambda hidden_GH: hidden_GH.new_ones(len(hidden_GH), 500),
            state,
            seat_T,
            position_T,
            path_TD,
            kind,
            group=2,
            rescore=lambda hidden_GH, token_GK: hidden_GH.new_ones(token_GK.shape),
            edges=True,
        )
        sample.count_tokens(state, seat_T, path_TD)
        assert drawn.token_T.shape == drawn.edge_gap_T.shape == (3,)


@pytest.mark.parametrize("kind", ["argmax", "greedy", "plain", "nucleus", "narrow", "general"])
def test_a_replay_draws_from_new_values(kind: SamplerKind) -> None:
    """Captured for one batch, replayed for another: no value is baked."""
    head = Head(300, 8)
    greedy = kind in ("argmax", "greedy")
    params = SamplingParams(temperature=0.0 if greedy else 1.1, top_k=20, top_p=0.9, presence_penalty=0.5)
    state = state_for(300, [params] * 3, penalties=True, max_bias=2)
    hidden_TH, (seat_T, position_T, path_TD) = random_logits(3, 8, scale=0.5), places(3)
    out = [torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3)]

    def step() -> None:
        drawn = sample.sample_places(
            hidden_TH, head.rounded, state, seat_T, position_T, path_TD, kind, group=2, rescore=head.rescore
        )
        for target, source in zip(out, (drawn.token_T, drawn.gap_T, drawn.edge_gap_T), strict=True):
            target.copy_(source)
        sample.count_tokens(state, seat_T, drawn.token_T.unsqueeze(1))

    backend = EmulatorBackend(allow_undeclared=True)
    graph = backend.capture(step, {})
    counts = torch.zeros_like(state.output_count_SV)
    for turn in range(2):
        hidden_TH.copy_(random_logits(3, 8, seed=turn + 5, scale=0.5))
        position_T.add_(7)
        state.output_count_SV.copy_(counts)
        backend.replay(graph)
        replayed, counts_after = [each.clone() for each in out], state.output_count_SV.clone()
        state.output_count_SV.copy_(counts)
        step()
        for ours, theirs in zip(replayed, out, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(state.output_count_SV, counts_after)
        counts = counts_after
    assert int(counts.sum()) == 6
