# Owns: the tests of runtime/scheduler.py and runtime/prefix.py, against a device that is a few counters.
# Promises: at every launch each row's pages cover what the device may write, whatever joined, left or yielded before.
# Never: imports torch.
from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ratoon.runtime.pages import PagePool
from ratoon.runtime.prefix import PrefixCache
from ratoon.runtime.scheduler import Scheduler, Sizes, Ticket

SIZES = Sizes(max_rows=4, page_size=4, scratch=6, step=4, prefill=8)
MOST_TOKENS = 40


def scheduler(num_pages: int = 40, sizes: Sizes = SIZES, cached: bool = True, worst_case: bool = False) -> Scheduler:
    return Scheduler(sizes, PrefixCache(PagePool(num_pages), sizes.page_size, cached), worst_case)


@dataclass
class Device:
    """Rounds in flight with what each will tell, and the lag that an engine's run-ahead is.

    It knows the true start of every row; `content` is what each page slot holds, so that a shared page that somebody
    overwrote is seen.
    """

    scheduler: Scheduler
    run_ahead: int
    rng: random.Random
    tables: dict[int, list[int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    content: dict[tuple[int, int], int] = field(default_factory=dict)
    flying: deque[tuple[list[Ticket], dict[int, list[int]]]] = field(default_factory=deque)
    committed: dict[int, list[int]] = field(default_factory=dict)
    finished: list[Ticket] = field(default_factory=list)

    def write(self, ticket: Ticket, begin: int, end: int, values: list[int] | None = None) -> None:
        """Positions begin..end-1 of a row; a position that no page of its table covers is an error."""
        table = self.tables[ticket.seat]
        for position in range(begin, end):
            column, offset = divmod(position, self.scheduler.sizes.page_size)
            assert column < len(table), f"position {position} lies past the {len(table)} pages of the row"
            value = -1 if values is None else values[position - begin]
            self.content[table[column], offset] = value

    def held(self, ticket: Ticket, position: int) -> int:
        column, offset = divmod(position, self.scheduler.sizes.page_size)
        return self.content[self.tables[ticket.seat][column], offset]

    def step(self) -> None:
        """One turn of an engine's loop."""
        for ticket in self.scheduler.admit():
            self.tables[ticket.seat] = list(ticket.pages)
            self.committed[ticket.number] = ticket.ids()
            for position in range(ticket.ready):
                assert self.held(ticket, position) == ticket.ids()[position], "the prefix cache gave another text"
        for ticket, begin, end in self.scheduler.prefills():
            self.write(ticket, begin, end, ticket.ids()[begin:end])
            self.scheduler.prefilled(ticket, end)
        rows = []
        if len(self.flying) <= self.run_ahead:
            plan = self.scheduler.plan_round()
            for seat, column, pages in plan.extensions:
                assert len(self.tables[seat]) == column
                self.tables[seat] += pages
            rows = plan.rows
            if rows:
                self.launch(rows)
        if self.flying and (len(self.flying) > self.run_ahead or not rows):
            self.read()

    def launch(self, rows: list[Ticket]) -> None:
        told: dict[int, list[int]] = {}
        for ticket in rows:
            tokens = self.committed[ticket.number]
            start = len(tokens) - 1
            self.write(ticket, start, start + self.scheduler.sizes.scratch)
            room = ticket.limit - len(tokens)
            emitted = [self.rng.randrange(2) for _ in range(min(self.rng.randint(1, self.scheduler.sizes.step), room))]
            self.write(ticket, start, start + len(emitted), (tokens[-1:] + emitted)[: len(emitted)])
            told[ticket.number] = emitted
            tokens += emitted
        self.scheduler.launched(rows)
        self.flying.append((rows, told))

    def read(self) -> None:
        rows, told = self.flying.popleft()
        for ticket in rows:
            if ticket.stage in ("running", "draining"):
                ticket.output += told[ticket.number]
                if len(ticket.prompt) + len(ticket.output) >= ticket.limit:
                    self.finished.append(ticket)
                    self.scheduler.finish(ticket)
        self.scheduler.read(rows)

    def drain(self, turns: int = 10_000) -> None:
        while self.scheduler.num_waiting or self.scheduler.num_seated or self.flying:
            self.step()
            turns -= 1
            assert turns, "requests wait for ever"


def ticket_of(rng: random.Random, number: int) -> Ticket:
    """Prompts of a two-token alphabet from few beginnings, so that prefixes are shared."""
    shared = [(7 * i + rng.randrange(2) * 13) % 2 for i in range(rng.randrange(24))]
    prompt = (*shared, *(rng.randrange(2) for _ in range(rng.randint(1, 6))))
    limit = min(len(prompt) + rng.randint(1, 24), MOST_TOKENS)
    return Ticket(number, prompt, limit, priority=rng.randrange(2))


def device_of(seed: int, num_pages: int, run_ahead: int, cached: bool, worst_case: bool = False) -> Device:
    rng = random.Random(seed)
    return Device(scheduler(num_pages, cached=cached, worst_case=worst_case), run_ahead, rng)


@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_hundred_thousand_random_events(run_ahead: int, cached: bool) -> None:
    """Six cases of 17,000 events over a pool that holds little more than one row."""
    device = device_of(run_ahead, 20, run_ahead, cached)
    live: list[Ticket] = []
    for event in range(17_000):
        kind = device.rng.random()
        if kind < 0.1 and device.scheduler.num_waiting < 6:
            live.append(ticket_of(device.rng, event))
            device.scheduler.submit(live[-1])
        elif kind < 0.12 and live:
            device.scheduler.finish(live.pop(device.rng.randrange(len(live))))
        else:
            device.step()
        if event % 7 == 0:
            device.scheduler.check()
        live = [ticket for ticket in live if ticket.stage not in ("gone", "done")]
    device.drain()
    device.scheduler.check()
    assert device.scheduler.num_seated == 0 and len(device.finished) > 300
    assert device.scheduler.counts["preemptions"] > 50
    pages = device.scheduler.cache
    assert pages.num_available == 19 and (device.scheduler.counts["prefix_hit_tokens"] > 1000) == cached


class Machine(RuleBasedStateMachine):
    """The same, shrunk by hypothesis when it breaks."""

    @initialize(seed=st.integers(0, 99), pages=st.integers(13, 30), run_ahead=st.integers(0, 2), cached=st.booleans())
    def begin(self, seed: int, pages: int, run_ahead: int, cached: bool) -> None:
        self.device = device_of(seed, pages, run_ahead, cached)
        self.live: list[Ticket] = []
        self.number = 0

    @rule()
    def submit(self) -> None:
        self.live.append(ticket_of(self.device.rng, self.number))
        self.device.scheduler.submit(self.live[-1])
        self.number += 1

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if which < len(self.live):
            self.device.scheduler.finish(self.live.pop(which))

    @rule(turns=st.integers(1, 6))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.device.step()

    @invariant()
    def healthy(self) -> None:
        if hasattr(self, "device"):
            self.device.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.device.drain()
            self.device.scheduler.check()
            assert self.device.scheduler.num_seated == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_worst_case_never_yields() -> None:
    device = device_of(3, 20, 1, cached=True, worst_case=True)
    for number in range(60):
        device.scheduler.submit(ticket_of(device.rng, number))
    device.drain()
    assert device.scheduler.counts["preemptions"] == 0 and len(device.finished) == 60


def prefill(one: Scheduler) -> list[tuple[int, int]]:
    """One turn's chunks, computed."""
    chunks = one.prefills()
    for ticket, _, end in chunks:
        one.prefilled(ticket, end)
    return [(begin, end) for _, begin, end in chunks]


def test_priority_goes_first_and_yields_last() -> None:
    one = scheduler(sizes=SIZES._replace(max_rows=2))
    tickets = [Ticket(number, (1,) * 4, 30, priority=priority) for number, priority in enumerate((1, 0, 1))]
    for ticket in tickets:
        one.submit(ticket)
    assert one.admit() == [tickets[1], tickets[0]]
    one.finish(tickets[1])
    assert one.admit() == [tickets[2]] and one.num_waiting == 0


def test_a_long_prompt_is_prefilled_in_parts_while_others_decode() -> None:
    one = scheduler()
    short, long = Ticket(0, (1,), 9), Ticket(1, tuple(range(30)), 40)
    one.submit(short)
    one.admit()
    assert prefill(one) == [] and one.plan_round().rows == [short]
    one.submit(long)
    one.admit()
    assert [prefill(one) for _ in range(4)] == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 29)]]
    assert one.plan_round().rows == [short, long]


