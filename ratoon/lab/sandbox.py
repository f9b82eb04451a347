# Owns: how untrusted Python is run against its tests, and how what came of it is judged.
# Promises: an answer soon after the time limit, whatever the program does; of an isolated one nothing is left behind.
# Never: runs the program in this process, or takes an exit code for success.
"""A program, its tests, and whether they ran to their end. lab/jail.py is the other side."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from ratoon.lab.jail import LEFT_BEHIND

JAIL = Path(__file__).with_name("jail.py")
GRACE_S = 20.0


@dataclass(frozen=True)
class Limits:
    """Of each process: seconds of processor time, bytes of memory, bytes written to a file (the output is one).

    `wall_s` is for all of it: long beside `cpu_s`, because a busy machine is no fault of the program.
    """

    cpu_s: int = 5
    wall_s: float = 30.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 8 << 20
    processes: int = 16


@dataclass(frozen=True)
class Judged:
    """Whether the tests passed, and if not, why, in one line."""

    passed: bool
    cause: str = ""


class Sandbox:
    """`isolated`: in namespaces of its own. Otherwise limits and a time-out are all there is, and the program can read
    and write what this user can."""

    def __init__(self, isolated: bool = True, limits: Limits | None = None) -> None:
        self.isolated, self.limits = isolated, limits or Limits()

    @classmethod
    def open(cls, unsafe: bool) -> Sandbox:
        """The safest that works here. ValueError where that is not safe and `unsafe` was not asked for."""
        isolated = cls()
        tried = isolated.run("", "")
        if tried.passed:
            return isolated
        if not unsafe:
            raise ValueError(
                f"programs cannot be isolated on this machine ({tried.cause}), so none is run: allow user namespaces, "
                "or run them with limits alone (--unsafe-exec) where they can do no harm, as in a container"
            )
        return cls(isolated=False)

    def run(self, program: str, tests: str) -> Judged:
        """Runs the program, then its tests in the same interpreter."""
        token = secrets.token_hex(16)
        with TemporaryDirectory(prefix="ratoon-") as scratch, TemporaryFile() as job, TemporaryFile() as output:
            asked = {"program": program, "tests": tests, "isolated": self.isolated, "scratch": scratch}
            job.write(json.dumps({**asked, **asdict(self.limits)}).encode())
            job.seek(0)
            with _pipe() as (token_out, token_in), _pipe() as (report_out, report_in):
                os.write(token_in, token.encode())
                code = self._wait(job, output, token_out, report_in)
                report = _read(report_out)
            output.seek(max(0, output.seek(0, os.SEEK_END) - 400))
            last = output.read().decode(errors="replace").strip().splitlines()[-1:]
        if code == 0 and report == token:
            return Judged(True)
        return Judged(False, self._cause(code, report, last))

    def _wait(self, job: IO[bytes], output: IO[bytes], token_fd: int, report_fd: int) -> int | None:
        """Its exit code, or None where time ran out."""
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(JAIL), str(token_fd), str(report_fd)],
            stdin=job, stdout=output, stderr=output, pass_fds=(token_fd, report_fd),
            env={}, cwd="/", start_new_session=True,
        )  # fmt: skip
        try:
            return started.wait(self.limits.wall_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            started.terminate()  # it ends what it holds, sees it gone and follows
            try:
                started.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                started.kill()  # and process 1 of its namespaces with it
                started.wait()

    def _cause(self, code: int | None, report: str, last: list[str]) -> str:
        if code is None:
            return f"not done after {self.limits.wall_s:g} s"
        if code == 128 + signal.SIGXCPU:
            return f"used up its {self.limits.cpu_s} s of processor time"
        if code > 128 or code < 0:
            return f"killed by {_name(code - 128 if code > 0 else -code)}"
        if code == LEFT_BEHIND:
            return "left processes running behind it"
        if report:
            return "".join(sign if sign.isprintable() else " " for sign in report)[:300]
        # Where the jail itself could not be made, its last line says why.
        return last[0] if code == 1 and last else f"left before its tests were done (exit code {code})"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _read(end: int) -> str:
    """What is in the pipe, at most a report's length; it may hold nothing."""
    os.set_blocking(end, False)
    try:
        return os.read(end, 2048).decode(errors="replace")
    except BlockingIOError:
        return ""
