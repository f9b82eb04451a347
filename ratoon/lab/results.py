# Owns: the folder of a sweep: results.jsonl, references.jsonl, provenance.jsonl, and which cells are done.
# Promises: a record is whole or not there, whenever the process dies; of several of one cell the last counts.
# Never: measures; lets two processes write into one folder.
"""What `ratoon bench --out` keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Record = dict[str, Any]


def key_of(configuration: Mapping[str, Any]) -> str:
    """The name of a cell: equal for equal configurations, whatever the order in which they are written."""
    text = json.dumps(configuration, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Lines:
    """JSON objects, one a line. Without a path they are kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Record] = self._read() if path and path.exists() else []

    def _read(self) -> list[Record]:
        """The whole lines. The piece that a killed process left behind is cut off, so that nothing is joined to it."""
        assert self.path is not None, "only files are read"
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number}: not JSON ({error}): remove the line, or the file"
                ) from None
        return rows

    def add(self, row: Record) -> None:
        self.rows.append(row)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                print(json.dumps(row), file=file)


class Results:
    """Records by the key of their cell, and the autoregressive outputs that later cells are compared with."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        lines = [Lines(folder / f"{name}.jsonl" if folder else None) for name in ("results", "references")]
        self._results, self._references = lines

    @property
    def records(self) -> dict[str, Record]:
        """The last record of each cell, in the order in which cells first came."""
        return {row["key"]: row for row in self._results.rows}

    def is_done(self, key: str) -> bool:
        """Whether the cell was measured; one that failed is not done."""
        row = self.records.get(key)
        return row is not None and row["error"] is None

    def add(self, row: Record) -> None:
        self._results.add(row)

    def reference(self, key: str) -> Record | None:
        """What `keep_reference` was given."""
        return {row["key"]: row["run"] for row in self._references.rows}.get(key)

    def keep_reference(self, key: str, run: Record) -> None:
        """Keeps an autoregressive run. Before its record, so that no finished cell lacks it."""
        self._references.add({"key": key, "run": run})

    def begin(self, about: Record) -> None:
        """Writes down who adds records now: argv, commit, versions, machine."""
        if self.folder:
            Lines(self.folder / "provenance.jsonl").add(about)

    def provenance(self) -> list[Record]:
        return Lines(self.folder / "provenance.jsonl").rows if self.folder else []


@contextmanager
def opened(folder: Path | None) -> Iterator[Results]:
    """The results of a folder, held against other processes; in memory alone without one."""
    if folder is None:
        yield Results()
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield Results(folder)
    except Timeout:
        raise ValueError(
            f"another `ratoon bench` writes into {folder}: wait for it, or give --out another folder"
        ) from None
