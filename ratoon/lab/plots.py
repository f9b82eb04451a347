# Owns: the plots of bench records.
# Promises: a plot shows cells of one setting only; a line is one method, and one cap of the tree; labels stay apart.
# Never: averages cells, or draws a plot that has nothing to show.
"""Bench records as small plots, one per setting: SVG for the report, PNG beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ratoon.lab.record import STAGES
from ratoon.lab.results import Record
from ratoon.lab.table import cell_name

SETTINGS = {
    "model": "", "device": "on", "dtype": "", "mode": "", "prompt_set": "prompts", "prompts": "prompts:",
    "max_tokens": "max tokens", "cut": "cut", "simulated": "simulated", "temperature": "temperature",
    "concurrency": "concurrency",
}  # fmt: skip
"""What cells of one plot share, and how a title calls it."""
# Colours that the colour-blind tell apart too (Okabe and Ito).
_PLAIN, _CHAIN, _TREES = "#666666", "#0072B2", ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_STAGES = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#0072B2", "#009E73")
_STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb",
    "axes.axisbelow": True, "axes.edgecolor": "#9ca3af", "xtick.color": "#374151", "ytick.color": "#374151",
    "axes.titlesize": 9, "axes.titlelocation": "left", "svg.fonttype": "none", "svg.hashsalt": "ratoon",
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One drawing; `name` is its file's, without an ending."""

    name: str
    title: str
    svg: bytes
    png: bytes


@dataclass(frozen=True)
class Setting:
    """Cells that may be compared, and what tells them from other settings."""

    rows: tuple[Record, ...]
    title: str

    @cached_property
    def plain(self) -> Record | None:
        return next((row for row in self.rows if row["method"] == "ar"), None)

    def lines(self) -> Iterator[tuple[str, str, list[Record]]]:
        """(name, colour, cells) of each method, tree cap and drafter; plain decoding is no line."""
        drafted = [row for row in self.rows if row["method"] != "ar"]
        several = len({row["drafter"] for row in drafted}) > 1
        names = {_line(row, several): None for row in sorted(drafted, key=_order)}
        trees = iter(_TREES * len(names))
        for name in names:
            colour = _CHAIN if name == "chain" else next(trees)
            yield name, colour, [row for row in drafted if _line(row, several) == name]


def settings(rows: Sequence[Record], without: Iterable[str] = ()) -> list[Setting]:
    """The rows by what must be equal to compare them; only what varies is in a title."""
    names = [name for name in SETTINGS if name not in set(without)]
    varying = [name for name in names if len({str(row.get(name)) for row in rows}) > 1]
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name)) for name in varying), []).append(row)
    titles = [
        ", ".join(f"{SETTINGS[n]} {value}".strip() for n, value in zip(varying, key, strict=True)) for key in groups
    ]
    return [Setting(tuple(group), title) for title, group in zip(titles, groups.values(), strict=True)]


def _order(row: Record) -> tuple[Any, ...]:
    return row["method"], row["topk_cap"] or 0, str(row["drafter"])


def _line(row: Record, several: bool) -> str:
    cap = "" if row["topk_cap"] is None else f" cap {row['topk_cap']}"
    return f"{row['method']}{cap}" + (f", {row['drafter']}" if several else "")


def _size(row: Record) -> float:
    """Budgets in order, auto last; a server has none."""
    return float("inf") if row["budget"] == "auto" else row["budget"] or 0


def budget_plots(rows: Sequence[Record], figure: str, label: str, kind: str) -> Iterator[Plot]:
    """A figure against the budget, plain decoding as a level line."""
    for setting in settings([row for row in rows if row["budget"] is not None]):
        budgets = sorted({_size(row) for row in setting.rows if row["method"] != "ar"})
        if not budgets:
            continue

        def draw(axes: Axes, setting: Setting = setting, budgets: list[float] = budgets) -> None:
            for place, (name, colour, cells) in enumerate(setting.lines()):
                points = sorted((budgets.index(_size(row)), row[figure]) for row in cells if row[figure] is not None)
                axes.plot(
                    [x for x, _ in points], [y for _, y in points], "o-", color=colour, label=name, **_width(place)
                )
            if setting.plain:
                axes.axhline(setting.plain[figure], color=_PLAIN, linestyle="--", label="ar")
            axes.set_xticks(range(len(budgets)), ["auto" if b == float("inf") else f"{b:g}" for b in budgets])
            axes.margins(x=0.06)
            axes.set(xlabel="budget (drafted nodes a round)", ylabel=label)
            axes.set_ylim(bottom=0)

        yield _plot(kind, setting.title, draw)


