# Owns: every reading of the process environment.
# Promises: each setting is read when asked for, and an empty variable counts as unset.
# Never: read anywhere else (a test looks for `environ` and `getenv`).
"""Settings that come from the environment.

RATOON_CACHE     where models and prompt sets are kept (default: $XDG_CACHE_HOME/ratoon, else ~/.cache/ratoon)
HF_ENDPOINT      the hub that `ratoon pull` talks to (default: the public one)
RATOON_TRACEBACK whether the command line shows tracebacks instead of one-line errors
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The directory of downloaded models and prompt sets. It may not exist yet."""
    if own := os.environ.get("RATOON_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "ratoon"
    return Path.home() / ".cache" / "ratoon"


def hub_endpoint() -> str | None:
    """Base address of the hub, or None for the client's default."""
    return os.environ.get("HF_ENDPOINT") or None


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def wants_traceback() -> bool:
    """Whether the command line should show whole tracebacks (RATOON_TRACEBACK=1)."""
    return bool(os.environ.get("RATOON_TRACEBACK"))
