# Owns: `ratoon bench` on engines of this process: which engine serves which cell, and when it is opened and closed.
# Promises: autoregressive cells run first and on an engine without a drafter, so the baseline carries no ballast.
# Never: reports an average of runs: of the repeats the fastest counts.
"""Methods against each other on the same prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ratoon.core.request import Budget
from ratoon.lab.bars import Bar, Report
from ratoon.lab.example import example_tree
from ratoon.lab.isolated import Isolated
from ratoon.lab.matrix import Group, Matrix, RandomPair
from ratoon.lab.prompts import Prompt
from ratoon.lab.record import Cell, Measured, Run, measure, record, settings, warm_up
from ratoon.lab.results import Record, Results
from ratoon.lab.sweep import Contender, Task, Tick, sweep

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent

Score = Callable[[Cell, Measured], Record]

EXAMPLE_TOKENS = 32


def ignore(engine: Engine) -> None:
    """Does nothing with an engine. A lambda would not get into a child process."""


def run(
    matrix: Matrix,
    json_path: Path | None,
    opened: Callable[[Engine], None] = ignore,
    out: Path | None = None,
    again: bool = False,
) -> list[Record]:
    """Runs the matrix; `lab/sweep.py` says what becomes of the records. `opened` is called with each new engine.

    On a GPU engines are in a child process: an error of a kernel spoils all that its process does afterwards.
    """
    from ratoon.runtime.setup import choose_device

    prompts = matrix.fetch()
    apart = choose_device(matrix.device).type == "cuda"

    def engines(results: Results, shown: Bar) -> Contender:
        local = Engines(matrix, prompts, results, shown.report, opened, draws=out is not None)
        make = partial(engines_apart, matrix, prompts, folder, opened, out is not None)
        return Isolated(local, make, shown.report) if apart else local

    with TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        return sweep(engines, json_path, out, again)


def engines_apart(
    matrix: Matrix, prompts: list[Prompt], folder: Path, opened: Callable[[Engine], None], draws: bool, report: Report
) -> Engines:
    """For a child process, which shares only the folder with the sweep: there it keeps what later cells are compared
    with."""
    from ratoon.ops.launch import use_kernels

    use_kernels(matrix.kernels)  # pyright: ignore[reportArgumentType]
    return Engines(matrix, prompts, Results(folder), report, opened, draws)


class Engines:
    """Engines of this process, one at a time: that of the last cell stays open for the next that it can serve."""

    def __init__(
        self,
        matrix: Matrix,
        prompts: list[Prompt],
        results: Results,
        report: Report,
        opened: Callable[[Engine], None] = ignore,
        draws: bool = False,
        score: Score = lambda cell, measured: {},
    ) -> None:
        """`draws`: whether records hold a draft tree; `score`: what else they say of the answers."""
        self.matrix, self.prompts, self.results = matrix, prompts, results
        self._report, self._opened, self._draws, self._score = report, opened, draws, score
        self._digest = digest(prompts)
        self._dtype = self._chosen_dtype()
        self._open: tuple[tuple[Group, Budget | None], Engine] | None = None

    def tasks(self) -> list[Task]:
        """Plain decoding first in each group, then the cells of one engine after those of another."""
        found = []
        for group in self.matrix.groups():
            live, cells = self._is_live(group), self.matrix.cells(group)
            budgets = list(dict.fromkeys(_budget(cell, live) for cell in cells))
            cells.sort(key=lambda cell: budgets.index(_budget(cell, live)))
            found += [self._task(group, cell) for cell in cells]
        return found

    def _task(self, group: Group, cell: Cell) -> Task:
        configuration = {**self.matrix.configuration(group, cell), "prompts": self._digest}
        return Task(cell, group, len(self.prompts) * self.matrix.repeats, configuration)

    def _is_live(self, group: Group) -> bool:
        from ratoon.runtime.setup import choose_device, choose_mode

        return choose_mode(self.matrix.mode(group), choose_device(self.matrix.device)) == "eager"

    def measure(self, task: Task, tick: Tick) -> Record:
        cell, engine = task.cell, self._engine(task)
        best = _best(engine, self.prompts, cell, self.matrix.repeats, tick)
        if cell.method == "ar":
            self.results.keep_reference(task.key, best.kept())
        simulated = self.matrix.random.simulated if self.matrix.random else None
        row = record(engine, cell, best, self._reference(task), simulated)
        drawn = self._draws and cell.method != "ar" and not self.prompts[0].num_random
        return {
            **row,
            "prompt_set": self.matrix.prompts,
            "tree": example_tree(engine, self.prompts[0], _short(cell)) if drawn else [],
            **self._score(cell, best),
        }

    def _reference(self, task: Task) -> Run | None:
        """The autoregressive run of the same group: of this sweep, or of an earlier one in the same folder."""
        plain = replace(task.cell, method="ar", budget=0, topk_cap=1)
        kept = self.results.reference(self._task(task.group, plain).key)
        return Run.of(kept) if kept else None

    def _chosen_dtype(self) -> str:
        """What 'auto' was in this folder: a probe of the processor may say one thing today and another tomorrow, and
        tokens of two dtypes cannot be compared."""
        here = self.matrix.configuration(self.matrix.groups()[0], self.matrix.cells(self.matrix.groups()[0])[0])
        names = ("model", "random", "device")
        for row in self.results.records.values():
            told = row["configuration"]
            if row["error"] is None and told["dtype"] == "auto" and all(told[name] == here[name] for name in names):
                return row["dtype"]
        return "auto"

    def settings(self, task: Task) -> Record:
        matrix, group = self.matrix, task.group
        model = matrix.random.target if matrix.random else matrix.model
        mode = matrix.mode(group)
        shared = settings(task.cell, model, matrix.drafter, mode, group.dtype, matrix.device, len(self.prompts))
        return {**shared, "prompt_set": matrix.prompts}

    def _engine(self, task: Task) -> Engine:
        """The open engine if it serves this cell, else a new one.

        Where rounds are captured each budget has its own, so that each has graphs of just its size.
        """
        wanted = task.group, _budget(task.cell, self._is_live(task.group))
        if self._open is None or self._open[0] != wanted:
            self.close()
            engine = _engine(self.matrix, *wanted, self._dtype, self._report)
            self._open = wanted, engine
            if task.group.dtype == "auto":
                self._dtype = engine.dtype
            self._opened(engine)
        return self._open[1]

    def close(self) -> None:
        """Closes the open engine."""
        if self._open:
            engine, self._open = self._open[1], None
            engine.close()


def digest(prompts: list[Prompt]) -> str:
    """Equal for equal prompts, wherever they came from."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]


