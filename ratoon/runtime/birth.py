# Owns: the birth test's cases for the real round: borrowed seats, scattered pages, prompts, poison.
# Promises: the seats and pages it borrows come back scrubbed; nothing is served before it has passed.
# Never: judges (runtime/graphs.py compares).
"""Birth test of captured rounds (docs/CONTRACT.md, clause 10). R: rows."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.runtime.buffers import poison
from ratoon.runtime.graphs import BirthCase, Level, birth_test
from ratoon.runtime.runner import Runner
from ratoon.spec.state import RoundShape

_LENGTHS = (40, 7, 17, 1, 33, 2, 25, 12)


def check_births(runner: Runner, shapes: Iterable[RoundShape], level: Level) -> int:
    """Tests captured shapes before the seats open; returns the number of replays. Raises BirthError.

    quick: the smallest and the largest shape; full: all of them, with every poison; off: none.
    """
    assert runner.graphs is not None, "only graphs are born"
    order = sorted(shapes, key=lambda shape: (shape.places, shape.rows, shape.block))
    if level == "off" or not order:
        return 0
    chosen = order if level == "full" else list(dict.fromkeys((order[0], order[-1])))
    replays = 0
    for shape in chosen:
        key = runner.key_of(shape)
        keys = key.staged() if runner.mode == "staged" else (key,)
        cases = [_Case(runner, shape, name, rows).as_birth_case() for name, rows in _rows_of(shape.rows).items()]
        report = birth_test(
            runner.graphs, keys, partial(runner.run_stages, shape), cases, level, scrub=partial(_scrub, runner)
        )
        replays += report.num_replays
    return replays


def _rows_of(rows: int) -> dict[str, int]:
    """Live rows of each case: unlike the capture's none, fewer, and all again."""
    return {"changed": rows, "shrink": max(rows // 2, 1), "grow": rows}


def _scrub(runner: Runner) -> None:
    runner.table.reset("state", "kv", "scratch", "output")


class _Case:
    """One set of rows: lengths, prompts, budgets and scattered pages that differ from the other cases'."""

    def __init__(self, runner: Runner, shape: RoundShape, name: str, rows: int) -> None:
        self.runner, self.shape, self.name = runner, shape, name
        limits, chance = runner.limits, random.Random(f"{name} {shape}")
        self.seats = chance.sample(range(1, limits.max_rows + 1), rows)
        longest = limits.max_model_len // 2
        self.lengths = [min(_LENGTHS[(i + chance.randrange(8)) % 8], longest) for i in range(rows)]
        pages = list(range(1, limits.num_pages))
        chance.shuffle(pages)
        self.pages = [[pages.pop() for _ in range(self._num_pages(length))] for length in self.lengths]
        vocab = runner.round.target.config.vocab_size
        self.prompts = [[chance.randrange(vocab) for _ in range(length)] for length in self.lengths]
        self.budgets = [chance.randint(min(1, shape.nodes), shape.nodes) for _ in range(rows)]

    def _num_pages(self, length: int) -> int:
        limits = self.runner.limits
        return -(-(length + limits.scratch) // limits.page_size)

    def as_birth_case(self) -> BirthCase:
        return BirthCase(self.name, self._prepare, self._fill, self._observe, self._poison)

    def _prepare(self) -> None:
        runner = self.runner
        runner.table.reset("state", "kv")
        for seat, prompt, pages, budget in zip(self.seats, self.prompts, self.pages, self.budgets, strict=True):
            limit = len(prompt) + runner.limits.scratch
            runner.join(seat, prompt, pages, SamplingParams(), (), 1, limit, budget, max(runner.limits.max_ranks, 1))
            runner.prefill(seat, prompt, 0, len(prompt) - 1)

    def _fill(self) -> None:
        self.runner.fill(self.seats, self.shape)

    def _live_slots(self) -> Tensor:
        """bool over slots: those that hold a committed token of one of the rows."""
        limits = self.runner.limits
        live = torch.zeros(limits.num_pages * limits.page_size, dtype=torch.bool)
        starts = self.runner.state.start_S.tolist()
        for seat, pages in zip(self.seats, self.pages, strict=True):
            for position in range(starts[seat]):
                live[pages[position // limits.page_size] * limits.page_size + position % limits.page_size] = True
        return live.to(self.runner.device)

    def _poison(self, kind: Literal["noise", "nan"]) -> None:
        dead = ~self._live_slots()
        dead[: self.runner.limits.page_size] = False
        for name in self.runner.table.names("kv"):
            cache = self.runner.table[name]
            spoiled = cache[:, dead]
            poison(spoiled, kind)
            cache[:, dead] = spoiled

    def _observe(self) -> Mapping[str, Tensor]:
        table, rows = self.runner.table, len(self.seats)
        live = self._live_slots()
        seen = {name: table[name][1:] for name in table.names("state") if name != "seat.round_number"}
        seen |= {name: table[name][:, live] for name in table.names("kv")}
        # The hand-overs too: a number frozen in the draft changes what is accepted, but no token.
        num_places = int(table["places.row_start"][rows])
        handed_over = ("places.token", "places.parent", "places.depth", "verify.hidden")
        seen |= {name: table[name][:num_places] for name in handed_over}
        return seen | {name: table[name][0, :rows] for name in table.names("output")}
