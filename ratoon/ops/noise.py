# Owns: the noise of sampling.
# Promises: a value depends on seed, sample, position and token id alone, and is the same on every device.
# Never: holds random state.
"""Counter-based Gumbel noise (METHOD section 3). T: places, K: candidates."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


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
