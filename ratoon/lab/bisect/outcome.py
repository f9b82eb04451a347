# Owns: the vocabulary of results: how a run of a case ended, where two rounds first differ, the whole verdict.
# Promises: each survives JSON unchanged and says itself in one plain line.
# Never: imports torch, or judges.
"""Outcomes, differences and verdicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["healthy", "tokens", "acceptance", "nan", "contract", "crash", "hang"]

STAGES = ("seat", "prefill", "draft", "build", "mask", "verify", "accept", "commit")
"""In the order in which a round passes them."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. stage and where: of a crash or hang, as its stack tells."""

    kind: Kind
    detail: str
    stage: str | None = None
    where: str | None = None
    tau: float | None = None

    @property
    def is_healthy(self) -> bool:
        return self.kind == "healthy"

    def __str__(self) -> str:
        place = "".join(f", {label} {value}" for label, value in (("stage", self.stage), ("at", self.where)) if value)
        return f"{self.kind}: {self.detail}{place}"


@dataclass(frozen=True)
class Difference:
    """The first value that is not what it should be. layer and slot where there are any; against: who expected it."""

    stage: str
    operation: str
    coordinate: tuple[int, ...]
    expected: Any
    got: Any
    layer: int | None = None
    slot: int | None = None
    round: int | None = None
    num_wrong: int = 1
    against: str = "the reference"

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        slot = "" if self.slot is None else f", first wrong slot {self.slot}"
        number = "before the first round" if self.round is None else f"round {self.round}"
        return (
            f"stage {self.stage}, operation {self.operation}{layer}, {number}{slot}, at {list(self.coordinate)}: "
            f"expected {_short(self.expected)}, got {_short(self.got)} (by {self.against})"
        )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Trial:
    """One flip and how it ended."""

    flip: str
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Everything that bisect found. healed_by: the mildest flip that ran well."""

    first: Outcome
    trials: tuple[Trial, ...]
    healed_by: str | None
    culprit: Difference | None
    seconds: float

    @property
    def is_healthy(self) -> bool:
        return self.first.is_healthy and self.culprit is None

    def lines(self) -> list[str]:
        """The verdict in a few plain lines."""
        if self.is_healthy:
            return [f"healthy: {self.first.detail}, every stage of every round as expected ({self.seconds:.1f} s)"]
        seen = self.first.detail if self.first.is_healthy else str(self.first)
        lines = [f"symptom: {'none in the text; ' if self.first.is_healthy else ''}{seen}"]
        if self.trials:
            tried = f"none of {len(self.trials)} flips"
            lines.append(f"healed by: {self.healed_by or tried}")
        lines.append(f"culprit: {self._culprit()} ({self.seconds:.1f} s)")
        return lines

    def _culprit(self) -> str:
        if self.culprit is not None:
            return str(self.culprit)
        if self.first.kind == "contract":
            return "named by the contract above"
        if self.first.stage or self.first.where:
            return f"stage {self.first.stage or 'unknown'}, {self.first.where or 'no line known'}"
        return "not found below the flip: every stage of the rounds that were looked at is as expected"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"healthy": self.is_healthy, "verdict": self.lines()}
