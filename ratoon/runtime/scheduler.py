# Owns: who waits, who holds a seat and pages, whose prompt is prefilled next, who joins the next round, who must yield.
# Promises: a round's rows hold every page it may write; a page or seat is free again only when no launch names it.
# Never: touches a tensor, knows a token's meaning, or imports torch.
"""Scheduling of requests over seats and pages (docs/ARCHITECTURE.md, "Scheduler")."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ratoon.runtime.prefix import PrefixCache

Stage = Literal["waiting", "prefill", "running", "draining", "done", "gone"]


@dataclass(eq=False)
class Ticket:
    """A request as the scheduler sees it. `output` is the list that its owner appends to.

    number: order of arrival; priority: lower goes first; limit: no token past number limit - 1; deadline: on the
    scheduler's clock. seat, pages: what it holds; one that is gone tells what it held last. ready: positions
    0..ready-1 are in the cache; keys: the prefix cache's names of its full pages below its start. "draining": must
    yield its pages and waits for its rounds in flight; "done": finished, the same.
    """

    number: int
    prompt: Sequence[int]
    limit: int
    output: list[int] = field(default_factory=list)
    priority: int = 0
    deadline: float = float("inf")
    stage: Stage = "waiting"
    seat: int = 0
    pages: list[int] = field(default_factory=list)
    ready: int = 0
    num_in_flight: int = 0
    keys: list[bytes] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, and who yields last."""
        return self.priority, self.number

    @property
    def start(self) -> int:
        """Number of the last token that the host knows: the device is there or further."""
        return len(self.prompt) + len(self.output) - 1

    def ids(self) -> list[int]:
        """All known tokens."""
        return [*self.prompt, *self.output]


class Sizes(NamedTuple):
    """scratch: slots that a round writes from `start` on; step: most tokens a round commits for a row; prefill: prompt
    tokens computed between two rounds while others decode."""

    max_rows: int
    page_size: int
    scratch: int
    step: int
    prefill: int


class Prefill(NamedTuple):
    """Positions begin .. end - 1 of a seated ticket's known tokens."""

    ticket: Ticket
    begin: int
    end: int


class Extension(NamedTuple):
    """Pages that a seat's table gets from entry `column` on."""

    seat: int
    column: int
    pages: tuple[int, ...]


@dataclass
class RoundPlan:
    """Who runs, which tables grow first, and the seats of those who must yield: they are to be stopped."""

    rows: list[Ticket] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    yielded_seats: list[int] = field(default_factory=list)