def test_a_prompt_is_prefilled_whole_where_nobody_waits_for_it() -> None:
    one = scheduler()
    one.submit(Ticket(0, tuple(range(30)), 40))
    [long] = one.admit()
    assert one.prefills() == [(long, 0, 29)]


def test_a_known_beginning_is_shared_and_the_anchor_computed_anew() -> None:
    one = scheduler()
    first, second = Ticket(0, tuple(range(13)), 20), Ticket(1, (*range(12), 99, 98), 20)
    exact = Ticket(2, tuple(range(12)), 20)
    one.submit(first)
    one.admit()
    prefill(one)
    for ticket in (second, exact):
        one.submit(ticket)
    assert one.admit() == [second, exact]
    assert second.pages[:3] == first.pages[:3] and second.ready == 12
    assert exact.pages[:2] == first.pages[:2] and exact.ready == 8, "its last token is its anchor"
    assert one.counts["prefix_hit_tokens"] == 20
    one.check()


def test_another_beginning_is_no_hit() -> None:
    one = scheduler()
    one.submit(Ticket(0, tuple(range(13)), 20))
    one.admit()
    prefill(one)
    one.submit(Ticket(1, (5, *range(1, 13)), 20))
    [other] = one.admit()
    assert other.ready == 0 and one.counts["prefix_hit_tokens"] == 0


