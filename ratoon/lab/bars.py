# Owns: progress bars on stderr, with the time left.
# Promises: nothing is shown where stderr is no terminal; one display at a time, whatever reports into it.
# Never: estimates anything but the time left.
"""Progress of counted work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]


class Bar:
    """A main task, and others that come and go beside it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._main: TaskID | None = None
        self._others: dict[str, TaskID] = {}

    @property
    def tasks(self) -> list[Task]:
        """What is shown."""
        return self._progress.tasks

    def begin(self, what: str, total: int) -> None:
        """Starts the main task."""
        self._main = self._progress.add_task(what, total=total)

    def name(self, what: str) -> None:
        """Says what the main task is at."""
        if self._main is not None:
            self._progress.update(self._main, description=what)

    def advance(self) -> None:
        """One more of the main task is done."""
        if self._main is not None:
            self._progress.advance(self._main)

    def report(self, what: str, done: int, total: int) -> None:
        """Progress of another task; it goes when it is done."""
        if what not in self._others:
            self._others[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._others[what], completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._others.pop(what))


@contextmanager
def bar() -> Iterator[Bar]:
    """A display that is gone when its work is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress)
