# Owns: whole rounds on the GPU: kernels, real CUDA graphs, all modes.
# Promises: float32 texts equal dense texts made on the CPU by references alone.
# Never: times anything.
"""Toy rounds by kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from ratoon.runtime.runner import Mode
from tests.kernel_rounds import check_texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("mode", ["eager", "static", "graph", "staged"])
def test_texts_by_kernels_equal_dense_texts(mode: Mode, sampled: bool) -> None:
    check_texts(torch.device("cuda"), mode, num=24, sampled=sampled)
