# Owns: how bench records are shown on a terminal.
# Promises: nothing is cut off or wrapped inside a cell: what a narrow terminal cannot hold side by side is stacked.
# Never: computes a figure.
"""Tables of bench records, and the lines that tell of differences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]

_SETTINGS = {"concurrency": "C", "temperature": "T", "mode": "mode", "dtype": "dtype"}
_FIGURES = ("tok/s", "x AR", "tau", "1st", "same", "near", "other", "ttft ms")
_LEGEND = (
    "tok/s over all prompts, prefill included; x AR: speed-up; tau: tokens per round; "
    "1st: first drafted token accepted; "
    "same, near, other: prompts whose tokens equal AR's, leave them at a near-tie, or differ."
)


def tables(records: Sequence[Record], width: int) -> list[RenderableType]:
    """One table where `width` holds it, else one per combination of settings, so that each fits 80 columns."""
    varying = [name for name in _SETTINGS if len({row[name] for row in records}) > 1]
    whole = _table(records, varying)
    if not varying or Console(width=1000).measure(whole).maximum <= width:
        return [whole, Text(_LEGEND, style="dim")]

    def settings(row: Record) -> tuple[Any, ...]:
        return tuple(row[name] for name in varying)

    stacked = [_table(list(rows), ()) for _, rows in groupby(records, key=settings)]
    return [*stacked, Text(_LEGEND, style="dim")]


def _table(records: Sequence[Record], varying: Sequence[str]) -> Table:
    """One line per record; a setting that all records share stands in the title instead."""
    first = records[0]
    known = [name for name in _SETTINGS if name not in varying and first[name] is not None]
    shared = ", ".join(f"{_SETTINGS[name]} {first[name]}" for name in known)
    title = f"{first['model']}, {first['prompts']} prompts on {first['device']}: {shared}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    for name in varying:
        shown.add_column(_SETTINGS[name], no_wrap=True)
    judged = ["passed"] if "passed" in first else []
    for name in (*judged, *_FIGURES):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in records:
        passed = [f"{row[name]}/{row['prompts']}" for name in judged]
        shown.add_row(cell_name(row), *(str(row[name]) for name in varying), *passed, *_figures(row))
    return shown


def cell_name(row: Record) -> str:
    """A cell among others of its settings."""
    if row["method"] in ("ar", "server"):
        return row["method"]
    cap = "" if row["topk_cap"] is None else f" cap {row['topk_cap']}"
    return f"{row['method']} {row['budget']}{cap}"


def _cell(row: Record) -> str:
    settings = [f"{_SETTINGS[name]}={row[name]}" for name in ("concurrency", "temperature")]
    return " ".join((cell_name(row), *settings))


def _figures(row: Record) -> list[str]:
    first = row["accept_per_position"][0] if row["accept_per_position"] else None
    figures = [(row["tok_s"], ".1f"), (row["speedup_vs_ar"], ".2f"), (row["tau"], ".2f"), (first, ".2f")]
    figures += [(row[f"{verdict}_prompts"], "d") for verdict in ("identical", "near_tie", "mismatched")]
    return ["-" if value is None else format(value, form) for value, form in [*figures, (row["ttft_ms"], ".0f")]]


def agreement(row: Record) -> str:
    """Whether the tokens equal the autoregressive ones, in a few words."""
    parts = [f"{row['identical_prompts']} yes"]
    parts += [f"{row['near_tie_prompts']} near-tie"] if row["near_tie_prompts"] else []
    parts += [f"{row['mismatched_prompts']} NO"] if row["mismatched_prompts"] else []
    return ", ".join(parts)


def failure(row: Record) -> str:
    """A cell that has no figures, and why."""
    return f"{_cell(row)}: {row['error']}"


def told(row: Record) -> list[str]:
    """A line per first divergence from the autoregressive tokens: near-ties are printed, never skipped."""
    return [f"{_cell(row)}: {d['prompt']} differs from token {d['index']} on: {_judged(d)}" for d in row["divergences"]]


def _judged(divergence: Record) -> str:
    gaps = [divergence[name] for name in ("gap", "third_gap") if divergence[name] is not None]
    below = " and ".join(f"{gap:.4f}" for gap in gaps) or "nothing"
    return (
        f"{divergence['verdict'].replace('_', '-')}, AR's next best are {below} below (bound {divergence['bound']:.4f})"
    )
