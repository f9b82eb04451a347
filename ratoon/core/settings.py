# Owns: every reading of the process environment.
# Promises: each setting is read when asked for, and an empty variable counts as unset.
# Never: read anywhere else (a test looks for `environ` and `getenv`).
"""Settings that come from the environment.

RATOON_CACHE     where models and prompt sets are kept (default: $XDG_CACHE_HOME/ratoon, else ~/.cache/ratoon)
HF_ENDPOINT      the hub that `ratoon pull` talks to (default: the public one)
TRITON_INTERPRET whether Triton runs its kernels on the CPU, step by step
OPENAI_API_KEY   the key that `ratoon bench --url` shows to a server
RATOON_TRACEBACK whether the command line shows tracebacks instead of one-line errors
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The directory of downloaded models and prompt sets. It may not exist yet.

    Raises ValueError naming the variable when it can be no directory, or not be entered.
    """
    if own := os.environ.get("RATOON_CACHE"):
        return _usable(Path(own).expanduser(), "RATOON_CACHE")
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return _usable(Path(xdg).expanduser() / "ratoon", "XDG_CACHE_HOME")
    return _usable(Path.home() / ".cache" / "ratoon", "HOME")


def _usable(path: Path, variable: str) -> Path:
    """`path`, unless a file or a closed directory is in its way. Whether it can be written shows when it is."""
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    trouble = None
    if not there.is_dir():
        trouble = f"{there} is no directory"
    elif not os.access(there, os.X_OK):
        trouble = f"there is no right to enter {there}"
    if trouble:
        raise ValueError(
            f"the cache cannot be {path} (from {variable}): {trouble}; set RATOON_CACHE to a directory of yours"
        )
    return path


def hub_endpoint() -> str | None:
    """Base address of the hub, or None for the client's default."""
    return os.environ.get("HF_ENDPOINT") or None


def api_key() -> str | None:
    """The key for a server of somebody else's."""
    return os.environ.get("OPENAI_API_KEY") or None


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def interprets_kernels() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def wants_traceback() -> bool:
    """Whether the command line should show whole tracebacks (RATOON_TRACEBACK=1)."""
    return bool(os.environ.get("RATOON_TRACEBACK"))
