# Owns: whole rounds on interpreted kernels, eager and under the graph emulator.
# Promises: what a GPU would run, launch for launch, in float32 on a CPU.
# Never: needs a GPU.
"""Toy rounds by kernels on a CPU."""

from __future__ import annotations

import pytest
import torch

from ratoon.runtime.runner import Mode
from tests.kernel_rounds import check_texts


@pytest.mark.parametrize(("mode", "sampled"), [("eager", False), ("graph", False), ("graph", True)])
def test_texts_by_kernels_equal_dense_texts(mode: Mode, sampled: bool) -> None:
    check_texts(torch.device("cpu"), mode, num=5, sampled=sampled)
