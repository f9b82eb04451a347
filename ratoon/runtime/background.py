# Owns: the thread that turns a loop for asyncio callers.
# Promises: the loop is touched by that thread alone; every caller hears of its own request, or of the loop's failure.
# Never: outlives `close`, or makes one caller wait for another one's consumer.
"""`Background`: many asyncio tasks over one loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable

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
        if self._closing:
            raise RuntimeError("the engine was closed")
        events: asyncio.Queue[StreamEvent | BaseException] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def put(event: StreamEvent | BaseException) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(events.put_nowait, event)

        self._order(lambda: self._submit(row, put))
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.output is not None:
                    return
        finally:
            self._order(lambda: self._leave(row))

    def close(self) -> None:
        """Aborts what runs and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _order(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(action)
            self._wake.notify()

    # ---- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._obey():
            try:
                news = self._loop.turn()
            except Exception as error:  # noqa: BLE001 - whatever it is, every caller must hear of it
                self._fail(error)
                continue
            for row, event in news:
                put = self._listeners.get(id(row))
                if put:
                    put(event)
        self._fail(RuntimeError("the engine was closed"))

    def _obey(self) -> bool:
        """Carries out what was ordered, waiting while there is nothing to do. False: the thread is to end."""
        with self._wake:
            while not (self._closing or self._orders or self._loop.busy):
                self._wake.wait()
            orders, self._orders = list(self._orders), deque()
            closing = self._closing
        for order in orders:
            order()
        return not closing

    def _submit(self, row: Row, put: Put) -> None:
        self._listeners[id(row)] = put
        self._loop.submit(row)

    def _leave(self, row: Row) -> None:
        self._listeners.pop(id(row), None)
        self._loop.abort(row)

    def _fail(self, error: Exception) -> None:
        self._loop.abort_all()
        for put in self._listeners.values():
            put(error)
        self._listeners.clear()
