# Owns: tests of how bench records look on a terminal.
# Promises: every figure is whole at 80 columns, whatever varies, and one table holds them all on a wide terminal.
# Never: runs a bench.
"""lab/table.py and lab/bars.py."""

from __future__ import annotations

import io
from itertools import product
from typing import Any

import pytest
from rich.console import Console

from ratoon.lab import bars
from ratoon.lab.table import tables, told


def row(**changes: Any) -> dict[str, Any]:
    record = {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "device": "cuda:0",
        "method": "tree",
        "budget": 127,
        "topk_cap": 16,
        "concurrency": 1,
        "temperature": 0.0,
        "mode": "graph",
        "dtype": "bfloat16",
        "prompts": 164,
        "tok_s": 12345.67,
        "speedup_vs_ar": 12.345,
        "tau": 10.123,
        "accept_per_position": [0.76],
        "identical_prompts": 140,
        "near_tie_prompts": 123,
        "mismatched_prompts": 101,
        "ttft_ms": 12345.6,
        "divergences": [],
    }
    return {**record, **changes}


def shown(records: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in tables(records, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


FIGURES = "12345.7 12.35 10.12 0.76 140 123 101 12346".split()  # noqa: SIM905


@pytest.mark.parametrize("width", [80, 200])
def test_settings_that_vary_are_columns_or_tables_of_their_own(width: int) -> None:
    choices = product((1, 128), (0.0, 1.0), ("graph", "eager"), ("bfloat16", "float32"))
    names = ("concurrency", "temperature", "mode", "dtype")
    records = [row(**dict(zip(names, choice, strict=True))) for choice in choices]
    text = shown(records, width)
    lines = [line.split() for line in text.splitlines() if line.lstrip().startswith("tree")]
    assert len(lines) == 16 and "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(line[:4] == ["tree", "127", "cap", "16"] and line[-8:] == FIGURES for line in lines)
    assert text.count("x AR") == {80: 16, 200: 1}[width] + 1, "the legend has it too"
    if width == 200:
        assert lines[-1][4:8] == ["128", "1.0", "eager", "float32"]
    else:
        assert "C 128, T 1.0, mode eager, dtype float32" in " ".join(text.split())


def test_what_is_not_known_is_a_dash() -> None:
    plain = row(method="ar", topk_cap=None, accept_per_position=[], speedup_vs_ar=None, identical_prompts=None)
    plain |= {"near_tie_prompts": None, "mismatched_prompts": None}
    [line] = [line.split() for line in shown([plain], 80).splitlines() if line.lstrip().startswith("ar ")]
    assert line == ["ar", "12345.7", "-", "10.12", "-", "-", "-", "-", "12346"]


def test_a_near_tie_is_told_with_what_was_close() -> None:
    tie = {"prompt": "HumanEval/0", "verdict": "near_tie", "index": 3, "gap": 0.007, "third_gap": 0.041, "bound": 0.5}
    [line] = told(row(divergences=[tie]))
    assert line == (
        "tree 127 cap 16 C=1 T=0.0: HumanEval/0 differs from token 3 on: near-tie, "
        "AR's next best are 0.0070 and 0.0410 below (bound 0.5000)"
    )
    [alone] = told(row(divergences=[{**tie, "third_gap": None}]))
    assert "AR's next best are 0.0070 below" in alone


def test_a_bar_shows_other_work_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(bars, "Console", lambda **_: screen)
    with bars.bar() as bar:
        bar.begin("bench", 4)
        bar.report("capture", 1, 3)
        assert [task.description for task in bar.tasks] == ["bench", "capture"]
        assert bar.tasks[1].remaining == 2
        bar.report("capture", 3, 3)
        bar.name("tree 15")
        bar.advance()
        assert [(task.description, task.completed) for task in bar.tasks] == [("tree 15", 1)]
        bar.report("capture", 1, 2)
        assert len(bar.tasks) == 2, "the next engine's"


def test_a_bar_without_a_main_task_and_without_a_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with bars.bar() as bar:
        bar.report("capture", 1, 2)
        bar.report("capture", 2, 2)
        bar.advance()
    assert capsys.readouterr() == ("", "")
