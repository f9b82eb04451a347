# Owns: `ratoon bench`: the matrix of cells, the order in which they run, the table.
# Promises: autoregressive cells run first and on an engine without a drafter, so the baseline carries no ballast.
# Never: reports an average of runs: of the repeats the fastest counts.
"""Methods against each other on the same prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ratoon.core.request import Method
from ratoon.lab.prompts import Prompt, load_prompts
from ratoon.lab.record import Budget, Cell, Measured, measure, record, warm_up
from ratoon.models.wheel import Progress as FetchProgress

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent

N = TypeVar("N", int, float)

_MODES = {"auto": "auto", "on": "graph", "off": "eager"}
_SETTINGS = ("concurrency", "temperature", "mode", "dtype", "device")
# The engine's own limit, known here so that a sweep does not end at it after its first hour.
MAX_BUDGET = 127
_DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class Group:
    """What cells share that run on the same engines, one without and one with a drafter."""

    concurrency: int
    graphs: str
    dtype: str
    temperature: float


@dataclass(frozen=True)
class Matrix:
    """What `ratoon bench` was asked for, every list read and checked."""

    model: str
    drafter: str
    methods: tuple[Method, ...]
    budgets: tuple[Budget, ...]
    topk_caps: tuple[int, ...]
    concurrency: tuple[int, ...]
    graphs: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str
    temperatures: tuple[float, ...]
    prompts: str
    limit: int | None
    max_tokens: int
    repeats: int
    seed: int

    @classmethod
    def parse(cls, **given: Any) -> Matrix:
        """From the command line's texts. Raises ValueError naming the option and the entry."""
        if given["repeats"] < 1:
            raise ValueError(f"--repeats must be at least 1, got {given['repeats']}")
        if given["max_tokens"] < 1:
            raise ValueError(f"--max-tokens must be at least 1, got {given['max_tokens']}")
        return cls(
            model=given["model"],
            drafter=given["drafter"],
            methods=cast(tuple[Method, ...], _words("--methods", given["methods"], get_args(Method))),
            budgets=tuple(_budgets(given["budgets"])),
            topk_caps=_numbers("--topk-caps", given["topk_caps"], int, 0, MAX_BUDGET),
            concurrency=_numbers("--concurrency", given["concurrency"], int, 1),
            graphs=_words("--graphs", given["graphs"], tuple(_MODES)),
            dtypes=_words("--dtype", given["dtype"], _DTYPES),
            device=given["device"],
            temperatures=_numbers("--temperature", given["temperature"], float, 0.0),
            prompts=given["prompts"],
            limit=given["limit"],
            max_tokens=given["max_tokens"],
            repeats=given["repeats"],
            seed=given["seed"],
        )

    def fetch(self, progress: FetchProgress | None = None) -> list[Prompt]:
        """The prompts, fetched if they must be."""
        return load_prompts(self.prompts, self.limit, progress)

    def groups(self) -> list[Group]:
        return [Group(*choice) for choice in product(self.concurrency, self.graphs, self.dtypes, self.temperatures)]

    def cells(self, group: Group) -> list[Cell]:
        """The group's cells, ar first, none twice."""
        cells: list[Cell] = []
        for method in sorted(self.methods, key=lambda m: ("ar", "chain", "tree").index(m)):
            budgets = self.budgets if method != "ar" else (0,)
            caps = self.topk_caps if method == "tree" else (1,)
            for budget, cap in product(budgets, caps):
                cell = Cell(
                    method=method,
                    budget=budget,
                    topk_cap=cap,
                    concurrency=group.concurrency,
                    temperature=group.temperature,
                    seed=self.seed,
                    max_tokens=self.max_tokens,
                )
                cells.append(cell)
        return list(dict.fromkeys(cells))


def _words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ValueError(f"{option} takes {', '.join(known)} separated by commas, got '{text}'")
    return words


