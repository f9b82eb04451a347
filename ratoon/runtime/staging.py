# Owns: the host places that async copies to the device read from, and what a copy's event is.
# Promises: a place is written again only after the copy that used it has run.
# Never: looks into what it carries.
"""Host staging (docs/CONTRACT.md clause 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """What the host needs of a CUDA event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


EventMaker = Callable[[], Event]


def event_maker(device: torch.device | str) -> EventMaker | None:
    """What makes events of this device; None on a CPU, where copies have run when they return."""
    return torch.cuda.Event if torch.device(device).type == "cuda" else None  # pyright: ignore[reportReturnType]


class StagingRing:
    """Pinned host places that async copies read from; a place is reused only after its copy has run.

    On CPU the memory is plain and nothing is waited for, but the order acquire, sent, acquire is asserted all the same.
    """

    def __init__(
        self, depth: int, nbytes: int, device: torch.device | str = "cpu", make_event: EventMaker | None = None
    ) -> None:
        if depth < 1:
            raise ValueError(f"a staging ring needs at least one place, not {depth}")
        pinned = torch.device(device).type == "cuda"
        make_event = make_event or event_maker(device)
        self.places = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth)]
        self._events = [make_event() if make_event else None for _ in range(depth)]
        self._recorded = [False] * depth
        self._next = 0
        self._open: int | None = None
        self.num_waits = 0

    def acquire(self) -> int:
        """Index of the next place, safe to write; waits for the copy that used it last."""
        assert self._open is None, f"place {self._open} of the staging ring was acquired and never sent"
        index, event = self._next, self._events[self._next]
        if self._recorded[index] and event is not None and not event.query():
            self.num_waits += 1
            event.synchronize()
        self._open, self._next = index, (index + 1) % len(self.places)
        return index

    def sent(self, index: int) -> None:
        """The copy out of this place is queued on the current stream."""
        assert self._open == index, f"place {index} of the staging ring was sent without being acquired"
        event = self._events[index]
        if event is not None:
            event.record()
        self._recorded[index], self._open = True, None

    def settle(self) -> None:
        """After an interrupt between `acquire` and `sent`: the place counts as sent, for its copy may be queued."""
        if self._open is not None:
            self.sent(self._open)
