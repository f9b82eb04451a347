# Owns: the doctor on a GPU: one kernel compiled and run, wiring by kernels and captured rounds.
# Promises: a healthy pair raises no alarm in any mode, and a fault in the kernels' windows is named.
# Never: needs a checkpoint.
"""Doctor checks on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ratoon.lab.doctor.check import Check, failures, guarded
from ratoon.lab.doctor.machine import check_kernel, check_torch
from ratoon.lab.doctor.serving import check_births_of, check_cache, check_memory
from ratoon.lab.doctor.trial import Pair
from ratoon.lab.doctor.wiring import WIRING
from ratoon.runtime.engine import Engine
from tests.cpu.toy import make_drafter, make_target
from tests.kernel_rounds import WIDE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}


def engine_of(mode: str) -> Engine:
    target, drafter = make_target(**WIDE).to("cuda"), make_drafter(**WIDE, **SLIDING).to("cuda")
    return Engine.from_parts(target, drafter, mode=mode, budget=7, max_rows=2, max_model_len=128, cache_tokens=1024)


def test_torch_and_a_kernel_are_well() -> None:
    assert check_torch().status == "ok" and check_kernel("cuda").status == "ok"


@pytest.mark.parametrize("mode", ["eager", "static", "graph"])
def test_a_healthy_engine_raises_no_alarm_and_a_lost_window_is_named(mode: str) -> None:
    with engine_of(mode) as engine:
        round_ = engine.runner.round
        assert round_.drafter is not None
        pair = Pair(engine.runner, round_.drafter.config)
        checks = [guarded(name, partial(check, pair)) for name, check in WIRING.items()]
        others: tuple[Callable[[Engine], Check], ...] = (check_births_of, check_cache, check_memory)
        checks += [guarded(check.__name__, partial(check, engine)) for check in others]
        assert failures(checks) == []
        round_.passes.drafter = replace(pair.expected, windows=(None, None))
        assert "layer 0 is run as full" in WIRING["masks"](Pair(engine.runner, pair.expected)).seen