def position_plots(rows: Sequence[Record]) -> Iterator[Plot]:
    """Acceptance per position, of each line's largest budget."""
    for setting in settings(rows):
        largest = [(colour, max(cells, key=_size)) for _, colour, cells in setting.lines()]
        largest = [(colour, row) for colour, row in largest if row["accept_per_position"]]
        if not largest:
            continue

        def draw(axes: Axes, largest: list[tuple[str, Record]] = largest) -> None:
            for place, (colour, row) in enumerate(largest):
                shares = row["accept_per_position"]
                axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=cell_name(row), **_width(place))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="depth", ylabel="share of rounds accepted")
            axes.set_ylim(0, 1.04)

        yield _plot("acceptance-per-position", setting.title, draw)


def concurrency_plots(rows: Sequence[Record], figure: str, label: str, kind: str) -> Iterator[Plot]:
    """A figure against concurrency, of each line's best budget there."""
    for setting in settings(rows, without=["concurrency"]):
        levels = sorted({row["concurrency"] for row in setting.rows})
        known = [row for row in setting.rows if row[figure] is not None]
        if len(levels) < 2 or not known:
            continue

        def draw(
            axes: Axes, known: list[Record] = known, levels: list[int] = levels, title: str = setting.title
        ) -> None:
            lines = list(Setting(tuple(known), title).lines())
            plain = ("ar", _PLAIN, [row for row in known if row["method"] == "ar"])
            for place, (name, colour, cells) in enumerate([*lines, plain]):
                best = {c: [row[figure] for row in cells if row["concurrency"] == c] for c in levels}
                points = [(levels.index(c), max(values)) for c, values in best.items() if values]
                if points:
                    style = "o--" if name == "ar" else "o-"
                    axes.plot(*zip(*points, strict=True), style, color=colour, label=name, **_width(place))
            axes.set_xticks(range(len(levels)), [str(level) for level in levels])
            axes.margins(x=0.06)
            axes.set(xlabel="concurrency (rows decoded together)", ylabel=label)
            axes.set_ylim(bottom=0)

        yield _plot(kind, setting.title, draw)


def split_plots(rows: Sequence[Record]) -> Iterator[Plot]:
    """Milliseconds of a round by stage, a bar per cell."""
    for setting in settings(rows):
        timed = [row for row in setting.rows if any(row.get(f"ms_{stage}") for stage in STAGES)]
        if not timed:
            continue

        def draw(axes: Axes, timed: list[Record] = timed) -> None:
            left = [0.0] * len(timed)
            for stage, colour in zip(STAGES, _STAGES, strict=True):
                widths = [row.get(f"ms_{stage}") or 0.0 for row in timed]
                if any(widths):
                    axes.barh(range(len(timed)), widths, left=left, color=colour, label=stage.replace("_", " + "))
                    left = [a + b for a, b in zip(left, widths, strict=True)]
            axes.set_yticks(range(len(timed)), [cell_name(row) for row in timed])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set(xlabel="milliseconds a round")

        yield _plot("round-time-split", setting.title, draw, height=1.7 + 0.24 * len(timed))


def _width(place: int) -> dict[str, Any]:
    """Each line thinner than the one it is drawn over, so that equal figures do not hide one."""
    width = max(3.6 - 0.9 * place, 0.9)
    return {"linewidth": width, "markersize": 2.2 + width}


def _plot(kind: str, title: str, draw: Callable[[Axes], None], height: float = 3.3) -> Plot:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if title:
            axes.set_title(title)
        # Below the axes, where no line can be hidden by it.
        figure.legend(
            loc="outside lower center", ncols=3, frameon=False, fontsize=8, columnspacing=1.2, handlelength=1.6
        )
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=160)
    name = re.sub(r"[^a-z0-9.]+", "-", f"{kind}-{title}".lower()).strip("-")
    return Plot(name, title, svg.getvalue(), png.getvalue())
