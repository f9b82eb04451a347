# Owns: what a check says, and the guard that turns a crash inside one into its own failure.
# Promises: a check that fails or crashes is one line with a remedy; it never ends the others.
# Never: imports torch, or checks anything itself.
"""Results of `ratoon doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Check:
    """One finding: what was seen, what was expected, and what to do (empty when ok)."""

    name: str
    status: Status
    seen: str
    expected: str = ""
    remedy: str = ""


def judged(name: str, healthy: bool, seen: str, expected: str, remedy: str) -> Check:
    """ok, or fail with the remedy."""
    return Check(name, "ok", seen, expected) if healthy else Check(name, "fail", seen, expected, remedy)


def skipped(name: str, reason: str) -> Check:
    """A check that could not be made here."""
    return Check(name, "skipped", reason)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check's result; an exception of any kind is its failure, with the cause."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 (whatever it is, the next check must run)
        return Check(name, "fail", cause(error), "the check runs to its end", "the cause is the remedy's first hint")


def cause(error: BaseException) -> str:
    """The error's kind and its text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failures(checks: Iterable[Check]) -> list[Check]:
    """Those that failed, in order."""
    return [check for check in checks if check.status == "fail"]
