# Owns: `ratoon bisect`.
# Promises: exit code 0 healthy, 1 sick, 2 bad input; what is sick is named in a few lines.
# Never: runs a case itself; lab/bisect does, in child processes.
"""The command that names the culprit."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import (
    BirthTest,
    Budget,
    Device,
    Drafter,
    Dtype,
    Kernels,
    MaxModelLen,
    Method,
    Mode,
    Model,
    RunAhead,
    TopkCap,
    budget_of,
    given,
    option,
)
from ratoon.cli.pair import choose_kernels


@command
def bisect(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    method: Method = None,
    budget: Budget = "16",
    topk_cap: TopkCap = 16,
    rows: Annotated[int, option(help="Rows decoded together.")] = 1,
    mode: Mode = "auto",
    kernels: Kernels = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    page_size: Annotated[int, option(help="Slots of a cache page.")] = 16,
    run_ahead: RunAhead = None,
    max_model_len: MaxModelLen = None,
    birth_test: BirthTest = "quick",
    prompts: Annotated[
        str | None, option(help="humaneval, mtbench, FILE.jsonl or random:LENGTH (default: two short texts).")
    ] = None,
    limit: Annotated[int, option(help="Only the first prompts of the set.")] = 2,
    max_tokens: Annotated[int, option(help="Tokens of each answer.")] = 32,
    temperature: Annotated[float, option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, option(help="Seed of sampled answers.")] = 0,
    band: Annotated[str | None, option(help="Healthy tau; outside of it the case is sick.", metavar="LOW:HIGH")] = None,
    plant: Annotated[str | None, option(help="Plant a known fault first, to see it named.", metavar="NAME")] = None,
    time_limit: Annotated[float, option(help="Seconds of one run; a longer one is a hang.")] = 600.0,
    json: Annotated[Path | None, option("--json", help="Also write all that was found to this file.")] = None,
) -> None:
    """Find what makes a configuration fail: flip one variable at a time, then go down to the first wrong value."""
    from ratoon.cli.show import fetch_bar
    from ratoon.models.hub import resolve

    checked = given(drafter=drafter, method=method, topk_cap=topk_cap, run_ahead=run_ahead, max_model_len=max_model_len)
    nodes, healthy_tau = budget_of(budget), _band(band)
    if time_limit <= 0:
        raise ValueError(f"--time-limit must be above 0 seconds, got {time_limit:g}")
    with fetch_bar() as report:
        for name in (model, *({drafter} - {"auto", "none"})):
            resolve(name, report)
    choose_kernels(kernels, device)
    _check_plant(plant)
    from ratoon.lab.bisect.asked import asked
    from ratoon.lab.bisect.case import Case, running
    from ratoon.lab.bisect.search import Isolated
    from ratoon.lab.bisect.search import bisect as search

    case = Case(
        model=model, drafter=drafter, budget=nodes, topk_cap=checked["topk_cap"], rows=rows, dtype=dtype,
        page_size=page_size, max_model_len=max_model_len, birth_test=birth_test, prompts=asked(model, prompts, limit),
        max_tokens=max_tokens, temperature=temperature, seed=seed, band=healthy_tau, plant=plant,
        **running(device, mode, kernels, run_ahead, method, drafter),
    )  # fmt: skip
    verdict = search(case, Isolated(time_limit), lambda line: print(line, file=sys.stderr))
    print("\n".join(verdict.lines()))
    if json is not None:
        record = {"case": case.as_json(), **verdict.as_json()}
        json.write_text(json_format.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not verdict.is_healthy:
        raise typer.Exit(1)


def _band(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(f"--band must be LOW:HIGH, for example 2.5:4, got '{text}'") from None


def _check_plant(plant: str | None) -> None:
    from ratoon.lab.faults import planted

    planted(plant)
