# Owns: cells measured in a child process.
# Promises: whatever a cell does to its process, the sweep learns what it was; the next cell gets a fresh one.
# Never: goes on with a process in which a cell failed: after an illegal access a GPU's context answers nothing.
"""A contender in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ratoon.lab.bars import Report
from ratoon.lab.results import Record
from ratoon.lab.sweep import CellFailed, Contender, Task, Tick, cause_of

Make = Callable[[Report], Contender]
_PATIENCE_S = 10.0


class Isolated:
    """`local` knows the cells; what `make` makes in the child measures them. `make` must survive pickling."""

    def __init__(self, local: Contender, make: Make, report: Report) -> None:
        self._local, self._make, self._report = local, make, report
        self._child: tuple[BaseProcess, Connection] | None = None

    def tasks(self) -> list[Task]:
        return self._local.tasks()

    def settings(self, task: Task) -> Record:
        return self._local.settings(task)

    def measure(self, task: Task, tick: Tick) -> Record:
        """The child's record. CellFailed with the child's own words, or with how it died."""
        process, pipe = self._child or self._start()
        try:
            pipe.send(task)
            while True:
                said, *rest = pipe.recv()
                if said == "record":
                    return rest[0]
                if said == "failed":
                    raise CellFailed(rest[0])
                if said == "tick":
                    tick()
                else:
                    self._report(*rest)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise CellFailed(_death(process)) from None

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")  # a fork would inherit the GPU's context, and could not use it
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        process.start()
        theirs.close()  # else the child's death would not end what we read
        self._child = process, ours
        return self._child

    def close(self) -> None:
        """Ends the child."""
        self._local.close()
        if self._child:
            (process, pipe), self._child = self._child, None
            pipe.close()
            process.terminate()
            process.join(_PATIENCE_S)
            process.kill()
            process.join()


def _death(process: BaseProcess) -> str:
    process.join(_PATIENCE_S)
    code = process.exitcode
    if code is None or code >= 0:
        return f"the process that measured it ended with code {code}"
    name = signal.Signals(-code).name
    return f"the process that measured it died of {name}{': out of memory?' if name == 'SIGKILL' else ''}"


def _serve(pipe: Connection, make: Make) -> None:
    """The child: measures what it is sent until nobody sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both, and the parent knows what to do
    try:
        contender = make(lambda *progress: pipe.send(("report", *progress)))
        while True:
            task = pipe.recv()
            try:
                record = contender.measure(task, lambda: pipe.send(("tick",)))
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 (the parent decides what becomes of it)
                pipe.send(("failed", cause_of(error)))
            else:
                pipe.send(("record", record))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
