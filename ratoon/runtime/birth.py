# Owns: the birth test's cases for the real round: borrowed seats, scattered pages, prompts, poison.
# Promises: the seats and pages it borrows come back scrubbed; nothing is served before it has passed.
# Never: judges (runtime/graphs.py compares).
"""Birth test of captured rounds (docs/CONTRACT.md, clause 10). R: rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.runtime.buffers import NOISE
from ratoon.runtime.graphs import BirthCase, Level, birth_test
from ratoon.runtime.prefill import Chunk
from ratoon.runtime.runner import Runner
from ratoon.spec.state import RoundShape

_LENGTHS = (40, 7, 17, 1, 33, 2, 25, 12)
_SAMPLED = (
    SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=1.1, top_k=12, min_p=0.02),
    SamplingParams(),
    SamplingParams(temperature=0.7, presence_penalty=0.4, frequency_penalty=0.5, logit_bias={3: 2.0, 0: -1.0}),
)
"""Rows of a general key: every filter and penalty, and a greedy one among them."""


def check_births(
    runner: Runner,
    shapes: Iterable[RoundShape],
    level: Level,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Tests captured shapes before the seats open; returns the number of replays. Raises BirthError.

    quick: the smallest and the largest shape of each sampler, and the smallest prefill; full: all of them, with every
    poison; off: none. progress(done, total) follows each.
    """
    assert runner.graphs is not None, "only graphs are born"
    order = sorted(shapes, key=lambda shape: (shape.places, shape.rows, shape.block))
    if level == "off":
        return 0
    chosen = order if level == "full" else _ends(order)
    sizes = runner.chunks if level == "full" else runner.chunks[:1]
    tests = [partial(_check_round, runner, shape, level) for shape in chosen]
    tests += [partial(_check_prefill, runner, size, level) for size in sizes]
    replays = 0
    for number, test in enumerate(tests, start=1):
        replays += test()
        if progress:
            progress(number, len(tests))
    return replays


def _ends(order: list[RoundShape]) -> list[RoundShape]:
    by_sampler: dict[str, list[RoundShape]] = {}
    for shape in order:
        by_sampler.setdefault(shape.sampler, []).append(shape)
    return list(dict.fromkeys(end for same in by_sampler.values() for end in (same[0], same[-1])))


def _check_round(runner: Runner, shape: RoundShape, level: Level) -> int:
    assert runner.graphs is not None
    key = runner.key_of(shape)
    keys = key.staged() if runner.mode == "staged" else (key,)
    cases = [_Case(runner, shape, name, rows).as_birth_case() for name, rows in _rows_of(shape.rows).items()]
    static, scrub = partial(runner.run_stages, shape), partial(_scrub, runner)
    return birth_test(runner.graphs, keys, static, cases, level, scrub=scrub).num_replays


def _check_prefill(runner: Runner, size: int, level: Level) -> int:
    """A prefill graph over parts of different lengths, from different positions, on scattered pages."""
    assert runner.graphs is not None
    longest = min(size, runner.limits.max_model_len // 2)
    counts = {"changed": longest - 1, "shrink": max(longest // 3, 1), "grow": longest}
    cases = [_PrefillCase(runner, size, name, count).as_birth_case() for name, count in counts.items()]
    static = partial(runner.run_prefill, size)
    key = runner.prefill_key(size)
    return birth_test(runner.graphs, key, static, cases, level, scrub=partial(_scrub, runner)).num_replays


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
        kinds = (SamplingParams(),) if shape.sampler == "argmax" else _SAMPLED
        self.params = [kinds[i % len(kinds)] for i in range(rows)]

    def _num_pages(self, length: int) -> int:
        limits = self.runner.limits
        return -(-(length + limits.scratch) // limits.page_size)

    def as_birth_case(self) -> BirthCase:
        return BirthCase(self.name, self._prepare, self._fill, self._observe, self._poison)

    def _prepare(self) -> None:
        runner = self.runner
        runner.table.reset("state", "kv")
        rows = zip(self.seats, self.prompts, self.pages, self.params, self.budgets, strict=True)
        for seat, prompt, pages, params, budget in rows:
            limit = len(prompt) + runner.limits.scratch
            runner.join(seat, prompt, pages, params, (), seat, limit, budget, max(runner.limits.max_ranks, 1))
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
        slot = torch.arange(len(dead), device=dead.device)
        values = (float("nan"), float("nan")) if kind == "nan" else (NOISE, -NOISE)
        for name in self.runner.table.names("kv"):
            # In place: a copy of a cache that fills most of a GPU would not fit beside it.
            for parity, value in enumerate(values):
                spoilt = (dead & (slot % 2 == parity)).view(1, -1, 1, 1, 1)
                self.runner.table[name].masked_fill_(spoilt, value)

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


class _PrefillCase(_Case):
    """One row, the first part of whose prompt is there already; the graph computes the rest."""

    def __init__(self, runner: Runner, size: int, name: str, count: int) -> None:
        super().__init__(runner, RoundShape(1, 1, 0, 0, "argmax"), name, 1)
        limits, chance = runner.limits, random.Random(f"{name} {size} {count}")
        self.size, self.base = size, chance.randrange(1, min(limits.max_model_len - count, limits.context - size) + 1)
        self.lengths, self.end = [self.base + count], self.base + count
        pages = chance.sample(range(1, limits.num_pages), self._num_pages(self.end))
        self.pages = [pages]
        vocab = runner.round.target.config.vocab_size
        self.prompts = [[chance.randrange(vocab) for _ in range(self.end + 1)]]

    def _prepare(self) -> None:
        runner, (seat,), (prompt,), (pages,) = self.runner, self.seats, self.prompts, self.pages
        runner.table.reset("state", "kv")
        runner.join(seat, prompt, pages, SamplingParams(), (), 1, len(prompt) + 1, 0, 1)
        runner.prefill(seat, prompt, 0, self.base)

    def _fill(self) -> None:
        self.runner.fill_prefill(self.seats[0], self.prompts[0], Chunk(self.base, self.end, self.size))

    def _poison(self, kind: Literal["noise", "nan"]) -> None:
        """What the row has not computed yet is beyond its live length."""
        starts = self.runner.state.start_S
        start = starts.clone()
        starts[self.seats[0]] = self.base
        super()._poison(kind)
        starts.copy_(start)

    def _observe(self) -> Mapping[str, Tensor]:
        table, live = self.runner.table, self._live_slots()
        return {name: table[name][:, live] for name in table.names("kv")}
