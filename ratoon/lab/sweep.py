# Owns: the course of a sweep: which cells are left, what becomes of one that fails, what is shown and kept.
# Promises: a finished cell is not measured twice; a cell that fails is a row with its cause, and tried again next time.
# Never: knows how a cell is measured: a `Contender` does.
"""Cells one after the other, into results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console

from ratoon.lab.bars import Bar, bar
from ratoon.lab.matrix import Group
from ratoon.lab.provenance import provenance
from ratoon.lab.record import Cell
from ratoon.lab.results import Record, Results, key_of, opened
from ratoon.lab.table import failure, tables, told

Tick = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """A cell to measure, its weight on the progress bar, and all that its figures may depend on."""

    cell: Cell
    group: Group
    ticks: int
    configuration: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        return key_of(self.configuration)


class CellFailed(RuntimeError):
    """A cell has no figures; the message is the whole cause."""


def cause_of(error: Exception) -> str:
    """In one line."""
    words = str(error) if isinstance(error, CellFailed) else f"{type(error).__name__}: {error}"
    return " ".join(words.split())


class Contender(Protocol):
    """What is measured: engines of this process, or a server."""

    def tasks(self) -> list[Task]:
        """All cells, in the order in which they run best."""
        ...

    def measure(self, task: Task, tick: Tick) -> Record:
        """The cell's record. `tick` is called as each of the task's ticks passes."""
        ...

    def settings(self, task: Task) -> Record:
        """What the record of a failed cell says of it."""
        ...

    def close(self) -> None:
        """Lets go of everything; the next cell starts anew."""
        ...


def sweep(
    contender_for: Callable[[Results, Bar], Contender], json_path: Path | None, out: Path | None, again: bool
) -> list[Record]:
    """Measures every cell that `out` does not hold yet, or all of them again. Returns the records of all.

    Each new record is appended to `json_path` ('-': standard output) too. The table and `out`'s report are made however
    the sweep ends. RuntimeError after the last cell if some failed.
    """
    if out and find_spec("matplotlib") is None:
        raise ValueError("the report in --out needs matplotlib: pip install 'ratoon[bench]'")
    console = Console(stderr=str(json_path) == "-")
    with _sink(json_path) as sink, opened(out) as results:
        tasks: list[Task] = []
        try:
            with bar() as shown:
                contender = contender_for(results, shown)
                tasks += contender.tasks()
                todo = [task for task in tasks if again or not results.is_done(task.key)]
                if len(todo) < len(tasks):
                    left = f"{len(todo)} are left" if todo else "repeat them with --again"
                    console.print(f"{len(tasks) - len(todo)} of {len(tasks)} cells are in {out} already: {left}")
                if todo:
                    results.begin(provenance(sys.argv))
                _measure_all(contender, todo, results, shown, sink)
        finally:
            records = [results.records[task.key] for task in tasks if task.key in results.records]
            _show(console, records)
            if out and results.records:
                from ratoon.lab.report import write_report

                console.print(f"report: {write_report(results, out)}", highlight=False)
    _complain(records)
    return records


def _measure_all(contender: Contender, todo: list[Task], results: Results, shown: Bar, sink: TextIO | None) -> None:
    shown.begin("bench", sum(task.ticks for task in todo))
    try:
        for task in todo:
            shown.name(f"{task.cell.name} C={task.cell.concurrency}")
            row = {"key": task.key, "configuration": dict(task.configuration), **_row(contender, task, shown)}
            results.add(row)
            if sink:
                print(json.dumps(row), file=sink, flush=True)
    finally:
        contender.close()


def _row(contender: Contender, task: Task, shown: Bar) -> Record:
    """The record of a cell, or its settings and why it has no figures."""
    left = task.ticks

    def tick() -> None:
        nonlocal left
        left -= 1
        shown.advance()

    try:
        return {**contender.measure(task, tick), "error": None}
    except Exception as error:  # noqa: BLE001 (whatever a cell dies of, the next one must run)
        contender.close()
        for _ in range(left):
            shown.advance()
        return {**contender.settings(task), "error": cause_of(error)}


@contextmanager
def _sink(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
    elif str(path) == "-":
        yield sys.stdout
    else:
        with path.open("a", encoding="utf-8") as file:
            yield file


def _show(console: Console, records: list[Record]) -> None:
    measured = [row for row in records if row["error"] is None]
    for part in tables(measured, console.width) if measured else ():
        console.print(part)
    lines = [line for row in measured for line in told(row)]
    for line in (*lines, *(failure(row) for row in records if row["error"] is not None)):
        console.print(line, highlight=False, markup=False)


def _complain(records: list[Record]) -> None:
    failed = [row for row in records if row["error"] is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(records)} cells failed, first of them {failure(failed[0])}")
