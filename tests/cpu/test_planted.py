# Owns: the done-when of the lab: every planted fault is named by the one who must, and healthy engines raise no alarm.
# Promises: faults are planted into the real engine; both counts are exact; nothing planted is left behind.
# Never: plants into a check or a reference.
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ratoon.lab import faults
from ratoon.lab.bisect import child
from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.here import Here
from ratoon.lab.bisect.outcome import Verdict
from ratoon.lab.bisect.search import bisect
from ratoon.lab.doctor.check import failures, guarded
from ratoon.lab.doctor.trial import Pair
from ratoon.lab.doctor.wiring import WIRING
from ratoon.lab.faults import FAULTS, planted
from tests.cpu import toy
from tests.cpu.engines import PROMPTS, prophet
from tests.cpu.planting import HERE, case_of, open_toy

DEADLY = {"illegal access": 60.0, "hanging build": 7.0}
"""Faults that end their process, and the time limit of a run."""
HEALTHY = 50
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
YARN: dict[str, Any] = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
KINDS: tuple[dict[str, Any], ...] = ({}, SLIDING, {"anchor_first": True, "input_embedding_scale": 3.0}, YARN)


def by(namer: str) -> list[str]:
    return [name for name, fault in FAULTS.items() if fault.named_by == namer and name not in DEADLY]


def test_the_catalogue_is_whole() -> None:
    assert len(by("contract")) + len(by("doctor")) + len(by("bisect")) + len(DEADLY) == len(FAULTS) == 20
    assert {fault.field[0] for fault in FAULTS.values()} == set("ABCD")
    assert all(fault.culprit for fault in FAULTS.values())


@pytest.mark.parametrize("name", by("contract"))
def test_fault_is_refused_by_the_contract(name: str) -> None:
    outcome = HERE.run(case_of(mode="graph", plant=name))
    assert outcome.kind == "contract", outcome
    assert all(word in outcome.detail for word in FAULTS[name].culprit), outcome.detail


@pytest.mark.parametrize("name", by("doctor"))
def test_fault_is_named_by_the_doctor(name: str) -> None:
    drafter = toy.make_drafter(**SLIDING)
    expected = drafter.config
    with planted(name), open_toy(case_of(), drafter) as engine:
        pair = Pair(engine.runner, expected)
        checks = [guarded(label, lambda check=check: check(pair)) for label, check in WIRING.items()]
    assert failures(checks)[0].name == FAULTS[name].culprit[0], [check.seen for check in failures(checks)]


@pytest.mark.parametrize("name", [name for name in by("doctor") if name != "wrong pair"])
def test_fault_of_the_wiring_is_found_by_bisect_too(name: str) -> None:
    """The text is right all along. (A drafter of another pair computes what its config says: only the doctor knows.)"""
    verdict = bisect(case_of(plant=name), HERE)
    assert verdict.first.is_healthy and verdict.culprit is not None
    assert verdict.culprit.stage in ("draft", "prefill")


def names(verdict: Verdict, name: str) -> bool:
    stage, operation = FAULTS[name].culprit
    found = verdict.culprit
    return found is not None and found.stage == stage and found.operation.startswith(operation)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "eager") for name in by("bisect")), ("scattered accept as prefix", "static")]
)
def test_fault_is_named_by_bisect(name: str, mode: str) -> None:
    temperature = 1.0 if name == "biased sampling" else 0.0
    verdict = bisect(case_of(plant=name, mode=mode, temperature=temperature), HERE)
    assert not verdict.is_healthy and names(verdict, name), verdict.lines()


@pytest.mark.parametrize("name", DEADLY)
def test_fault_that_ends_its_process_is_named(name: str, model: Path, drafter: Path) -> None:
    case = case_of(model=str(model), drafter=str(drafter), plant=name)
    outcome = child.run(case, DEADLY[name])
    stage, words = FAULTS[name].culprit
    assert outcome.kind == ("hang" if name == "hanging build" else "crash")
    assert outcome.stage == stage and words in outcome.detail, outcome
    assert outcome.where is not None and outcome.where.startswith("spec/round.py:")


def test_nothing_planted_stays() -> None:
    for name in FAULTS:
        with planted(name):
            pass
    assert HERE.run(case_of()).is_healthy
    with pytest.raises(ValueError, match="no fault 'x' can be planted: use one of none field, "):
        faults.planted("x")


def healthy(seed: int) -> tuple[Case, Here]:
    """A random pair in a random configuration; every 25th is captured."""
    chance = random.Random(seed)
    knows, kind, weights = chance.random() < 0.5, chance.choice(KINDS), chance.randrange(100)
    rows, method = chance.choice((1, 1, 2, 3)), chance.choice(("tree", "tree", "chain", "ar"))
    case = Case(
        method=method,
        drafter="none" if method == "ar" else "auto",
        budget=0 if method == "ar" else chance.choice((1, 2, 3, 7, 8, 15, 31)),
        topk_cap=chance.choice((0, 1, 2, 4, 8)),
        rows=rows,
        mode=("graph", "staged")[seed // 25 % 2] if seed % 25 == 0 else chance.choice(("eager", "static")),
        dtype="float32",
        device="cpu",
        page_size=chance.choice((1, 3, 4, 16)),
        run_ahead=chance.choice((0, 1, 2)),
        max_model_len=60,
        prompts=tuple(chance.sample(PROMPTS, rows)),
        max_tokens=chance.choice((3, 5, 8)),
        temperature=chance.choice((0.0, 0.0, 0.0, 0.8)),
        seed=seed,
    )

    def opened(case: Case) -> Any:
        pair = (prophet(), None) if knows else (toy.make_drafter(weights, **kind), toy.make_target(weights))
        return open_toy(case, *pair)

    return case, Here(opened)


def test_healthy_engines_raise_no_alarm() -> None:
    alarms = []
    for seed in range(HEALTHY):
        case, worker = healthy(seed)
        verdict = bisect(case, worker)
        if not verdict.is_healthy:
            alarms.append((seed, case, verdict.lines()))
    assert alarms == [], f"{len(alarms)} false alarms in {HEALTHY}"
