# Owns: the engine's loop: seating, prefill, launching rounds ahead of their results, delivering what they tell.
# Promises: a request's tokens do not depend on its neighbours or the run-ahead; one that ends leaves nothing behind.
# Never: reads a prompt's text, loads a model, or waits for anybody but the oldest round.
"""`Loop`: one turn at a time, over a runner and a scheduler."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.core.request import FinishReason, RequestOutput
from ratoon.core.tree import Tree
from ratoon.runtime.chooser import Chooser
from ratoon.runtime.rows import Row
from ratoon.runtime.runner import Launch, Runner
from ratoon.runtime.scheduler import Scheduler, Ticket


@dataclass(frozen=True)
class StreamEvent:
    """News of one request. `output` comes with the last event; `tree` and `path` (accepted nodes, the root
    included) only while `Engine.trace_trees` is set."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    tree: Tree | None = None
    path: tuple[int, ...] = ()


News = list[tuple[Row, StreamEvent]]


class Loop:
    """Not thread-safe: one caller turns it."""

    def __init__(self, runner: Runner, chooser: Chooser, scheduler: Scheduler) -> None:
        self.runner, self.scheduler, self._chooser = runner, scheduler, chooser
        self._rows: dict[Ticket, Row] = {}
        self.in_flight: deque[tuple[Launch, list[Row]]] = deque()
        self._arrivals = 0
        self._news: News = []
        self.counters: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._rows or self.in_flight or self._news)

    def submit(self, row: Row) -> None:
        row.ticket.number, self._arrivals = self._arrivals, self._arrivals + 1
        self._rows[row.ticket] = row
        self.scheduler.submit(row.ticket)

    def abort(self, row: Row) -> None:
        """Ends a request where it is; its last event comes with the next turn. One that is over stays as it is."""
        if row.finish_reason is None and row.ticket in self._rows:
            row.abort()
            self._end(row)
            self._news.append((row, _event(row, ())))

    def turn(self) -> News:
        """Seats, prefills, launches a round if one may be ahead, reads the oldest if none may. Returns what is new."""
        for ticket in self.scheduler.expired(time.perf_counter()):
            self.abort(self._rows[ticket])
        self.seat()
        launched = len(self.in_flight) <= self.runner.limits.run_ahead and self.launch()
        if self.in_flight and (len(self.in_flight) > self.runner.limits.run_ahead or not launched):
            self.deliver()
        elif not (launched or self._news):
            assert not self._rows, "requests wait for pages that no row holds: pages were lost"
        news, self._news = self._news, []
        return news

    def seat(self) -> None:
        """Seats who fits in, and prefills."""
        for ticket in self.scheduler.admit():
            self._join(self._rows[ticket])
        for ticket, begin, end in self.scheduler.prefills():
            self.runner.prefill(ticket.seat, ticket.ids(), begin, end)
            self.scheduler.prefilled(ticket, end)

    def _join(self, row: Row) -> None:
        ticket, prompt = row.ticket, row.prompt
        self.runner.join(
            ticket.seat,
            prompt,
            ticket.pages,
            row.params,
            row.stop_ids,
            row.seed,
            ticket.limit,
            row.budget,
            row.topk_cap,
            output=row.tokens,
        )
        self._chooser.join(row)

    def launch(self) -> bool:
        """Whether a round was launched, or somebody yielded so that one can be."""
        plan = self.scheduler.plan_round()
        for seat in plan.yielded_seats:
            self._vacate(seat)
        self.runner.extend(plan.extensions)
        if not plan.rows:
            return bool(plan.yielded_seats)
        rows = [self._rows[ticket] for ticket in plan.rows]
        launch = self.runner.launch([ticket.seat for ticket in plan.rows], self._chooser.shape(rows))
        self.scheduler.launched(plan.rows)
        self.in_flight.append((launch, rows))
        self.counters["rounds"] += 1
        return True

    def deliver(self) -> None:
        """Takes the results of the oldest round in flight. RuntimeError for a NaN: the loop is empty then."""
        # It leaves the queue last: Ctrl-C may come in between, and then it is read once more and thrown away.
        launch, rows = self.in_flight[0]
        results = self.runner.read(launch)
        trees = self.runner.trees(launch)
        for seat, row, result in zip(launch.seats, rows, results, strict=True):
            if row.finish_reason is not None:
                continue
            if result.bad:
                self._fail(row)
            tokens = row.take(result)
            self._chooser.observe(row, launch.shape, result)
            self.counters["tokens"] += len(tokens)
            if row.finish_reason is not None:
                # Of a stop string the device does not know.
                self._end(row, tell=not result.done)
            if row.streams or row.finish_reason is not None:
                self._news.append((row, _event(row, tokens, *trees.get(seat, (None, ())))))
        self.in_flight.popleft()
        self.scheduler.read([row.ticket for row in rows])

    def _end(self, row: Row, tell: bool = True) -> None:
        """tell: the device must hear of it."""
        if row.seat:
            self._vacate(row.seat, tell)
        self.scheduler.finish(row.ticket)
        del self._rows[row.ticket]

    def _vacate(self, seat: int, tell: bool = True) -> None:
        self._chooser.leave(seat)
        if tell:
            self.runner.stop(seat)

    def _fail(self, row: Row) -> None:
        self.abort_all()
        self.scheduler.cache.forget()
        raise RuntimeError(
            f"the target gave a NaN for request {row.index}: its weights are damaged, or their dtype is too narrow "
            "for it: load it anew, or try dtype float32"
        )

    def abort_all(self) -> None:
        """Drops whatever is waiting or running; rounds in flight are read and thrown away."""
        for row in list(self._rows.values()):
            row.abort()
            self._end(row)
        while self.in_flight:
            launch, rows = self.in_flight[0]
            self.runner.read(launch)
            self.in_flight.popleft()
            self.scheduler.read([row.ticket for row in rows])
        self._news.clear()
        self.runner.settle()


def _event(row: Row, tokens: Sequence[int], tree: Tree | None = None, path: tuple[int, ...] = ()) -> StreamEvent:
    text = row.new_text() if row.streams else row.text
    output = None if row.finish_reason is None else row.output()
    return StreamEvent(row.index, text, tuple(tokens), row.finish_reason, output, tree, path)
