# Owns: what `make bench-gpu` keeps and shows: results.jsonl, provenance.json, the table of targets, the kernel cache.
# Promises: a line per case, appended as it ends; a target without a figure says so.
# Never: measures.
"""Results of benchmarks/gpu.py."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ratoon.lab.provenance import git_commit, versions

# Measured on one H200 (NUMBERS section 1); a run of the piece `limits` on the machine itself goes before it.
COPY_BYTES_PER_S = 4.26e12


class Results:
    """All lines of results.jsonl; of several for a case the last without an error counts."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.jsonl"
        with (folder / "provenance.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps(about), file=file)
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]

    def add(self, piece: str, case: str, found: dict[str, Any], seconds: float) -> None:
        """Appends a line and says so."""
        line = {"piece": piece, "case": case, "seconds": round(seconds, 1), "commit": self.about["commit"], **found}
        line["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.lines.append(line)
        with self.file.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file, flush=True)
        print(f"{piece}/{case}: {_brief(found)} ({seconds:.0f} s)", flush=True)

    def is_done(self, piece: str, case: str) -> bool:
        return self.find(piece, case) is not None

    def find(self, piece: str, case: str) -> dict[str, Any] | None:
        """The last line of a case that has no error."""
        fitting = [x for x in self.lines if (x["piece"], x["case"]) == (piece, case) and "error" not in x]
        return fitting[-1] if fitting else None


def _brief(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"FAILED, {found['error'][:300]}"
    if "rows" in found and isinstance(found["rows"], list):
        return ", ".join(f"{r['method']} {r['budget']}: {r['tok_s']} tok/s tau {r['tau']}" for r in found["rows"])
    shown = {key: value for key, value in found.items() if key not in ("kernels", "floor_bytes")}
    if found.get("kernels"):
        shown["launches"] = found["kernels"]["launches"]
    return ", ".join(f"{key} {_short(value)}" for key, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(inner)}" for key, inner in value.items()) + "}"
    return str(value)


# ---- targets ----------------------------------------------------------------------------------------------

Figure = Callable[[Results], float | None]


@dataclass(frozen=True)
class Target:
    """A figure of NUMBERS section 4 and its bound."""

    name: str
    figure: Figure
    bound: float
    at_most: bool

    def line(self, results: Results) -> str:
        value = self.figure(results)
        sign = "<=" if self.at_most else ">="
        if value is None:
            return f"{self.name:<58} {'-':>10}  {sign} {self.bound:<8g} not measured"
        passed = value <= self.bound if self.at_most else value >= self.bound
        return f"{self.name:<58} {value:>10.4g}  {sign} {self.bound:<8g} {'pass' if passed else 'FAIL'}"


def _of(piece: str, case: str, field: str) -> Figure:
    def figure(results: Results) -> float | None:
        line = results.find(piece, case)
        return None if line is None else line.get(field)

    return figure


def _ratio(piece: str, case: str, reference: str) -> Figure:
    ours, theirs = _of(piece, case, "tok_s"), _of(piece, reference, "tok_s")

    def figure(results: Results) -> float | None:
        over, under = ours(results), theirs(results)
        return None if over is None or not under else over / under

    return figure


def _copy(results: Results) -> float:
    line = results.find("limits", "limits")
    return COPY_BYTES_PER_S if line is None else 1e12 * line["copy_tb_s"]


# (what, best tok/s of a public engine on the same GPU): NUMBERS section 2.
_PLAIN = {1: 194, 8: 1474, 32: 5655, 128: 16783}
_DRAFTED = {1: 1023, 8: 7041, 32: 13351, 128: 14405}

TARGETS = (
    Target("Qwen3-8B shape, C=1, context 1k: AR step, ms", _of("qwen3-8b-rounds", "ar", "round_ms"), 4.6, True),
    Target("  chain-15 round, ms", _of("qwen3-8b-rounds", "chain-15", "round_ms"), 5.6, True),
    Target("  tree-63 round, ms", _of("qwen3-8b-rounds", "tree-63", "round_ms"), 6.2, True),
    Target("  GPU idle, AR", _of("qwen3-8b-rounds", "ar", "idle"), 0.02, True),
    Target("  GPU idle, tree-63", _of("qwen3-8b-rounds", "tree-63", "idle"), 0.02, True),
    Target("SmolLM2 shape, C=1: AR step, ms", _of("smollm2-rounds", "ar", "round_ms"), 0.75, True),
    Target("  tree-63 round, ms", _of("smollm2-rounds", "tree-63", "round_ms"), 1.2, True),
    *(
        Target(f"Qwen3-8B shape, C={rows}: AR tok/s", _of(f"qwen3-8b-c{rows}", "ar@128", "tok_s"), bound, False)
        for rows, bound in _PLAIN.items()
    ),
    *(
        Target(f"  chain-15, tau 6.5 (anchor), C={rows}", _of(f"qwen3-8b-c{rows}", "chain@128", "tok_s"), bound, False)
        for rows, bound in _DRAFTED.items()
    ),
    Target("auto over AR, table, C=32", _ratio("qwen3-8b-c32", "auto@128", "ar@128"), 2.3, False),
    Target("auto over AR, table, C=128, short context", _ratio("qwen3-8b-c128", "auto@128", "ar@128"), 1.1, False),
    Target("auto over AR, table, C=128, context 1k", _ratio("qwen3-8b-c128", "auto@1024", "ar@1024"), 1.3, False),
)


def report(results: Results) -> str:
    """The targets, rounds against their floors, and a warning where lines are of several commits."""
    lines = ["", *(target.line(results) for target in TARGETS), "", *_floors(results)]
    commits = sorted({str(line["commit"]) for line in results.lines})
    if len(commits) > 1:
        lines.append(f"these results are of several commits: {', '.join(commits)}")
    broken = [(x["piece"], x["case"]) for x in results.lines if "error" in x]
    failed = [f"{piece}/{case}" for piece, case in dict.fromkeys(broken) if not results.is_done(piece, case)]
    return "\n".join([*lines, *([f"failed: {', '.join(failed)}"] if failed else [])])


def _floors(results: Results) -> list[str]:
    """Rounds against the time to read their bytes once."""
    lines = []
    for line in {(x["piece"], x["case"]): x for x in results.lines if "floor_bytes" in x}.values():
        floor = 1e3 * sum(line["floor_bytes"].values()) / _copy(results)
        kernels = line.get("kernels") or {}
        busy = f", kernels busy {kernels['busy_ms']:.2f} ms in {kernels['launches']:.0f} launches" if kernels else ""
        lines.append(
            f"{line['piece']}/{line['case']}: round {line['round_ms']:.3f} ms, graph {line['graph_ms']:.3f}, host gap "
            f"{line['gap_us']:.0f} us, byte floor {floor:.3f} ms ({floor / line['round_ms']:.0%}){busy}"
        )
    return lines


# ---- provenance -------------------------------------------------------------------------------------------


def provenance(commit: str | None, arguments: Sequence[str] | None) -> dict[str, Any]:
    """What ran where: versions, GPU and driver, commit, command, date."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": commit or git_commit(),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cuda": torch.version.cuda,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


# ---- compiled kernels -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def unpack_cache(file: Path) -> None:
    """Begins with the kernels of an earlier run; a file that is not there is no error."""
    if file.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tarfile.open(file) as tar:
            tar.extractall(cache_folder(), filter="data")


def pack_cache(file: Path) -> None:
    """Leaves the compiled kernels behind for another run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if cache_folder().exists():
        with tarfile.open(file, "w:gz") as tar:
            tar.add(cache_folder(), arcname=".")
