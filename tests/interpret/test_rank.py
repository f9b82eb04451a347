# Owns: the Triton twin of candidate ranking, and the descent through peaks.
# Promises: tokens equal to the reference, ties included; log-probabilities to float64's; memory around is NaN.
# Never: needs a GPU.
"""ops/kernels/rank.py against ops/tree.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ratoon.ops import tree
from ratoon.ops.launch import use_kernels


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Outputs and scratch hold NaN, or the largest integer, before they are written."""
    torch.use_deterministic_algorithms(True)
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    use_kernels("auto")


def both(logits_NV: Tensor, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(kernel, reference); the kernel's logits lie between NaN."""
    around = torch.full((logits_NV.numel() + 64,), math.nan)
    around[32:-32] = logits_NV.flatten()
    use_kernels("triton")
    ours = tree.rank_candidates(around[32:-32].view(logits_NV.shape), k)
    use_kernels("torch")
    return ours, tree.rank_candidates(logits_NV, k)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocab", "k"),
    [
        (3, 5000, 16),  # three programs per row, the last one partial
        (2, 4097, 7),
        (3, 260, 3),
        (2, 33, 16),
        (1, 40, 33),  # a list that is sorted rather than counted
        (2, 3, 5),
        (2, 1, 1),
    ],
)
def test_candidates_equal_the_reference(rows: int, vocab: int, k: int, rounded: bool) -> None:
    logits_NV = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if rounded:
        logits_NV = logits_NV.round()  # -0.0 and 0.0 among them
    (token_NK, logprob_NK), (expected_NK, _) = both(logits_NV, k)
    assert token_NK.dtype == torch.int64 and torch.equal(token_NK, expected_NK)
    exact_NK = logits_NV.double().log_softmax(1).gather(1, token_NK)
    assert logprob_NK.dtype == torch.float32
    torch.testing.assert_close(logprob_NK.double(), exact_NK, rtol=0, atol=3e-6)


def test_all_candidates_may_lie_in_one_chunk_or_each_in_its_own() -> None:
    logits_NV = torch.zeros(2, 4500)
    logits_NV[0, 2048:2080] = torch.arange(1.0, 33.0)
    logits_NV[1, 5::281] = torch.arange(17.0, 1.0, -1.0).roll(3)[: len(logits_NV[1, 5::281])]
    (token_NK, _), (expected_NK, _) = both(logits_NV, 16)
    assert torch.equal(token_NK, expected_NK)
    assert token_NK[0].tolist() == list(range(2079, 2063, -1))


def test_banned_tokens_constant_rows_and_far_tiles() -> None:
    logits_NV = torch.full((3, 4200), -math.inf)
    logits_NV[0, 4100:4102] = -200.0  # tiles without any, and exp(x) without the shift would be 0
    logits_NV[1] = 7.25
    logits_NV[2, 0] = 3.0
    (token_NK, logprob_NK), (expected_NK, reference_NK) = both(logits_NV, 4)
    assert torch.equal(token_NK, expected_NK)
    assert token_NK[0].tolist() == [4100, 4101, 0, 1]
    torch.testing.assert_close(logprob_NK, reference_NK)
    assert logprob_NK[0, :3].tolist() == pytest.approx([-math.log(2), -math.log(2), -math.inf], abs=2e-5)


def test_a_row_with_a_nan_gives_nan_and_tokens_of_the_vocabulary() -> None:
    logits_NV = torch.randn(4, 4200, generator=torch.Generator().manual_seed(1))
    logits_NV[1, 4000] = math.nan
    logits_NV[2, 3] = -torch.tensor(math.nan)
    logits_NV[3] = -torch.tensor(math.nan)
    (token_NK, logprob_NK), (expected_NK, _) = both(logits_NV, 5)
    assert logprob_NK[1:].isnan().all() and torch.isfinite(logprob_NK[0]).all()
    assert ((token_NK >= 0) & (token_NK < 4200)).all()
    assert torch.equal(token_NK[0], expected_NK[0])


def test_the_same_bits_twice() -> None:
    logits_NV = torch.randn(2, 4200, generator=torch.Generator().manual_seed(2))
    first, second = both(logits_NV, 6)[0], both(logits_NV, 6)[0]
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
