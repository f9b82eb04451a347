# Owns: where figures come from: commit, versions, machine, and the command that asked for them.
# Promises: what cannot be found out is None or left out, never guessed.
# Never: measures.
"""Provenance of results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ratoon import __version__

_VERSIONED = ("torch", "triton", "numpy", "tokenizers", "safetensors")


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Everything about one run of a command, keys for servers apart."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {"began": began, "argv": _public(argv), "commit": git_commit(), "versions": versions(), "machine": machine()}


def _public(argv: Sequence[str]) -> list[str]:
    """The words, but for the key."""
    shown = []
    for before, word in zip(["", *argv], argv, strict=False):
        if before == "--api-key":
            word = "***"
        elif word.startswith("--api-key="):
            word = "--api-key=***"
        shown.append(word)
    return shown


def machine() -> dict[str, Any]:
    """Processor, cores and memory, and the GPUs that torch sees."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus,
    }


def _processor() -> str | None:
    """The processor's own name, which only Linux tells in a file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or None


def git_commit() -> str | None:
    """Commit of the source tree that runs, with '-dirty' where it has changes; None outside of one."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Versions of what computes. Packages that are not installed are left out."""
    found = {"python": platform.python_version(), "platform": sys.platform, "ratoon": __version__}
    for package in _VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
