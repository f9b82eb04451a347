# Owns: bisect on a GPU: kernels held against the dense reference and against torch, in every mode.
# Promises: a healthy pair raises no alarm, a planted fault is named by stage and operation.
# Never: needs a checkpoint, or a process that dies.
"""Bisect on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.descend import side_by_side
from ratoon.lab.bisect.here import Here
from ratoon.lab.bisect.search import bisect
from ratoon.runtime.engine import Engine
from tests.cpu.planting import case_of, shapes_of
from tests.cpu.toy import make_drafter, make_target
from tests.kernel_rounds import WIDE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CASE = case_of(device="cuda", kernels="triton", budget=7, rows=2, page_size=16, max_tokens=12)


def opened(case: Case) -> Engine:
    target, drafter = make_target(**WIDE).to("cuda"), make_drafter(**WIDE).to("cuda")
    shapes = {} if case.mode == "eager" else {"shapes": shapes_of(case)}
    drafters = {} if case.drafter == "none" else {"drafter": drafter}
    return Engine.from_parts(target, **drafters, cache_tokens=1024, **case.engine, **shapes)  # pyright: ignore


@pytest.mark.parametrize("mode", ["eager", "static", "graph", "staged"])
def test_a_healthy_pair_raises_no_alarm(mode: str) -> None:
    verdict = bisect(replace(CASE, mode=mode), Here(opened))
    assert verdict.is_healthy, verdict.lines()


def test_kernels_differ_from_torch_by_rounding_only() -> None:
    sick = replace(CASE, mode="static")
    assert side_by_side(sick, replace(sick, kernels="torch"), opened) is None


def test_a_planted_fault_is_named() -> None:
    found = Here(opened).descend(replace(CASE, mode="static", plant="sibling rope"), None)
    assert found is not None and (found.stage, found.operation) == ("mask", "position")
