# Owns: reading a stack: which stage of a round, and which line of the engine, an error or a death comes from.
# Promises: frames outside of the engine (torch, lab, tests) name neither.
# Never: imports torch.
"""Stacks of exceptions and of dead processes."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

_STAGE_OF = {
    "_join": "seat",
    "prefill": "prefill",
    "draft_build": "draft",
    "verify": "verify",
    "accept_commit": "accept",
    "_commit_cache": "commit",
    "_draft": "draft",
    "build_trees": "build",
    "pack": "build",
    "accept_rows": "accept",
    "move": "commit",
    "store_context": "commit",
}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
_PACKAGE = Path(__file__).resolve().parents[2]
_TOOLS = _PACKAGE / "lab"


def stack_of(error: BaseException) -> tuple[str | None, str | None]:
    """(stage, file:line and function) of where an exception comes from."""
    return place_of(traceback.format_tb(error.__traceback__)[::-1])


def place_of(frames: Sequence[str]) -> tuple[str | None, str | None]:
    """The same of a stack's lines, innermost first. Frames outside of the engine name neither."""
    stage, where = None, None
    for frame in frames:
        for match in _FRAME.finditer(frame):
            path = Path(match["file"])
            if not path.is_relative_to(_PACKAGE) or path.is_relative_to(_TOOLS):
                continue
            where = where or f"{path.relative_to(_PACKAGE)}:{match['line']} {match['name']}"
            stage = stage or _STAGE_OF.get(match["name"])
    return stage, where
