# Owns: `ratoon doctor`.
# Promises: findings are shown as they are made; exit code 0 healthy, 1 something failed, 2 bad input.
# Never: checks anything; lab/doctor does.
"""The command that says what is wrong."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import Device, Drafter, Dtype, Mode, Model, option

if TYPE_CHECKING:
    from ratoon.lab.doctor.check import Check

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skipped": ("skip", "cyan")}


@command
def doctor(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    mode: Mode = "auto",
    quick: Annotated[bool, option("--quick", help="One prompt instead of three.")] = False,
    json: Annotated[Path | None, option("--json", help="Also write the findings to this file.")] = None,
) -> None:
    """Check machine, checkpoint, wiring and rounds; say what to do about what is wrong."""
    from ratoon.lab.doctor.examine import Patient, examine

    patient = Patient(model, drafter, device, dtype, mode, quick)
    checks: list[Check] = []
    for check in examine(patient):
        checks.append(check)
        _show(check)
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    print(", ".join(f"{count} {_MARKS[status][0]}" for status, count in counts.items()))
    if json is not None:
        record = {"model": model, "drafter": drafter, "counts": counts, "checks": [asdict(check) for check in checks]}
        json.write_text(json_format.dumps(record, indent=2) + "\n", encoding="utf-8")
    if counts["fail"]:
        raise typer.Exit(1)


def _show(check: Check) -> None:
    word, colour = _MARKS[check.status]
    typer.echo(f"{typer.style(f'{word:>4}', fg=colour)}  {check.name:12} {check.seen}")
    if check.status in ("warn", "fail"):
        typer.echo(f"{'':19}expected: {check.expected}\n{'':19}to do: {check.remedy}")
