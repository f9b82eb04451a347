# Owns: cases of toy engines for the tests of bisect and of planted faults.
# Promises: the drafter knows the texts, so paths of all lengths are accepted; one small shape is captured.
# Never: plants anything itself.
"""Toy cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.here import Here
from ratoon.runtime.engine import Engine
from ratoon.spec.state import RoundShape
from tests.cpu import toy
from tests.cpu.engines import MAX_LEN, PROMPTS, prophet

CASE = Case(
    budget=11,
    topk_cap=0,
    dtype="float32",
    device="cpu",
    page_size=4,
    max_model_len=MAX_LEN,
    prompts=PROMPTS[:2],
    max_tokens=16,
)


def case_of(**changes: Any) -> Case:
    return replace(CASE, **changes)


def shapes_of(case: Case) -> tuple[RoundShape, ...]:
    """All rounds that a case's rows come to, of its budget."""
    nodes, sampler = int(case.budget), "general" if case.temperature else "argmax"
    block = toy.BLOCK if nodes else 0
    return (RoundShape(case.rows, case.rows * (nodes + 1), block, nodes, sampler),)


def open_toy(case: Case, drafter: Any = None, target: Any = None) -> Engine:
    """The case's engine over a toy pair; the drafter is a prophet unless one is given."""
    network = None if case.drafter == "none" else drafter or prophet()
    shapes: dict[str, Any] = {} if case.mode == "eager" else {"shapes": shapes_of(case)}
    return Engine.from_parts(target or toy.make_target(), network, **case.engine, **shapes)


HERE = Here(open_toy)
