# Owns: the thread that turns a loop for asyncio callers.
# Promises: the loop is touched by that thread alone; every caller hears of its own request, or of the loop's failure.
# Never: outlives `close`, or makes one caller wait for another one's consumer.
"""`Background`: many asyncio tasks over one loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from ratoon.runtime.loop import Loop, StreamEvent
from ratoon.runtime.rows import Row

Put = Callable[[StreamEvent | BaseException], None]


class Background:
    """Starts its thread at once."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._wake = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._listeners: dict[int, Put] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ratoon-loop", daemon=True)
        self._thread.start()

    async def stream(self, row: Row) -> AsyncGenerator[StreamEvent]:
        """Events of a row until it is finished; leaving early aborts it."""
        events: asyncio.Queue[StreamEvent | BaseException] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def put(event: StreamEvent | BaseException) -> None:
            with suppress(RuntimeError):  # its event loop was closed: nobody listens any more
                here.call_soon_threadsafe(events.put_nowait, event)

        self._order(lambda: self._loop.submit(row), (id(row), put))
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.output is not None:
                    return
        finally:
            with suppress(RuntimeError):
                self._order(lambda: self._leave(row))

    def close(self) -> None:
        """Aborts what runs and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _order(self, action: Callable[[], None], listener: tuple[int, Put] | None = None) -> None:
        """To be done by the thread; from here on the listener hears. RuntimeError where the thread has ended."""
        with self._wake:
            if self._closing:
                raise RuntimeError("the engine was closed")
            self._listeners.update([listener] if listener else [])
            self._orders.append(action)
            self._wake.notify()

    # ---- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            try:
                self._obey()
                for row, event in self._loop.turn():
                    put = self._listeners.get(id(row))
                    if put:
                        put(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, every caller must hear of it
                self._fail(error)
        self._fail(RuntimeError("the engine was closed"))

    def _wait(self) -> bool:
        """Until there is something to do. False: the thread is to end."""
        with self._wake:
            while not (self._closing or self._orders or self._loop.busy):
                self._wake.wait()
            return not self._closing

    def _obey(self) -> None:
        with self._wake:
            orders, self._orders = self._orders, deque()
        for order in orders:
            order()

    def _leave(self, row: Row) -> None:
        self._listeners.pop(id(row), None)
        self._loop.abort(row)

    def _fail(self, error: Exception) -> None:
        """Tells every caller. An engine that cannot even be emptied, as after a GPU's fault, takes no more orders."""
        try:
            self._obey()  # who has only just asked must hear of it too
            self._loop.abort_all()
            closing = False
        except Exception:  # noqa: BLE001 - the first error is the one to tell
            closing = True
        with self._wake:
            self._closing |= closing
            listeners, self._listeners = self._listeners, {}
        for put in listeners.values():
            put(error)
