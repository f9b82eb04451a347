# Owns: a case in a process of its own: what it answers, dies of, or hangs in.
# Promises: death by a signal and a hang are outcomes; a death on a GPU is looked at again with blocking launches.
# Never: lets a sick process take bisect with it.
"""Child processes. `python -m ratoon.lab.bisect.child` reads a job on stdin and writes its answer as its last line."""

from __future__ import annotations

import faulthandler
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ratoon.core.settings import child_environment
from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.outcome import Difference, Outcome
from ratoon.lab.bisect.stack import place_of

_ANSWER = "answer "
_CUDA_ERRORS = ("CUDA error", "CUBLAS", "illegal memory access", "device-side assert")
_DUMP_AT = 0.8
"""Share of the time limit after which a child writes down where it is."""


def run(case: Case, limit_s: float) -> Outcome:
    """Runs the case in a child. Raises ValueError for a case that cannot be."""
    outcome = _run_once(case, limit_s, {})
    if outcome.kind == "crash" and _is_late(case, outcome):
        # The error of an asynchronous kernel surfaces at a later call; with blocking launches at its own.
        again = _run_once(case, limit_s, {"CUDA_LAUNCH_BLOCKING": "1"})
        if not again.is_healthy:
            return replace(again, detail=f"{again.detail} (found with CUDA_LAUNCH_BLOCKING=1)")
        return replace(outcome, detail=f"{outcome.detail} (does not happen with CUDA_LAUNCH_BLOCKING=1: a race)")
    return outcome


def descend(case: Case, healed: Case | None, limit_s: float) -> Difference | None:
    """The culprit as a child finds it, None where it finds nothing."""
    answer = _answer({"job": "descend", "case": case.as_json(), "healed": healed and healed.as_json()}, limit_s, {})
    if isinstance(answer, Outcome):
        text = f"{answer.kind}: {answer.detail}"
        return Difference(answer.stage or "verify", answer.where or "unknown", (), "a round", text)
    if answer["difference"] is None:
        return None
    return Difference(**{**answer["difference"], "coordinate": tuple(answer["difference"]["coordinate"])})


def _is_late(case: Case, outcome: Outcome) -> bool:
    on_gpu = case.device == "cuda" or any(text in outcome.detail for text in _CUDA_ERRORS)
    return on_gpu or (case.device == "auto" and _has_gpu())


def _has_gpu() -> bool:
    from ratoon.runtime.setup import choose_device

    return choose_device("auto").type == "cuda"


def _run_once(case: Case, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    answer = _answer({"job": "run", "case": case.as_json()}, limit_s, environment)
    return answer if isinstance(answer, Outcome) else Outcome(**answer["outcome"])


def _answer(job: Mapping[str, Any], limit_s: float, environment: Mapping[str, str]) -> dict[str, Any] | Outcome:
    """What the child said, or how it ended without saying anything. ValueError: what it says of a bad case."""
    command = [sys.executable, "-m", "ratoon.lab.bisect.child", str(limit_s)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=child_environment(**environment),
    ) as process:
        try:
            out, err = process.communicate(json.dumps(job), timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            _, err = process.communicate()
            return Outcome("hang", f"no end within {limit_s:g} s", *_place(err))
    said = [line for line in out.splitlines() if line.startswith(_ANSWER)]
    if said:
        answer = json.loads(said[-1].removeprefix(_ANSWER))
        if "bad_input" in answer:
            raise ValueError(answer["bad_input"])
        return answer
    return Outcome("crash", _death(process.returncode, err), *_place(err))


def _death(code: int, err: str) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "nothing was said")
    return f"the process ended with code {code}: {last}"


def _place(err: str) -> tuple[str | None, str | None]:
    """faulthandler writes the innermost frame first."""
    return place_of(err.splitlines())


# ---- inside the child -----------------------------------------------------------------------------------------


def _work(job: Mapping[str, Any]) -> dict[str, Any]:
    from ratoon.lab.bisect.here import Here

    case = Case.from_json(job["case"])
    if job["job"] == "run":
        try:
            return {"outcome": asdict(Here().run(case))}
        except (ValueError, FileNotFoundError) as error:
            return {"bad_input": str(error)}
    healed = job["healed"] and Case.from_json(job["healed"])
    difference = Here().descend(case, healed)
    return {"difference": difference and asdict(difference)}


def main() -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(_DUMP_AT * float(sys.argv[1]), exit=False)
    answer = _work(json.load(sys.stdin))
    faulthandler.cancel_dump_traceback_later()
    print(f"{_ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
