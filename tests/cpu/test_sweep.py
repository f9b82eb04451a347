# Owns: the tests of sweeps that end early: resumed folders, torn lines, cells that fail, and the report.
# Promises: each runs the real command line over a fake engine, twice where it is about the second time.
# Never: loads a model.
"""lab/sweep.py, lab/results.py, lab/report.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cpu import fake_engine
from tests.cpu.fake_engine import FakeEngine, ratoon

pytest.importorskip("matplotlib", reason="the report of --out needs the bench extra")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    return fake_engine.install(monkeypatch)


class Sweep:
    """One matrix of eight cells in one folder."""

    def __init__(self, folder: Path) -> None:
        self.out, self.prompts = folder / "out", folder / "p.jsonl"
        self.prompts.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')

    def run(self, *more: str) -> Result:
        matrix = [
            "--methods",
            "ar,chain,tree",
            "--budgets",
            "3,7",
            "--topk-caps",
            "4,8",
            "--max-tokens",
            "9",
            "--concurrency",
            "1,2",
        ]
        return ratoon("bench", *matrix, "--prompts", str(self.prompts), "--out", str(self.out), *more)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]


CELLS = 2 * (1 + 2 + 4)


@pytest.fixture
def sweep(tmp_path: Path, engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Draws no report: that takes seconds."""
    monkeypatch.setattr("ratoon.lab.report.write_report", lambda results, out: out / "report.html")
    return Sweep(tmp_path)


def test_a_finished_sweep_measures_nothing_again_unless_asked(sweep: Sweep, engines: type[FakeEngine]) -> None:
    assert sweep.run().exit_code == 0
    assert len(sweep.rows()) == CELLS == len({row["key"] for row in sweep.rows()})
    engines.made.clear()
    result = sweep.run()
    assert result.exit_code == 0 and not engines.made and f"{CELLS} of {CELLS} cells are in" in result.output
    sweep.run("--again")
    assert len(engines.made) > 0 and len(sweep.rows()) == 2 * CELLS


def test_other_arguments_add_their_cells_to_the_folder(sweep: Sweep, engines: type[FakeEngine]) -> None:
    sweep.run()
    assert sweep.run("--temperature", "0,1").exit_code == 0
    assert len(sweep.rows()) == 2 * CELLS == len({row["key"] for row in sweep.rows()})


@pytest.mark.parametrize("killed_at", [1, 5, 11])
def test_a_sweep_that_is_cut_off_goes_on_where_it_was(
    sweep: Sweep, engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    calls = 0

    def dies(ids: list[int]) -> None:
        nonlocal calls
        calls += len(ids) > 1  # the warm-up's prompts are among them too
        if calls == 4 * killed_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(engines, "behaviour", staticmethod(dies))
    assert sweep.run().exit_code == 130
    before = [row["key"] for row in sweep.rows()] if (sweep.out / "results.jsonl").exists() else []
    assert len(before) < CELLS
    monkeypatch.setattr(engines, "behaviour", staticmethod(lambda ids: None))
    assert sweep.run().exit_code == 0
    keys = [row["key"] for row in sweep.rows()]
    assert keys[: len(before)] == before and len(keys) == CELLS == len(set(keys))
    compared = [row["identical_prompts"] for row in sweep.rows()]
    assert compared == [2] * CELLS, "the baseline of an earlier run still counts"


def test_a_torn_line_costs_its_cell_alone(sweep: Sweep, engines: type[FakeEngine]) -> None:
    sweep.run()
    file = sweep.out / "results.jsonl"
    file.write_text(file.read_text()[:-40])
    assert sweep.run().exit_code == 0
    assert len(sweep.rows()) == CELLS == len({row["key"] for row in sweep.rows()})


def test_a_cell_that_fails_is_a_row_with_its_cause_and_tried_again(
    sweep: Sweep, engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engines.stream

    def stream(self: FakeEngine, prompts: Any, params: Any) -> Any:
        if params.method == "chain" and params.budget == 7:
            raise RuntimeError("CUDA error:\nan illegal memory access")
        return real(self, prompts, params)

    monkeypatch.setattr(engines, "stream", stream)
    result = sweep.run()
    assert result.exit_code == 1 and "2 of 14 cells failed" in result.output
    failed = [row for row in sweep.rows() if row["error"]]
    assert [row["error"] for row in failed] == ["RuntimeError: CUDA error: an illegal memory access"] * 2
    assert all(row["method"] == "chain" and row["budget"] == 7 for row in failed) and len(sweep.rows()) == CELLS
    assert result.output.count("illegal memory access") >= 2
    monkeypatch.setattr(engines, "stream", real)
    assert sweep.run().exit_code == 0
    assert len(sweep.rows()) == CELLS + 2 and not any(row["error"] for row in sweep.rows()[CELLS:])


def test_the_report_needs_nothing_beside_itself_and_names_what_failed(
    tmp_path: Path, engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, whole = engines.stream, Sweep(tmp_path)

    def stream(self: FakeEngine, prompts: Any, params: Any) -> Any:
        if params.method == "chain" and params.budget == 7:
            raise RuntimeError("an illegal memory access")
        return real(self, prompts, params)

    monkeypatch.setattr(engines, "stream", stream)
    monkeypatch.setattr(sys, "argv", ["ratoon", "bench", "--topk-caps", "4,8"])
    whole.run()
    page = (whole.out / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page), "it fetches something"
    assert page.count("<svg") + page.count("data:image") >= 3
    for row in whole.rows():
        assert row["error"] or f"{row['tok_s']:.1f}" in page
    assert "illegal memory access" in page and "--topk-caps" in page, "failures, and the command that made it"


def test_two_sweeps_in_one_folder_are_refused(sweep: Sweep, engines: type[FakeEngine]) -> None:
    from filelock import FileLock

    sweep.out.mkdir()
    with FileLock(sweep.out / ".lock"):
        result = sweep.run()
    assert result.exit_code == 2 and "another `ratoon bench` writes into" in result.output
