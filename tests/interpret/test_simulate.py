# Owns: the Triton twin of simulated acceptance's true tokens.
# Promises: equal to the reference bit for bit, over ranks inside and outside, partial blocks and scattered seats.
# Never: needs a GPU.
"""ops/kernels/simulate.py against ops/simulate.py."""

from __future__ import annotations

import pytest
import torch

from ratoon.ops import simulate
from ratoon.ops.launch import use_kernels


@pytest.mark.parametrize(
    ("rows", "depths", "ranks", "vocab"), [(1, 15, 15, 151936), (5, 7, 16, 40), (3, 1, 1, 3), (2, 3, 31, 32)]
)
def test_true_tokens_equal_the_reference(rows: int, depths: int, ranks: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    token_RLK = torch.rand(rows, depths, vocab, generator=generator).argsort(dim=2)[:, :, :ranks].contiguous()
    # Low ids, so that the smallest one that is no candidate is not always 0.
    token_RLK[0] = torch.randperm(ranks, generator=generator)
    rank_NL = torch.randint(0, 2 * ranks + 1, (256, depths + 2), generator=generator)
    seed_S = torch.randint(-(2**63), 2**63 - 1, (rows + 4,), generator=generator)
    start_S = torch.randint(0, 40960, (rows + 4,), generator=generator)
    seat_R = torch.randperm(rows + 4, generator=generator)[:rows]
    given = (seat_R, start_S, seed_S, rank_NL, token_RLK)
    try:
        with torch.inference_mode():
            use_kernels("torch")
            want = simulate.true_tokens(*given)
            use_kernels("triton")
            got = simulate.true_tokens(*given)
    finally:
        use_kernels("auto")
    assert got.dtype == want.dtype and torch.equal(got, want)
