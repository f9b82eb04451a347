# Owns: tests of cells in child processes: how they die, what is said of it, what comes after.
# Promises: processes die in truth, by signals and by ending.
# Never: needs a GPU, whose errors are the reason for it.
"""lab/isolated.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ratoon.lab import sweep
from ratoon.lab.bars import Report
from ratoon.lab.bench import Engines, engines_apart, ignore
from ratoon.lab.isolated import Isolated
from ratoon.lab.matrix import Group, Matrix
from ratoon.lab.record import Cell
from ratoon.lab.results import Results
from ratoon.lab.sweep import CellFailed, Task, Tick

FATES: dict[str, Callable[[], Any]] = {
    "well": lambda: None,
    "illegal access": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "out of memory": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "exception": lambda: [][1],
}


class Doomed:
    """Its cells do what their configuration says."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def tasks(self) -> list[Task]:
        group = Group(1, "auto", "auto", 0.0)
        return [Task(Cell("ar", 0, 1, 1, seed=i), group, 2, {"fate": fate}) for i, fate in enumerate(FATES)]

    def settings(self, task: Task) -> dict[str, Any]:
        return {"method": "ar", "topk_cap": None, "concurrency": 1, "temperature": 0.0}

    def measure(self, task: Task, tick: Tick) -> dict[str, Any]:
        tick()
        self.report("capture", 1, 2)
        FATES[task.configuration["fate"]]()
        return {"pid": os.getpid(), "parent": os.getppid()}

    def close(self) -> None:
        pass


@pytest.fixture
def isolated() -> Iterator[tuple[Isolated, list[Any]]]:
    told: list[Any] = []
    made = Isolated(Doomed(lambda *_: None), Doomed, lambda *progress: told.append(progress))
    yield made, told
    made.close()


def test_a_child_measures_until_a_cell_fails(isolated: tuple[Isolated, list[Any]]) -> None:
    contender, told = isolated
    well = contender.tasks()[0]
    ticks: list[int] = []
    first = contender.measure(well, lambda: ticks.append(1))
    assert first["parent"] == os.getpid() and contender.measure(well, lambda: None)["pid"] == first["pid"]
    assert ticks == [1] and told == [("capture", 1, 2)] * 2
    contender.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)
    assert contender.measure(well, lambda: None)["pid"] != first["pid"], "the next cell gets a fresh process"


CAUSES = {
    "illegal access": "the process that measured it died of SIGABRT",
    "out of memory": "the process that measured it died of SIGKILL: out of memory?",
    "exit": "the process that measured it ended with code 3",
    "exception": "IndexError: list index out of range",
}


def test_each_death_is_a_row_and_the_sweep_ends_by_itself(
    isolated: tuple[Isolated, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "tables", lambda *_: [])
    monkeypatch.setattr(sweep, "told", lambda row: [])
    with pytest.raises(RuntimeError, match="4 of 5 cells failed"):
        sweep.sweep(lambda *_: isolated[0], tmp_path / "o.jsonl", None, again=False)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert {row["configuration"]["fate"]: row["error"] for row in rows} == {"well": None, **CAUSES}


def test_engines_apart_compare_with_what_the_folder_holds(model: Path, drafter: Path, tmp_path: Path) -> None:
    """Plain decoding was measured by another process, here this one."""
    given = dict.fromkeys(("random_weights", "drafter_config", "simulate", "simulate_tau"))
    matrix = Matrix.parse(
        **{"model": str(model), "drafter": str(drafter), "methods": "ar,chain", "budgets": "3", "topk_caps": "4"},
        **{"concurrency": "2", "graphs": "off", "dtype": "float32", "device": "cpu", "temperature": "0", "limit": 2},
        **{"prompts": "random:5", "max_tokens": 8, "repeats": 1, "seed": 0, "cut": True, "kernels": "torch"},
        **{**given, "engine": {"max_model_len": 60}},
    )
    prompts, shown = matrix.fetch(), lambda *_: None
    local = Engines(matrix, prompts, Results(tmp_path), shown)
    plain, chain = local.tasks()
    assert local.measure(plain, lambda: None)["method"] == "ar"
    contender = Isolated(local, partial(engines_apart, matrix, prompts, tmp_path, ignore, False), shown)
    try:
        row = contender.measure(chain, lambda: None)
    finally:
        contender.close()
    assert row["identical_prompts"] == 2 and row["speedup_vs_ar"] > 0 and row["output_tokens"] == 16


def test_a_failed_cell_keeps_the_words_of_the_child() -> None:
    assert sweep.cause_of(CellFailed("died of\nSIGSEGV")) == "died of SIGSEGV"
    assert sweep.cause_of(ValueError("too\nmany")) == "ValueError: too many"