def test_the_oldest_idle_text_is_given_up_first_its_end_before_its_beginning() -> None:
    cache = PrefixCache(PagePool(7), 2)
    old, new = cache.take(3), cache.take(3)
    before, after = (cache.keys(range(begin, begin + 6)) for begin in (1, 7))
    cache.keep(before, old)
    cache.keep(after, new)
    cache.give_back(old)
    cache.give_back(new)
    assert cache.num_available == 6
    assert cache.take(2) == sorted(old[1:])
    assert cache.match(before) == old[:1] and cache.match(after) == new
    cache.check()


def test_nothing_damaged_is_found_again() -> None:
    cache = PrefixCache(PagePool(7), 2)
    pages = cache.take(3)
    keys = cache.keys([1, 2, 3, 4])
    cache.keep(keys, pages)
    cache.forget()
    assert cache.match(keys) == [] and cache.num_available == 3
    cache.give_back(pages)
    cache.check()
    assert cache.num_available == 6


def test_a_request_past_its_deadline_is_named() -> None:
    one = scheduler()
    late, early = Ticket(0, (1,), 9, deadline=5.0), Ticket(1, (1,), 9, deadline=9.0)
    one.submit(late)
    one.submit(early)
    one.admit()
    assert one.expired(5.5) == [late]
    one.finish(late)
    assert one.expired(5.5) == []


def test_what_was_planned_but_not_computed_is_not_remembered() -> None:
    """Ctrl-C may come between the two."""
    one = scheduler()
    first = Ticket(0, tuple(range(13)), 20)
    one.submit(first)
    one.admit()
    one.prefills()
    one.finish(first)
    one.submit(Ticket(1, tuple(range(13)), 20))
    [again] = one.admit()
    assert again.ready == 0
    one.check()


def test_a_request_that_waits_is_asked_of_the_cache_but_counted_once() -> None:
    one = scheduler(num_pages=13)
    for number in range(2):
        one.submit(Ticket(number, tuple(range(24)), 30))
    assert len(one.admit()) == 1
    assert [one.admit() for _ in range(5)] == [[]] * 5 and one.counts["prefix_asked_tokens"] == 24
    one.check()


def test_keys_go_on_from_a_known_beginning() -> None:
    cache = PrefixCache(PagePool(2), 4)
    whole = cache.keys(range(14))
    assert len(whole) == 3 and cache.keys(range(14), whole[:2]) == whole and cache.keys(range(9), whole) == whole[:2]


def test_a_page_that_ends_with_the_anchor_is_not_remembered() -> None:
    """The last token's K/V are not in the cache: the next round would have put them there."""
    one = scheduler()
    first = Ticket(0, tuple(range(5)), 8)
    one.submit(first)
    one.admit()
    prefill(one)
    rows = one.plan_round().rows
    one.launched(rows)
    first.output += [5, 6, 7]
    one.finish(first)
    one.read(rows)
    one.submit(Ticket(1, tuple(range(9)), 20))
    [again] = one.admit()
    assert again.ready == 4
