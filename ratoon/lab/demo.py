# Owns: `ratoon demo`: its three prompts, what it shows, and its RESULT line.
# Promises: three methods on the same prompts in one run; whether the tokens agree is shown, not assumed.
# Never: uses a prompt of a published test set.
"""Two code prompts and one chat prompt: plain decoding, a draft chain, a draft tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ratoon.core.request import Method
from ratoon.core.tree import Tree, draw
from ratoon.lab.bench import agreement
from ratoon.lab.prompts import HUMANEVAL_STOP, Prompt
from ratoon.lab.record import Budget, Cell, Measured, measure, record, warm_up

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent

EngineFor = Callable[..., "Engine"]

PROMPTS = (
    Prompt(
        id="demo/moving_average",
        kind="code",
        text=(
            "def moving_average(values: list[float], window: int) -> list[float]:\n"
            '    """Return the mean of every run of `window` neighbouring values.\n\n'
            "    >>> moving_average([1.0, 2.0, 3.0, 4.0], 2)\n"
            "    [1.5, 2.5, 3.5]\n"
            '    """\n'
        ),
        stop=HUMANEVAL_STOP,
    ),
    Prompt(
        id="demo/bank_account",
        kind="code",
        text=(
            "class BankAccount:\n"
            '    """An account that can be opened, filled, emptied and asked for its balance."""\n\n'
            "    def __init__(self, owner: str, balance: float = 0.0):\n"
        ),
        stop=HUMANEVAL_STOP,
    ),
    Prompt(
        id="demo/ratoon",
        kind="chat",
        messages=({"role": "user", "content": "What is photosynthesis? Explain it to a child in a few sentences."},),
    ),
)


@dataclass
class Gallery:
    """Keeps the tree whose accepted path is the longest of those that branch."""

    tree: Tree | None = None
    path: tuple[int, ...] = ()

    def see(self, event: StreamEvent) -> None:
        if event.tree is None:
            return
        branches = len(set(event.tree.parent.tolist())) < event.tree.num_nodes
        if branches and len(event.path) > len(self.path):
            self.tree, self.path = event.tree, tuple(event.path)


def run(engine_for: EngineFor, budget: Budget, topk_cap: int, max_tokens: int) -> list[dict[str, Any]]:
    """Shows the demo and returns its records. `engine_for(drafter=..., dtype=...)` makes an engine.

    The baseline runs on an engine of its own without a drafter, so that it carries no ballast.
    """
    console = Console()
    gallery = Gallery()
    cells = [Cell(method, budget, topk_cap, concurrency=1, max_tokens=max_tokens) for method in ("ar", "chain", "tree")]
    measured: dict[Method, Measured] = {}
    records: list[dict[str, Any]] = []
    with _bar() as bar:
        task = bar.add_task("loading", total=len(cells) * (len(PROMPTS) + 1))

        def watch(event: StreamEvent) -> None:
            gallery.see(event)
            if event.output is not None:
                bar.advance(task)

        dtype = "auto"
        for served in (cells[:1], cells[1:]):
            settings = {"drafter": "none"} if served[0].method == "ar" else {}
            engine = engine_for(dtype=dtype, **settings)
            dtype = engine.dtype
            try:
                for cell in served:
                    bar.update(task, description=cell.method)
                    warm_up(engine, cell)
                    bar.advance(task)
                    measured[cell.method] = measure(engine, PROMPTS, cell, watch)
                    records.append(record(engine, cell, measured[cell.method], measured["ar"]))
                picture = _picture(engine, gallery)
                described = engine.describe()
            finally:
                engine.close()
    _show(console, measured, records, picture, described)
    print("RESULT " + json.dumps({"records": records}))
    return records


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:8}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _picture(engine: Engine, gallery: Gallery) -> list[str]:
    if gallery.tree is None:
        return []
    return draw(gallery.tree, gallery.path, lambda token: engine.tokenizer.decode([token], skip_special=False))


def _show(
    console: Console,
    measured: dict[Method, Measured],
    records: Sequence[dict[str, Any]],
    picture: Sequence[str],
    described: str,
) -> None:
    for prompt, output in zip(PROMPTS, measured["tree"].outputs, strict=True):
        console.print(Text(prompt.text or prompt.messages[0]["content"], style="bold"), end="" if prompt.text else "\n")
        console.print(Text(output.text))
        console.print()
    console.print(_table(measured, records))
    if picture:
        console.print("\nOne round's draft tree, the accepted path in heavy strokes:")
        for line in picture:
            console.print(Text(line))
    console.print(Text(f"\n{described}", style="dim"))


def _table(measured: dict[Method, Measured], records: Sequence[dict[str, Any]]) -> Table:
    """One line per method over all prompts, then one per method and prompt."""
    shown = Table(title="The same tokens, sooner")
    for name in ("method", "prompt", "tokens", "tok/s", "speed-up", "tau", "equal to plain decoding"):
        shown.add_column(name, justify="left" if name in ("method", "prompt") else "right")
    for row in records:
        method: Method = row["method"]
        speedup = f"{row['speedup_vs_ar']:.2f}x"
        shown.add_row(
            method, "all", str(row["output_tokens"]), f"{row['tok_s']:.1f}", speedup, f"{row['tau']:.2f}",
            "-" if method == "ar" else agreement(row), style="bold",
        )  # fmt: skip
        for place, prompt in enumerate(PROMPTS):
            shown.add_row(*_prompt_row(prompt, measured[method], measured["ar"], place))
        shown.add_section()
    return shown


def _prompt_row(prompt: Prompt, measured: Measured, reference: Measured, place: int) -> list[str]:
    """A prompt's own line; its time is its decoding plus its time to the first token."""
    output, plain = measured.outputs[place], reference.outputs[place]
    speed, base = _tok_s(output), _tok_s(plain)
    same = "yes" if output.token_ids == plain.token_ids else "no"
    return [
        "",
        f"{prompt.kind}: {prompt.id.removeprefix('demo/')}",
        str(len(output.token_ids)),
        f"{speed:.1f}",
        f"{speed / base:.2f}x",
        f"{output.tau:.2f}",
        "-" if measured is reference else same,
    ]


def _tok_s(output: Any) -> float:
    return len(output.token_ids) / max(output.ttft_s + output.decode_s, 1e-9)