class Scheduler:
    """worst_case: a request is seated only when pages for its longest course are free, so that none ever yields."""

    def __init__(self, sizes: Sizes, cache: PrefixCache, worst_case: bool = False) -> None:
        self.sizes, self.cache, self._worst_case = sizes, cache, worst_case
        self._free_seats = list(range(sizes.max_rows, 0, -1))
        self._waiting: list[Ticket] = []
        self._seated: list[Ticket] = []
        self._timed: set[Ticket] = set()
        self.counts: Counter[str] = Counter(preemptions=0, prefix_asked_tokens=0, prefix_hit_tokens=0)

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        # Once, not in every turn that it waits. Whole pages, and none that would hold the anchor: a row recomputes it.
        ticket.keys = self.cache.keys(ticket.ids()[: ticket.start], ticket.keys)
        if ticket.deadline < float("inf"):
            self._timed.add(ticket)
        insort(self._waiting, ticket, key=lambda other: other.rank)

    def finish(self, ticket: Ticket) -> None:
        """The request is over, whatever its stage: nothing of it is launched any more."""
        if ticket.stage == "waiting":
            self._waiting.remove(ticket)
            ticket.stage = "gone"
        elif ticket.stage != "gone":
            ticket.stage = "done"
            self._release_if_idle(ticket)

    def expired(self, now: float) -> list[Ticket]:
        """Requests past their deadline that are not over."""
        self._timed = {ticket for ticket in self._timed if ticket.stage not in ("done", "gone")}
        return [ticket for ticket in self._timed if ticket.deadline < now]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_seated(self) -> int:
        return len(self._seated)

    # ---- seats ------------------------------------------------------------------------------------------------

    def admit(self) -> list[Ticket]:
        """Seats waiting requests, first come first served within a priority, while seats and pages last. They hold
        pages for all that is known of them and one round, and start behind what the prefix cache knew."""
        seated = []
        while self._waiting and self._free_seats:
            ticket = self._waiting[0]
            known = self.cache.match(ticket.keys)
            missing = self._pages_for(self._longest(ticket)) - len(known)
            if missing + self._reserve() > self.cache.num_available:
                self.cache.give_back(known)
                break
            self._waiting.pop(0)
            ticket.pages, ticket.seat = known + self.cache.take(missing), self._free_seats.pop()
            ticket.ready = len(known) * self.sizes.page_size
            ticket.stage = "prefill" if ticket.ready < ticket.start else "running"
            self.counts["prefix_asked_tokens"] += ticket.start + 1
            self.counts["prefix_hit_tokens"] += ticket.ready
            self._seated.append(ticket)
            seated.append(ticket)
        return seated

    def _longest(self, ticket: Ticket) -> int:
        """Slots that admission asks for."""
        return (ticket.limit if self._worst_case else ticket.start) + self.sizes.scratch

    def _reserve(self) -> int:
        """Pages left to those who run already, so that a newcomer does not at once make one of them yield."""
        return 0 if self._worst_case else sum(ticket.stage in ("prefill", "running") for ticket in self._seated)

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.sizes.page_size)

    # ---- prefill ----------------------------------------------------------------------------------------------

    def prefills(self) -> list[Prefill]:
        """What to prefill before the next round: `sizes.prefill` tokens at most while others decode, else all."""
        decoding = any(ticket.stage == "running" for ticket in self._seated)
        room = self.sizes.prefill if decoding else float("inf")
        chunks = []
        for ticket in sorted(self._seated, key=lambda other: other.rank):
            if ticket.stage == "prefill" and room:
                size = int(min(ticket.start - ticket.ready, room))
                chunks.append(Prefill(ticket, ticket.ready, ticket.ready + size))
                room -= size
        return chunks

    def prefilled(self, ticket: Ticket, end: int) -> None:
        """Positions below `end` are in the cache, or queued to be: what Ctrl-C cut off is not told here."""
        ticket.ready = end
        if end == ticket.start:
            ticket.stage = "running"
            self.cache.keep(ticket.keys, ticket.pages)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def plan_round(self) -> RoundPlan:
        """Everyone who runs and holds, or now gets, the pages of one more round. Where pages are short the last in
        rank yields: it gives its pages back once its rounds in flight are read, and waits again with what it has."""
        plan = RoundPlan()
        for ticket in sorted(self._seated, key=lambda other: other.rank):
            if ticket.stage != "running" or not self._extend(ticket, plan):
                continue
            plan.rows.append(ticket)
        return plan

    def _extend(self, ticket: Ticket, plan: RoundPlan) -> bool:
        """Whether the ticket holds the pages of its next round."""
        at_most = min(ticket.start + ticket.num_in_flight * self.sizes.step, ticket.limit - 1)
        missing = self._pages_for(at_most + self.sizes.scratch) - len(ticket.pages)
        if missing <= 0:
            return True
        while missing > self.cache.num_available:
            coming = sum(len(other.pages) for other in self._seated if other.stage in ("draining", "done"))
            if missing <= self.cache.num_available + coming:
                return False  # they are on their way
            self._yield_last(plan)
            if ticket.stage != "running":
                return False
        pages = self.cache.take(missing)
        plan.extensions.append(Extension(ticket.seat, len(ticket.pages), tuple(pages)))
        ticket.pages += pages
        return True

    def _yield_last(self, plan: RoundPlan) -> None:
        last = max((t for t in self._seated if t.stage in ("prefill", "running")), key=lambda other: other.rank)
        last.stage = "draining"
        self.counts["preemptions"] += 1
        plan.yielded_seats.append(last.seat)
        self._release_if_idle(last)

    def launched(self, rows: Sequence[Ticket]) -> None:
        """A round of these is on its way."""
        for ticket in rows:
            ticket.num_in_flight += 1

    def read(self, rows: Sequence[Ticket]) -> None:
        """The results of such a round were taken, oldest round first: the owner has appended what it tells."""
        for ticket in rows:
            ticket.num_in_flight -= 1
            ticket.ready = ticket.start
            self._release_if_idle(ticket)

    def _release_if_idle(self, ticket: Ticket) -> None:
        if ticket.num_in_flight or ticket.stage not in ("draining", "done"):
            return
        # What was prefilled or committed, as far as the host knows it, is worth remembering.
        self.cache.keep(self.cache.keys(ticket.ids()[: ticket.ready], ticket.keys), ticket.pages)
        self.cache.give_back(ticket.pages)
        self._free_seats.append(ticket.seat)
        self._seated.remove(ticket)
        if ticket.stage == "done":
            ticket.stage = "gone"
            return
        ticket.stage, ticket.seat, ticket.pages, ticket.ready = "waiting", 0, [], 0
        self.submit(ticket)

    # ---- health -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that no seat and no page is lost or held twice."""
        self.cache.check()
        seats = [ticket.seat for ticket in self._seated] + self._free_seats
        assert sorted(seats) == list(range(1, self.sizes.max_rows + 1)), "a seat is lost, or held twice"
        assert all(ticket.stage == "waiting" and not ticket.pages for ticket in self._waiting), (
            "a waiting row holds pages"
        )
