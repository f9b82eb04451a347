# Owns: report.html of a sweep's folder, and the plots beside it.
# Promises: one file that needs no other and no network; what failed is in it, with its cause.
# Never: computes a figure that the records do not hold.
"""A sweep as one page: plots, trees, every record, failures, provenance."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.lab.plots import (
    SETTINGS,
    Plot,
    budget_plots,
    concurrency_plots,
    position_plots,
    settings,
    split_plots,
)
from ratoon.lab.results import Record, Results
from ratoon.lab.table import cell_name, failure, told

_TEMPLATE = Path(__file__).with_name("report.html")
# Heading, key of the record, format.
_COLUMNS = (
    ("tok/s", "tok_s", ".1f"),
    ("× AR", "speedup_vs_ar", ".2f"),
    ("tau", "tau", ".2f"),
    ("tau cut", "tau_cut", ".2f"),
    ("same", "identical_prompts", "d"),
    ("near-tie", "near_tie_prompts", "d"),
    ("other", "mismatched_prompts", "d"),
    ("first token p50 ms", "ttft_ms_p50", ".0f"),
    ("first token p95 ms", "ttft_ms_p95", ".0f"),
    ("first token p99 ms", "ttft_ms_p99", ".0f"),
    ("inter-token p50 ms", "itl_ms_p50", ".1f"),
    ("inter-token p95 ms", "itl_ms_p95", ".1f"),
    ("inter-token p99 ms", "itl_ms_p99", ".1f"),
    ("peak MB", "peak_mb", ".0f"),
    ("rounds", "rounds", "d"),
    ("in graphs", "graph_share", ".0%"),
    ("fall-backs", "fallback_text", "s"),
    ("tokens", "output_tokens", "d"),
)


@dataclass(frozen=True)
class Section:
    """Plots of one kind, or why there are none."""

    title: str
    explanation: str
    plots: Sequence[Plot]
    missing: str


def write_report(results: Results, folder: Path) -> Path:
    """Writes report.html and the plots; returns the page's path."""
    from jinja2 import Environment

    rows = list(results.records.values())
    measured = [row for row in rows if row["error"] is None]
    sections = list(_sections(measured)) if measured else []
    _save_plots(sections, folder / "plots")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    path = folder / "report.html"
    path.write_text(page.render(_content(rows, measured, sections, results.provenance())), encoding="utf-8")
    return path


def _save_plots(sections: Sequence[Section], folder: Path) -> None:
    """In place of those of the last report."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for section in sections:
        for plot in section.plots:
            (folder / f"{plot.name}.png").write_bytes(plot.png)


def _content(
    rows: list[Record], measured: list[Record], sections: Sequence[Section], runs: list[Record]
) -> dict[str, Any]:
    """What the template shows."""
    varying = [name for name in SETTINGS if len({str(row.get(name)) for row in rows}) > 1]
    shared = {name.replace("_", " "): rows[0].get(name) for name in SETTINGS if name not in varying}
    return {
        "shared": {name: value for name, value in shared.items() if value is not None},
        "best": list(_best(measured)),
        "sections": [
            {
                "title": s.title,
                "explanation": s.explanation,
                "missing": s.missing,
                "plots": [_image(p) for p in s.plots],
            }
            for s in sections
        ],
        "trees": [
            (f"{cell_name(row)}, concurrency {row['concurrency']}", row["tree"]) for row in measured if row.get("tree")
        ],
        "headings": [*(name.replace("_", " ") for name in varying), *(heading for heading, _, _ in _COLUMNS)],
        "table": [(cell_name(row), [*(row.get(name) for name in varying), *_figures(row)]) for row in measured],
        "differences": [line for row in measured for line in told(row)],
        "failures": [failure(row) for row in rows if row["error"] is not None],
        "runs": [{**run, "command": shlex.join(["ratoon", *run["argv"][1:]])} for run in runs],
        "num_cells": len(rows),
    }


def _best(measured: list[Record]) -> Iterator[str]:
    """The fastest cell of each setting."""
    for setting in settings(measured) if measured else ():
        row = max(setting.rows, key=lambda row: row["tok_s"])
        gain = "" if row["speedup_vs_ar"] is None else f", {row['speedup_vs_ar']:.2f} × AR"
        where = f"{setting.title}: " if setting.title else ""
        yield f"{where}{cell_name(row)} with {row['tok_s']:.1f} tokens/s{gain}"


def _figures(row: Record) -> list[str]:
    fallbacks = ", ".join(f"{name} {count}" for name, count in (row.get("fallbacks_by_name") or {}).items())
    peak = row.get("peak_memory_bytes")
    row = {**row, "fallback_text": fallbacks or "none", "peak_mb": None if peak is None else peak / 1e6}
    return ["–" if row.get(key) is None else format(row[key], form) for _, key, form in _COLUMNS]


def _image(plot: Plot) -> dict[str, str]:
    return {"title": plot.title, "data": base64.b64encode(plot.svg).decode()}


def _sections(measured: list[Record]) -> Iterator[Section]:
    yield Section(
        "Tokens/s against budget",
        "All prompts, prefill included.",
        list(budget_plots(measured, "tok_s", "tokens/s", "tokens-against-budget")),
        "No cell drafts.",
    )
    yield Section(
        "Acceptance against budget",
        "tau: tokens a row commits per round, the new anchor included.",
        list(budget_plots(measured, "tau", "tau", "tau-against-budget")),
        "No cell drafts.",
    )
    yield Section(
        "Acceptance per position",
        "Share of all rounds whose accepted path reaches a depth; of each line the largest budget.",
        list(position_plots(measured)),
        "No cell drafts.",
    )
    yield Section(
        "Speed-up against concurrency",
        "Over plain decoding of the same run; of each line the best budget.",
        list(concurrency_plots(measured, "speedup_vs_ar", "× AR", "speed-up-against-concurrency")),
        "This takes plain decoding (ar) and two concurrencies.",
    )
    yield Section(
        "Tokens/s against concurrency",
        "Of each line the best budget.",
        list(concurrency_plots(measured, "tok_s", "tokens/s", "tokens-against-concurrency")),
        "This takes two concurrencies.",
    )
    yield Section(
        "Round time split",
        "Mean milliseconds of a round, by stage.",
        list(split_plots(measured)),
        "Stages are timed in eager and staged mode only: a captured round is one launch.",
    )
