# Owns: simulated acceptance on a GPU: the kernel, and lots made there.
# Promises: bit for bit what the reference gives on a CPU.
# Never: runs without CUDA.
"""ops/kernels/simulate.py on the device."""

from __future__ import annotations

import pytest
import torch

from ratoon.ops.simulate import true_tokens
from ratoon.spec.simulate import Simulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("rows", "depths", "ranks", "vocab"), [(1, 15, 16, 151936), (128, 15, 15, 49152), (3, 7, 127, 49152), (2, 1, 1, 64)]
)
def test_the_kernel_gives_the_references_tokens(rows: int, depths: int, ranks: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    first = torch.randint(0, vocab - ranks, (rows, depths, 1), generator=generator)
    token_RLK = (first + torch.randperm(ranks, generator=generator)).contiguous()
    token_RLK[0] = torch.randperm(ranks, generator=generator)
    seed_S = torch.randint(-(2**63), 2**63 - 1, (rows + 1,), generator=generator)
    start_S = torch.randint(0, 40960, (rows + 1,), generator=generator)
    seat_R = torch.arange(1, rows + 1).flip(0)
    rank_NL = Simulation.of_table(15, "cpu").rank_NL
    given = (seat_R, start_S, seed_S, rank_NL, token_RLK)
    with torch.inference_mode():
        got = true_tokens(*(tensor.cuda() for tensor in given))
        assert torch.equal(got.cpu(), true_tokens(*given))