def _short(cell: Cell) -> Cell:
    """As many tokens as an example needs."""
    return replace(cell, max_tokens=min(EXAMPLE_TOKENS, cell.max_tokens))


def _budget(cell: Cell, live: bool) -> Budget | None:
    """The budget of the engine that serves a cell, None without a drafter."""
    return None if cell.method == "ar" else "auto" if live else cell.budget


def _engine(matrix: Matrix, group: Group, budget: Budget | None, auto: str, report: Report) -> Engine:
    """`auto`: the dtype that 'auto' stands for by now."""
    from ratoon.runtime.engine import Engine

    dtype = auto if group.dtype == "auto" else group.dtype
    settings = {
        "topk_cap": 0 if 0 in matrix.topk_caps else max(matrix.topk_caps),
        "budget": budget or 0,
        "mode": matrix.mode(group),
        "max_rows": group.concurrency,
        # Methods run the same prompts one after the other: none may find what another has left.
        "enable_prefix_caching": False,
        "progress": report,
        **matrix.engine,
    }
    if matrix.random:
        return random_engine(matrix.random, budget is not None, matrix.device, dtype, settings)
    drafter = matrix.drafter if budget is not None else "none"
    return Engine(matrix.model, drafter=drafter, device=matrix.device, dtype=dtype, **settings)


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


def _best(engine: Engine, prompts: list[Prompt], cell: Cell, repeats: int, tick: Tick) -> Measured:
    """The fastest of the repeats."""

    def watch(event: StreamEvent) -> None:
        if event.output is not None:
            tick()

    warm_up(engine, cell, prompts[0].num_random)
    runs = [measure(engine, prompts, cell, watch) for _ in range(repeats)]
    return min(runs, key=lambda run: run.wall_s)
