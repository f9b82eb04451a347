# Owns: `ratoon bench`: the order in which cells run, on which engines, and where their records go.
# Promises: autoregressive cells run first and on an engine without a drafter, so the baseline carries no ballast.
# Never: reports an average of runs: of the repeats the fastest counts.
"""Methods against each other on the same prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from ratoon.core.request import Budget
from ratoon.lab.bars import Bar, bar
from ratoon.lab.matrix import MODES, Group, Matrix, RandomPair
from ratoon.lab.prompts import Prompt
from ratoon.lab.record import Cell, Measured, measure, record, warm_up
from ratoon.lab.table import tables, told

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent


def run(
    matrix: Matrix, json_path: Path | None, opened: Callable[[Engine], None] = lambda engine: None
) -> list[dict[str, Any]]:
    """Runs every cell, appends each record to `json_path` as it comes ('-': standard output), shows the table.

    `opened` is called with each engine before its first cell.
    """
    sink = _open(json_path)
    prompts = matrix.fetch()
    console = Console(stderr=str(json_path) == "-")
    records: list[dict[str, Any]] = []
    try:
        with bar() as shown:
            total = len(prompts) * matrix.repeats * sum(len(matrix.cells(group)) for group in matrix.groups())
            shown.begin("bench", total)
            for group in matrix.groups():
                for row in _run_group(matrix, group, prompts, shown, opened):
                    records.append(row)
                    if sink:
                        print(json.dumps(row), file=sink, flush=True)
    finally:
        if sink and sink is not sys.stdout:
            sink.close()
        if records:
            _show(console, records)
    return records


def _open(path: Path | None) -> TextIO | None:
    if path is None:
        return None
    return sys.stdout if str(path) == "-" else path.open("a", encoding="utf-8")


def _show(console: Console, records: list[dict[str, Any]]) -> None:
    for part in tables(records, console.width):
        console.print(part)
    for line in (line for row in records for line in told(row)):
        console.print(line, highlight=False)


def _run_group(
    matrix: Matrix, group: Group, prompts: list[Prompt], shown: Bar, opened: Callable[[Engine], None]
) -> Iterator[dict[str, Any]]:
    reference: Measured | None = None
    for budget, served in _by_engine(matrix, group):
        engine = _engine(matrix, group, budget, shown)
        try:
            opened(engine)
            for cell in served:
                shown.name(f"{cell.name} C={cell.concurrency}")
                best = _best(engine, prompts, cell, matrix.repeats, shown)
                reference = best if cell.method == "ar" else reference
                yield record(engine, cell, best, reference, matrix.random.simulated if matrix.random else None)
        finally:
            engine.close()


def _by_engine(matrix: Matrix, group: Group) -> list[tuple[Budget | None, list[Cell]]]:
    """Cells with the budget of the engine that serves them, plain decoding (None) first.

    Where rounds are captured each budget has its own engine, so that each has graphs of just its size.
    """
    from ratoon.runtime.setup import choose_device, choose_mode

    live = choose_mode(MODES[group.graphs], choose_device(matrix.device)) == "eager"
    engines: dict[Budget | None, list[Cell]] = {}
    for cell in matrix.cells(group):
        budget = None if cell.method == "ar" else "auto" if live else cell.budget
        engines.setdefault(budget, []).append(cell)
    return list(engines.items())


def _engine(matrix: Matrix, group: Group, budget: Budget | None, shown: Bar) -> Engine:
    from ratoon.runtime.engine import Engine

    settings = {
        "topk_cap": 0 if 0 in matrix.topk_caps else max(matrix.topk_caps),
        "budget": budget or 0,
        "mode": MODES[group.graphs],
        "max_rows": group.concurrency,
        "progress": shown.report,
        **matrix.engine,
    }
    if matrix.random:
        return random_engine(matrix.random, budget is not None, matrix.device, group.dtype, settings)
    drafter = matrix.drafter if budget is not None else "none"
    return Engine(matrix.model, drafter=drafter, device=matrix.device, dtype=group.dtype, **settings)


def random_engine(pair: RandomPair, drafts: bool, device: str, dtype: str, settings: dict[str, Any]) -> Engine:
    """An engine over random weights of the pair's shapes; `max_model_len` lifts the configuration's own limit."""
    from ratoon.models.random import drafter_shape, random_decoder, random_drafter, target_shape
    from ratoon.runtime.engine import Engine
    from ratoon.runtime.setup import choose_device, choose_dtype
    from ratoon.spec.simulate import Simulation

    where, config = choose_device(device), target_shape(pair.target)
    config = replace(config, max_position=max(config.max_position, settings.get("max_model_len") or 0))
    kind = choose_dtype(dtype, where, config)
    drafter = simulation = None
    if drafts:
        assert pair.drafter is not None, "checked with the matrix"
        shape = drafter_shape(pair.drafter)
        shape.require_target(config.num_layers, config.hidden_size, config.vocab_size)
        drafter = random_drafter(shape, kind, where)
        if pair.tau is not None:
            simulation = Simulation.of_tau(pair.tau, shape.num_drafts, where)
        elif pair.simulate:
            simulation = Simulation.of_table(shape.num_drafts, where)
    target = random_decoder(config, kind, where)
    name = f"random {Path(pair.target).stem}"
    return Engine.from_parts(target, drafter, None, name=name, simulation=simulation, **settings)


def _best(engine: Engine, prompts: list[Prompt], cell: Cell, repeats: int, shown: Bar) -> Measured:
    """The fastest of the repeats."""

    def watch(event: StreamEvent) -> None:
        if event.output is not None:
            shown.advance()

    warm_up(engine, cell, prompts[0].num_random)
    runs = [measure(engine, prompts, cell, watch) for _ in range(repeats)]
    return min(runs, key=lambda run: run.wall_s)
