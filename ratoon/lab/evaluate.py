# Owns: `ratoon eval`: the answers of a cell judged by their tests, beside what `ratoon bench` records of it.
# Promises: every method's answers meet the same tests; judging is never timed; equal programs run once.
# Never: runs a program itself (lab/sandbox.py does), or measures in a way of its own.
"""Coding correctness of AR, chain and tree beside their speed and their equality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ratoon.core.request import RequestOutput
from ratoon.lab.bars import Bar, Report
from ratoon.lab.bench import Engines
from ratoon.lab.coding import Problem
from ratoon.lab.matrix import Matrix
from ratoon.lab.record import Cell, Measured
from ratoon.lab.results import Record, Results
from ratoon.lab.sandbox import Judged, Sandbox
from ratoon.lab.sweep import sweep


def run(
    matrix: Matrix, problems: Sequence[Problem], sandbox: Sandbox, json_path: Path | None, samples: Path | None
) -> list[Record]:
    """Runs the matrix on the problems; `lab/sweep.py` says what becomes of the records. Each answer is appended to
    `samples`."""
    if samples:
        samples.open("a").close()  # a file that cannot be written is told now

    def engines(results: Results, shown: Bar) -> Engines:
        judge = Judge(problems, sandbox, samples, shown.report)
        prompts = [problem.prompt for problem in problems]
        return Engines(matrix, prompts, results, shown.report, score=judge)

    return sweep(engines, json_path, out=None, again=False)


class Judge:
    """What a cell's record says of its programs. Those that were judged before are not run again: the methods mostly
    write the same."""

    def __init__(self, problems: Sequence[Problem], sandbox: Sandbox, samples: Path | None, report: Report) -> None:
        self.problems, self.sandbox, self.samples, self.report = problems, sandbox, samples, report
        self._known: dict[tuple[str, str], Judged] = {}

    def __call__(self, cell: Cell, measured: Measured) -> Record:
        kept = []
        for problem, output in zip(self.problems, measured.outputs, strict=True):
            kept.append(self._sample(cell, problem, output))
            self.report("judging", len(kept), len(self.problems))
        self._keep(kept)
        return {
            "passed": sum(sample["passed"] for sample in kept),
            "failed": {sample["problem"]: sample["cause"] for sample in kept if not sample["passed"]},
            "isolated": self.sandbox.isolated,
        }

    def _sample(self, cell: Cell, problem: Problem, output: RequestOutput) -> Record:
        judged = self._judge(problem, output.text)
        return {
            "method": cell.method,
            "cell": cell.name,
            "problem": problem.prompt.id,
            "prompt": problem.asked,
            "completion": output.text,
            "passed": judged.passed,
            "cause": judged.cause,
        }

    def _judge(self, problem: Problem, answer: str) -> Judged:
        key = problem.program(answer), problem.tests
        if key not in self._known:
            self._known[key] = self.sandbox.run(*key)
        return self._known[key]

    def _keep(self, kept: Sequence[Record]) -> None:
        if self.samples:
            with self.samples.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(sample)}\n" for sample in kept)
