# Owns: whole rounds on interpreted kernels.
# Promises: what a GPU would run, launch for launch, in float32 on a CPU; few tokens, since a round takes seconds.
# Never: needs a GPU.
"""Toy rounds by kernels on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_rounds import check_texts


@pytest.mark.parametrize("sampled", [False, True])
def test_texts_by_kernels_equal_dense_texts(sampled: bool) -> None:
    check_texts(torch.device("cpu"), "eager", num=2, sampled=sampled, num_rows=2)
