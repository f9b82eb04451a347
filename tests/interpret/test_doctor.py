# Owns: the doctor's wiring checks over kernels, as they are made on a GPU, in float32 on a CPU.
# Promises: a healthy pair raises no alarm there either, and another window is heard.
# Never: needs a GPU.
"""Wiring checks by interpreted kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ratoon.lab.doctor.check import failures, guarded
from ratoon.lab.doctor.reference import mask_of
from ratoon.lab.doctor.trial import Pair, seen_keys
from ratoon.lab.doctor.wiring import WIRING
from ratoon.ops.launch import use_kernels
from tests.cpu.toy import Bench, make_drafter, make_target

KEYS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "block_size": 4,
    "use_sliding_window": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    use_kernels("triton")
    yield
    use_kernels("auto")


def test_a_healthy_pair_passes_by_kernels_and_windows_are_heard() -> None:
    bench = Bench(make_target(), make_drafter(**KEYS), "static", rows=1, nodes=3, max_len=16)
    drafter = bench.runner.round.drafter
    assert drafter is not None
    pair = Pair(bench.runner, drafter.config)
    checks = {name: guarded(name, lambda check=check: check(pair)) for name, check in WIRING.items() if name != "masks"}
    assert failures(checks.values()) == [] and "amplitude 1.1386" in checks["rope"].seen
    assert torch.equal(seen_keys(pair, 3)[:, :, 0], torch.stack([mask_of(3, 4, 3, True), mask_of(3, 4, None, False)]))
    passes = bench.runner.round.passes
    passes.drafter = replace(drafter.config, windows=(None, None))
    assert not torch.equal(seen_keys(pair, 3)[0, :, 0], mask_of(3, 4, 3, True)), "the probe hears the kernel's window"