def _numbers(option: str, text: str, kind: type[N], least: N, most: float = float("inf")) -> tuple[N, ...]:
    try:
        numbers = tuple(dict.fromkeys(kind(entry) for entry in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(least <= number <= most for number in numbers):
        limit = "" if most == float("inf") else f" to {most:g}"
        raise ValueError(f"{option} takes numbers from {least}{limit} separated by commas, got '{text}'")
    return numbers


def _budgets(text: str) -> Iterator[Budget]:
    for entry in dict.fromkeys(part.strip() for part in text.split(",")):
        if entry == "auto":
            yield "auto"
        else:
            yield from _numbers("--budgets (beside auto)", entry, int, 0, MAX_BUDGET)


# -- running ----------------------------------------------------------------------------------------------------------


def run(matrix: Matrix, json_path: Path | None) -> list[dict[str, Any]]:
    """Runs every cell, appends each record to `json_path` as it comes ('-': standard output), shows the table."""
    prompts = matrix.fetch()
    console = Console(stderr=str(json_path) == "-")
    sink = _open(json_path)
    records: list[dict[str, Any]] = []
    try:
        with _bar(Console(stderr=True)) as bar:
            total = len(prompts) * matrix.repeats * sum(len(matrix.cells(group)) for group in matrix.groups())
            task = bar.add_task("bench", total=total)
            for group in matrix.groups():
                for row in _run_group(matrix, group, prompts, bar, task):
                    records.append(row)
                    if sink:
                        print(json.dumps(row), file=sink, flush=True)
    finally:
        if sink and sink is not sys.stdout:
            sink.close()
        if records:
            console.print(table(records))
            for line in (line for row in records for line in told(row)):
                console.print(line, highlight=False)
    return records


def _open(path: Path | None) -> TextIO | None:
    if path is None:
        return None
    return sys.stdout if str(path) == "-" else path.open("a", encoding="utf-8")


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _run_group(
    matrix: Matrix, group: Group, prompts: list[Prompt], bar: Progress, task: TaskID
) -> Iterator[dict[str, Any]]:
    reference: Measured | None = None
    cells = matrix.cells(group)
    for drafter in ("none", matrix.drafter):
        served = [cell for cell in cells if (cell.method == "ar") == (drafter == "none")]
        if not served or (drafter == "none" and cells[0].method != "ar"):
            continue
        engine = _engine(matrix, group, drafter)
        try:
            for cell in served:
                bar.update(task, description=f"{cell.name} C={cell.concurrency}")
                best = _best(engine, prompts, cell, matrix.repeats, bar, task)
                reference = best if cell.method == "ar" else reference
                yield record(engine, cell, best, reference)
        finally:
            engine.close()


def _engine(matrix: Matrix, group: Group, drafter: str) -> Engine:
    from ratoon.runtime.engine import Engine

    return Engine(
        matrix.model,
        drafter=drafter,
        topk_cap=0 if 0 in matrix.topk_caps else max(matrix.topk_caps),
        device=matrix.device,
        dtype=group.dtype,
        mode=_MODES[group.graphs],
        max_rows=group.concurrency,
    )


def _best(engine: Engine, prompts: list[Prompt], cell: Cell, repeats: int, bar: Progress, task: TaskID) -> Measured:
    """The fastest of the repeats."""

    def watch(event: StreamEvent) -> None:
        if event.output is not None:
            bar.advance(task)

    warm_up(engine, cell)
    runs = [measure(engine, prompts, cell, watch) for _ in range(repeats)]
    return min(runs, key=lambda run: run.wall_s)


# -- showing ----------------------------------------------------------------------------------------------------------


def table(records: list[dict[str, Any]]) -> Table:
    """One line per record; a setting that all records share stands in the title instead."""
    first = records[0]
    varying = [field for field in _SETTINGS if len({row[field] for row in records}) > 1]
    shared = [f"{field} {first[field]}" for field in _SETTINGS if field not in varying]
    shown = Table(title=f"{first['model']}, {first['prompts']} prompts, {', '.join(shared)}")
    for name in ("method", "budget", "cap", *varying):
        shown.add_column(name)
    for name in ("tok/s", "x AR", "tau", "1st", "equal", "near-tie", "other", "ttft ms"):
        shown.add_column(name, justify="right")
    for row in records:
        settings = (row["method"], row["budget"], row["topk_cap"], *(row[field] for field in varying))
        shown.add_row(*("-" if value is None else str(value) for value in settings), *_figures(row))
    return shown


def _figures(row: dict[str, Any]) -> list[str]:
    first = row["accept_per_position"][0] if row["accept_per_position"] else None
    figures = [(row["tok_s"], ".1f"), (row["speedup_vs_ar"], ".2f"), (row["tau"], ".2f"), (first, ".2f")]
    figures += [(row[f"{verdict}_prompts"], "d") for verdict in ("identical", "near_tie", "mismatched")]
    return ["-" if value is None else format(value, form) for value, form in [*figures, (row["ttft_ms"], ".0f")]]


def agreement(row: dict[str, Any]) -> str:
    """Whether the tokens equal the autoregressive ones, in a few words."""
    parts = [f"{row['identical_prompts']} yes"]
    parts += [f"{row['near_tie_prompts']} near-tie"] if row["near_tie_prompts"] else []
    parts += [f"{row['mismatched_prompts']} NO"] if row["mismatched_prompts"] else []
    return ", ".join(parts)


def told(row: dict[str, Any]) -> list[str]:
    """A line per first divergence from the autoregressive tokens: near-ties are printed, never skipped."""
    cell = " ".join(str(part) for part in (row["method"], row["budget"], f"C={row['concurrency']}") if part is not None)
    return [
        f"{cell}: {d['prompt']} differs from token {d['index']} on: {d['verdict'].replace('_', '-')}, the top two are "
        f"{d['gap']:.4f} apart (bound {d['bound']:.4f})"
        for d in row["divergences"]
    ]
