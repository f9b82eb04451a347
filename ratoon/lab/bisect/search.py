# Owns: the order of a bisection: reproduce, flip one variable at a time, go down, and say it.
# Promises: the mildest flip that heals is the one reported; a healthy text is still audited stage by stage.
# Never: flips two variables at once, or runs a sick case in its own process when asked not to.
"""`bisect`: from a failing configuration to its culprit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ratoon.lab.bisect import child
from ratoon.lab.bisect.case import Case, Flip, flips
from ratoon.lab.bisect.outcome import Difference, Outcome, Trial, Verdict

Report = Callable[[str], None]


class Worker(Protocol):
    """Who runs cases."""

    def run(self, case: Case) -> Outcome: ...

    def descend(self, case: Case, healed: Case | None) -> Difference | None: ...


@dataclass(frozen=True)
class Isolated:
    """Each run in a child process of at most limit_s seconds."""

    limit_s: float = 600.0

    def run(self, case: Case) -> Outcome:
        return child.run(case, self.limit_s)

    def descend(self, case: Case, healed: Case | None) -> Difference | None:
        return child.descend(case, healed, self.limit_s)


def bisect(case: Case, worker: Worker, report: Report = lambda _: None) -> Verdict:
    """Names what is sick in a case. Raises ValueError or FileNotFoundError for a case that cannot be."""
    begun = time.perf_counter()
    report(f"running {case.method} {case.budget}, mode {case.mode}, {case.rows} rows")
    first = worker.run(case)
    if first.is_healthy:
        report("the text is right: auditing every stage")
        culprit = worker.descend(case, None)
        return Verdict(first, (), None, culprit, time.perf_counter() - begun)
    report(str(first))
    trials, healing = _flipped(case, worker, report)
    culprit = None
    if first.kind in ("tokens", "acceptance", "nan", "crash") and not _died(first):
        sick = _clearest(case, trials)
        healed = healing.apply(case) if healing and _comparable(healing, sick, case) else None
        report(f"going down in mode {sick.mode}")
        culprit = worker.descend(sick, healed)
    said = tuple(Trial(str(flip), outcome, seconds) for flip, outcome, seconds in trials)
    return Verdict(first, said, str(healing) if healing else None, culprit, time.perf_counter() - begun)


_Tried = list[tuple[Flip, Outcome, float]]


def _flipped(case: Case, worker: Worker, report: Report) -> tuple[_Tried, Flip | None]:
    """Every flip up to the first that heals."""
    trials: _Tried = []
    for flip in flips(case):
        begun = time.perf_counter()
        try:
            outcome = worker.run(flip.apply(case))
        except ValueError as error:
            report(f"{flip}: cannot be ({error})")
            continue
        trials.append((flip, outcome, time.perf_counter() - begun))
        report(f"{flip}: {outcome}")
        if outcome.is_healthy:
            return trials, flip
    return trials, None


def _died(outcome: Outcome) -> bool:
    """Whether going down would only die again."""
    return outcome.kind == "crash" and outcome.detail.startswith("the process")


def _clearest(case: Case, trials: _Tried) -> Case:
    """The case in the plainest mode that is still sick: eager and static rounds can be listened to."""
    modes = [flip.value for flip, outcome, _ in trials if flip.variable == "mode" and not outcome.is_healthy]
    return replace(case, mode=modes[-1]) if modes else case


def _comparable(healing: Flip, sick: Case, case: Case) -> bool:
    """Whether the healed rounds are the sick ones, place by place."""
    return healing.keeps_tree and case.budget != "auto" and sick != healing.apply(case)
