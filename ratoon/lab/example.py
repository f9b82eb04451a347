# Owns: the choice of one round's draft tree that stands for a cell.
# Promises: a run of its own, never a timed one; the engine traces no trees afterwards.
# Never: draws a chain as a tree.
"""An example of the trees that a cell drafts, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratoon.core.tree import Tree, draw
from ratoon.lab.prompts import Prompt
from ratoon.lab.record import Cell, measure

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent


def example_tree(engine: Engine, prompt: Prompt, cell: Cell) -> list[str]:
    """Of the prompt's trees that branch, the one with the longest accepted path; no line where none does."""
    best: tuple[Tree, Sequence[int]] | None = None

    def watch(event: StreamEvent) -> None:
        nonlocal best
        if event.tree is None or len(set(event.tree.parent.tolist())) == event.tree.num_nodes:
            return
        if best is None or len(event.path) > len(best[1]):
            best = event.tree, event.path

    engine.trace_trees = True
    try:
        measure(engine, [prompt], cell, watch)
    finally:
        engine.trace_trees = False
    return draw(*best, lambda token: engine.tokenizer.decode([token], skip_special=False)) if best else []
