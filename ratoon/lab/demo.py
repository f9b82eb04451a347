# Owns: `ratoon demo`: its three prompts, what it shows, and its RESULT line.
# Promises: three methods on the same prompts in one run; whether the tokens agree is shown, not assumed.
# Never: uses a prompt of a published test set.
"""Two code prompts and one chat prompt: plain decoding, a draft chain, a draft tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratoon.core.request import Budget, Method, compare
from ratoon.lab.bars import bar
from ratoon.lab.example import example_tree
from ratoon.lab.prompts import HUMANEVAL_STOP, Prompt
from ratoon.lab.record import Cell, Measured, measure, record, warm_up
from ratoon.lab.table import agreement, told

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent

EngineFor = Callable[..., "Engine"]

_SAME = {"identical": "yes", "near_tie": "near-tie", "mismatch": "NO"}
_FIGURES = {"output_tokens": "d", "tok_s": ".1f", "speedup_vs_ar": ".2f", "tau": ".2f"}
METHODS: tuple[Method, ...] = ("ar", "chain", "tree")
# They end inside a line: after a line break this model tends to close the code and to talk about it.
PROMPTS = (
    Prompt(
        id="demo/bank account",
        kind="code",
        text=(
            "class BankAccount:\n"
            '    """An account with an owner and a balance."""\n\n'
            "    def __init__(self, owner, balance=0):\n"
            "        self.owner = owner\n"
            "        self.balance = balance\n\n"
            "    def deposit(self, amount):"
        ),
        stop=HUMANEVAL_STOP,
    ),
    Prompt(
        id="demo/stack",
        kind="code",
        text=(
            "class Stack:\n"
            '    """A last-in, first-out stack."""\n\n'
            "    def __init__(self):\n"
            "        self.items = []\n\n"
            "    def push(self, item):"
        ),
        stop=HUMANEVAL_STOP,
    ),
    Prompt(
        id="demo/photosynthesis",
        kind="chat",
        messages=({"role": "user", "content": "What is photosynthesis? Explain it to a child in a few sentences."},),
    ),
)


def run(engine_for: EngineFor, budget: Budget, topk_cap: int, max_tokens: int) -> list[dict[str, Any]]:
    """Shows the demo and returns its records. `engine_for(drafter=..., dtype=..., progress=...)` makes an engine.

    The baseline runs on an engine of its own without a drafter, so that it carries no ballast.
    """
    cells = [Cell(method, budget, topk_cap, concurrency=1, max_tokens=max_tokens) for method in METHODS]
    for cell in cells:
        cell.params(())  # a bad limit is told before a model loads
    measured: dict[str, Measured] = {}
    records: list[dict[str, Any]] = []
    picture: list[str] = []
    dtype = "auto"
    with bar() as shown:
        shown.begin("loading", len(cells) * (len(PROMPTS) + 1))
        for served in (cells[:1], cells[1:]):
            choice = {"drafter": "none"} if served[0].method == "ar" else {"dtype": dtype}
            engine = engine_for(**choice, progress=shown.report)
            try:
                for cell in served:
                    shown.name(cell.method)
                    measured[cell.method] = _timed(engine, cell, shown.advance)
                    records.append(record(engine, cell, measured[cell.method], measured["ar"]))
                if served[-1].method == "tree":
                    picture = example_tree(engine, PROMPTS[0], served[-1])
                dtype = engine.dtype
            finally:
                engine.close()
    _show(Console(), measured, records, picture)
    print("RESULT " + json.dumps({"records": records}))
    return records


def _timed(engine: Engine, cell: Cell, tick: Callable[[], None]) -> Measured:
    """The demo's prompts through one method, after a warm-up; `tick` is called after each."""

    def watch(event: StreamEvent) -> None:
        if event.output is not None:
            tick()

    warm_up(engine, cell)
    tick()
    return measure(engine, PROMPTS, cell, watch)


def _show(
    console: Console,
    measured: dict[str, Measured],
    records: Sequence[dict[str, Any]],
    picture: Sequence[str],
) -> None:
    for prompt, output in zip(PROMPTS, measured["tree"].outputs, strict=True):
        console.print(Text(prompt.text or prompt.messages[0]["content"] + "\n", style="bold"), end="")
        console.print(Text(output.text.rstrip() + "\n"))
    console.print(_table(measured, records))
    for line in (line for row in records for line in told(row)):
        console.print(Text(line))
    if picture:
        console.print("\nOne round's draft tree, the accepted path in heavy strokes:")
        for line in picture:
            console.print(Text(line), no_wrap=True)
    console.print()


def _table(measured: dict[str, Measured], records: Sequence[dict[str, Any]]) -> Table:
    """One line per method over all prompts, then one per method and prompt."""
    row = records[-1]
    shown = Table(title=f"{row['model']} with {row['drafter']}: {row['dtype']}, {row['mode']} mode on {row['device']}")
    for name in ("method", "prompt", "tokens", "tok/s", "x AR", "tau", "same tokens"):
        shown.add_column(name, justify="left" if name in ("method", "prompt") else "right", no_wrap=True)
    for row in records:
        method: Method = row["method"]
        same = "-" if method == "ar" else agreement(row)
        figures = [format(row[key], form) for key, form in _FIGURES.items()]
        shown.add_row(method, "all three", *figures, same, style="bold")
        for place, prompt in enumerate(PROMPTS):
            shown.add_row("", *_prompt_row(prompt, measured[method], measured["ar"], place, row["dtype"]))
        shown.add_section()
    return shown


def _prompt_row(prompt: Prompt, measured: Measured, reference: Measured, place: int, dtype: str) -> list[str]:
    """A prompt's own line; its time is its decoding plus its time to the first token."""
    output, plain = measured.outputs[place], reference.outputs[place]
    speed, base = _tok_s(measured, place), _tok_s(reference, place)
    verdict = compare(plain, output, dtype).verdict
    return [
        prompt.id.removeprefix("demo/"),
        str(len(output.token_ids)),
        f"{speed:.1f}",
        f"{speed / base:.2f}",
        f"{output.tau:.2f}",
        "-" if measured is reference else _SAME[verdict],
    ]


def _tok_s(measured: Measured, place: int) -> float:
    output = measured.outputs[place]
    return len(output.token_ids) / max(measured.ttft_s[place] + output.decode_s, 1e-9)
