# Owns: the way down: from a sick configuration to the first round, stage, layer, operation and value that is wrong.
# Promises: both sides start every round from one state, with noise beyond it; a healthy case has no difference.
# Never: runs requests of different prompts or seeds side by side.
"""Descent. Two sources say what a round should be: the healed configuration where it makes the same trees, and the
dense reference (reference.py), which needs no healthy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.observe import Observation, compare, not_finite
from ratoon.lab.bisect.outcome import Difference
from ratoon.lab.bisect.reference import expected, prefilled
from ratoon.lab.bisect.side import Side, Stepped
from ratoon.lab.bisect.stack import stack_of
from ratoon.ops.launch import use_kernels
from ratoon.runtime.engine import Engine

Opener = Callable[[Case], Engine]
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest error that another order of sums explains, as a share of the largest value."""
_CAPTURED = ("graph", "staged", "static")


def opened(case: Case) -> Engine:
    """The case's engine, from its names."""
    return Engine(case.model, drafter=case.drafter, dtype=case.dtype, device=case.device, **case.engine)


def audit(case: Case, open_engine: Opener = opened) -> Difference | None:
    """Holds every stage of every round of the case against the dense reference."""
    side = _side(case, open_engine)
    try:
        want, got = prefilled(side)
        tolerance = _TOLERANCE[side.engine.dtype]
        found = compare(want, got, tolerance) or not_finite(got)
        number = 0
        while found is None and side.live:
            side.spoil()
            stepped = _stepped(side, number)
            if isinstance(stepped, Difference):
                return stepped
            found = compare(expected(side, stepped), stepped.seen, tolerance)
            found = found and _placed(found, side, stepped, number, "the dense reference")
            number += 1
        return found
    finally:
        side.close()


def side_by_side(sick: Case, healed: Case, open_engine: Opener = opened) -> Difference | None:
    """The first difference of the sick rounds from the healed ones, both from the healed state.

    ValueError unless both serve the same prompts with the same seed, method and budget.
    """
    check_comparable(sick, healed)
    # The sick side first: what a healed one leaves in the process must not heal it.
    ours = _side(sick, open_engine)
    theirs = _side(healed, open_engine)
    exact = {sick.mode, healed.mode} <= set(_CAPTURED) and replace(sick, mode=healed.mode) == healed
    tolerance = 0.0 if exact else _TOLERANCE[ours.engine.dtype]
    number = 0
    try:
        while theirs.live:
            ours.adopt(theirs)
            for side in (theirs, ours):
                side.spoil()
            want, got = theirs.step(), _stepped(ours, number)
            if isinstance(got, Difference):
                return got
            found = compare(_comparable(want.seen), _comparable(got.seen), tolerance)
            if found is not None:
                return _placed(found, ours, got, number, "the healed configuration")
            number += 1
        return None
    finally:
        ours.close()
        theirs.close()


def check_comparable(sick: Case, healed: Case) -> None:
    """ValueError for cases whose rounds could differ for another reason than the flip."""
    names = ("prompts", "seed", "temperature", "max_tokens", "method", "budget", "topk_cap", "rows", "drafter", "dtype")
    for name in names:
        if getattr(sick, name) != getattr(healed, name):
            raise ValueError(
                f"two configurations of different {name} are not compared round by round: their draws and trees "
                "differ for that reason alone"
            )
    if sick.budget == "auto":
        raise ValueError("rounds of an automatic budget are not compared: it follows measured times; fix the budget")


def _comparable(seen: Observation) -> Observation:
    """Without slots: two engines may lay their pages differently."""
    kept = Observation()
    kept.values = {key: value for key, value in seen.values.items() if key[:2] not in {("mask", "slot")}}
    return kept


def _side(case: Case, open_engine: Opener) -> Side:
    use_kernels(case.kernels)  # pyright: ignore[reportArgumentType]
    try:
        return Side(open_engine(case), case)
    finally:
        use_kernels("auto")


def _stepped(side: Side, number: int) -> Stepped | Difference:
    """The next round, or what a sick one ended in: its first NaN, or the exception that it raised."""
    try:
        stepped = side.step()
    except Exception as error:  # noqa: BLE001 (whatever a sick round raises is what was looked for)
        return _raised(error, number)
    if stepped.failure is None:
        return stepped
    found = not_finite(stepped.seen)
    return replace(found, round=number) if found else _raised(stepped.failure, number)


def _raised(error: Exception, number: int) -> Difference:
    stage, where = stack_of(error)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Difference(stage or "verify", where or "unknown", (), "a round", text, round=number)


def _placed(found: Difference, side: Side, stepped: Stepped, number: int, against: str) -> Difference:
    """With round, slot and who expected it."""
    slot: int | None = None
    at: Any = found.coordinate
    if found.stage == "commit" and found.operation.startswith("keys and values") and at:
        slot = side.slot_of(stepped, at[0])
    return replace(found, round=number, slot=slot, against=against)
