# Owns: the tests of ops/noise.py.
# Promises: words are held against published answers and plain Python, values against the Gumbel law.
# Never: draws a token.
"""Philox and Gumbel noise."""

from __future__ import annotations

import math

import pytest
import torch

from ratoon.ops import noise

WORD = 0xFFFFFFFF


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
    ours = noise.philox(tuple(torch.tensor([c]) for c in counter), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in ours) == words
    assert philox_in_python(counter, key) == words


@pytest.mark.parametrize("seed", [7, 2**40 + 3, -5])
def test_noise_is_philox_of_seed_sample_position_token(seed: int) -> None:
    position, index, vocab = 2**31 + 11, 3, 23
    noise_V = noise.gumbel_noise(torch.tensor([seed]), torch.tensor([index]), torch.tensor([position]), vocab)[0]
    assert noise_V.shape == (vocab,) and noise_V.dtype == torch.float32
    for token in range(vocab):
        words = philox_in_python((token // 4, position, index, 0), (seed & WORD, seed >> 32 & WORD))
        v = (words[token % 4] + 0.5) / 2**32
        assert math.isclose(float(noise_V[token]), -math.log(-math.log1p(-v)), rel_tol=1e-7, abs_tol=1e-9)


def test_noise_at_chosen_tokens_is_the_same_bits() -> None:
    seed_T, index_T, position_T = torch.tensor([1, -9]), torch.tensor([0, 2]), torch.tensor([5, 6])
    token_TK = torch.randint(0, 1003, (2, 50), generator=torch.Generator().manual_seed(1))
    full_TV = noise.gumbel_noise(seed_T, index_T, position_T, 1003)
    assert torch.equal(noise.gumbel_at(seed_T, index_T, position_T, token_TK), full_TV.gather(1, token_TK))


def test_gumbel_is_finite_and_finest_at_its_maximum() -> None:
    g = noise._gumbel(torch.tensor([0, 1, 2, 3, 2**32 - 2, 2**32 - 1]))
    assert torch.isfinite(g).all()
    assert float(g[0]) == pytest.approx(33 * math.log(2), rel=1e-7)
    assert (g[:4].diff() < -0.1).all()  # neighbouring words differ where the maximum is
    assert float(g[5]) == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)


def test_noise_follows_the_gumbel_law() -> None:
    row_T = torch.arange(8)
    value = noise.gumbel_noise(row_T, torch.zeros_like(row_T), row_T * 100, 5000).flatten().double().sort().values
    expected = torch.exp(-torch.exp(-value))
    steps = torch.arange(1, len(value) + 1, dtype=torch.float64) / len(value)
    assert float((expected - steps).abs().max()) < 1.63 / math.sqrt(len(value))  # Kolmogorov-Smirnov, 1 %
    best = noise.gumbel_noise(torch.arange(400), torch.zeros(400, dtype=torch.int64), torch.arange(400), 5000).amax(1)
    assert float(best.mean()) == pytest.approx(math.log(5000) + 0.57722, abs=0.2)
