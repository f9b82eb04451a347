# Owns: `ratoon eval`: methods on coding problems, their programs judged, and the one table that comes of it.
# Promises: every method's answers are judged by the same tests; judging is never timed; equal programs run once.
# Never: runs a program itself (lab/sandbox.py does), or measures in a way of its own.
"""Coding correctness of AR, chain and tree beside their speed and their equality."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ratoon.lab.bars import Bar, Report, bar
from ratoon.lab.coding import Problem
from ratoon.lab.matrix import Matrix
from ratoon.lab.record import Cell, Measured, measure, record, warm_up
from ratoon.lab.sandbox import Judged, Sandbox
from ratoon.lab.table import told

if TYPE_CHECKING:
    from ratoon.core.request import Budget
    from ratoon.runtime.engine import Engine, StreamEvent

Record = dict[str, Any]

_LEGEND = (
    "passed: problems whose tests ran to their end; tau: tokens per round; 1st: first drafted token accepted;\n"
    "same, near, other: answers whose tokens equal AR's, leave them at a near-tie, or differ."
)


class Judge:
    """Programs that were judged before are not run again: the methods mostly write the same."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: dict[tuple[str, str], Judged] = {}

    def __call__(self, problem: Problem, answer: str) -> Judged:
        key = problem.program(answer), problem.tests
        if key not in self._known:
            self._known[key] = self.sandbox.run(*key)
        return self._known[key]


def run(
    matrix: Matrix, problems: Sequence[Problem], sandbox: Sandbox, json_path: Path | None, samples: Path | None
) -> list[Record]:
    """Runs every cell of the matrix's one group and shows the table. Records and samples are appended as they come
    ('-': standard output)."""
    for path in (json_path, samples):
        _append(path, [])  # a file that cannot be written is told now
    judge, records = Judge(sandbox), []
    try:
        with bar() as shown:
            for row, kept in _cells(matrix, problems, judge, shown):
                records.append(row)
                _append(json_path, [row])
                _append(samples, kept)
    finally:
        if records:
            _show(records, Console(stderr="-" in (str(json_path), str(samples))))
    return records


def _append(path: Path | None, rows: list[Record]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    if str(path) == "-":
        sys.stdout.write(text)
    elif path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def _cells(
    matrix: Matrix, problems: Sequence[Problem], judge: Judge, shown: Bar
) -> Iterator[tuple[Record, list[Record]]]:
    """The record and the samples of each cell."""
    (group,) = matrix.groups()
    cells = matrix.cells(group)
    shown.begin("eval", len(cells) * len(problems))

    def watch(event: StreamEvent) -> None:
        if event.output is not None:
            shown.advance()

    reference: Measured | None = None
    for engine, served in _engines(matrix, cells, shown.report):
        for cell in served:
            shown.name(cell.name)
            warm_up(engine, cell)
            measured = measure(engine, [problem.prompt for problem in problems], cell, watch)
            reference = measured if cell.method == "ar" else reference
            kept = _samples(cell, problems, measured, judge, shown)
            yield {**record(engine, cell, measured, reference), **_score(kept, judge.sandbox)}, kept


def _engines(matrix: Matrix, cells: Sequence[Cell], report: Report) -> Iterator[tuple[Engine, list[Cell]]]:
    """Plain decoding first and without a drafter; where rounds are captured each budget has an engine of its own."""
    from ratoon.runtime.engine import Engine
    from ratoon.runtime.setup import choose_device, choose_mode

    live = choose_mode(matrix.engine["mode"], choose_device(matrix.device)) == "eager"
    served: dict[Budget | None, list[Cell]] = {}
    for cell in cells:
        budget = None if cell.method == "ar" else "auto" if live else cell.budget
        served.setdefault(budget, []).append(cell)
    for budget, group in served.items():
        engine = Engine(
            matrix.model,
            drafter="none" if budget is None else matrix.drafter,
            budget=budget or 0,
            topk_cap=0 if 0 in matrix.topk_caps else max(matrix.topk_caps),
            dtype=matrix.dtypes[0],
            device=matrix.device,
            max_rows=matrix.concurrency[0],
            progress=report,
            **matrix.engine,
        )
        with closing(engine):
            yield engine, group


def _samples(cell: Cell, problems: Sequence[Problem], measured: Measured, judge: Judge, shown: Bar) -> list[Record]:
    kept = []
    for number, (problem, output) in enumerate(zip(problems, measured.outputs, strict=True), start=1):
        judged = judge(problem, output.text)
        shown.report("judging", number, len(problems))
        kept.append(
            {
                "method": cell.method,
                "cell": cell.name,
                "problem": problem.prompt.id,
                "prompt": problem.asked,
                "completion": output.text,
                "passed": judged.passed,
                "cause": judged.cause,
            }
        )
    return kept


def _score(kept: Sequence[Record], sandbox: Sandbox) -> Record:
    return {
        "passed": sum(sample["passed"] for sample in kept),
        "failed": {sample["problem"]: sample["cause"] for sample in kept if not sample["passed"]},
        "isolated": sandbox.isolated,
    }


def _show(records: Sequence[Record], console: Console) -> None:
    first = records[0]
    title = (
        f"{first['model']}, {first['prompts']} problems on {first['device']}: mode {first['mode']}, {first['dtype']}"
    )
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    for name in ("passed", "tok/s", "tau", "1st", "same", "near", "other"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in records:
        shown.add_row(*_line(row))
    console.print(shown)
    console.print(_LEGEND, style="dim")
    for line in (line for row in records for line in told(row)):
        console.print(line, highlight=False)


def _line(row: Record) -> list[str]:
    cap = "" if row["topk_cap"] is None else f" cap {row['topk_cap']}"
    name = "ar" if row["method"] == "ar" else f"{row['method']} {row['budget']}{cap}"
    first = row["accept_per_position"][0] if row["accept_per_position"] else None
    figures = [(row["tok_s"], ".1f"), (row["tau"], ".2f"), (first, ".2f")]
    figures += [(row[f"{verdict}_prompts"], "d") for verdict in ("identical", "near_tie", "mismatched")]
    shown = ["-" if value is None else format(value, form) for value, form in figures]
    return [name, f"{row['passed']}/{row['prompts']}", *shown]
