# Owns: the draft tree as a value, and its picture in text.
# Promises: a Tree that exists is prefix-closed, parents before children.
# Never: scores, chooses or walks (spec/ddtree.py and ops/tree.py do).
"""One row's draft tree, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, eq=False)
class Tree:
    """n drafted nodes in pop order. Node 0 is the root (the anchor) and is not stored: column j is node j + 1.

    token, parent, depth, rank: int64 [n]; score: float32 [n], log of the path probability.
    parent is a node number (0 = root), depth starts at 1, rank at 0 (the most likely candidate).
    Raises ValueError where lengths differ, a parent does not come first, or a depth is not its parent's plus one.
    """

    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    rank: np.ndarray
    score: np.ndarray

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in vars(self).items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a tree's columns must have one length, got {lengths}")
        if np.any(self.parent < 0) or np.any(self.parent > np.arange(self.num_nodes)):
            raise ValueError("a tree's parents must come before their children (node 0 is the root)")
        if np.any(self.depth != np.append(0, self.depth)[self.parent] + 1):
            raise ValueError("a node's depth must be its parent's plus one")

    @property
    def num_nodes(self) -> int:
        """Drafted nodes; the root does not count."""
        return len(self.token)

    def children(self) -> list[list[int]]:
        """Node numbers of every node's children, in pop order; index 0 is the root."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parent.tolist(), start=1):
            children[parent].append(node)
        return children


def draw(tree: Tree, path: Sequence[int], decode_token: Callable[[int], str], root: str = "●") -> list[str]:
    """Lines of text that show the tree, the accepted path (node numbers, root included) in heavy strokes.

    A node with a single child shares its child's line, so a chain is one line; blanks are made visible.
    """
    children, accepted = tree.children(), set(path)
    labels = [root, *(_visible(decode_token(int(token))) for token in tree.token)]
    lines: list[str] = []
    # (first node of the line, strokes before its label, strokes before its descendants' labels)
    pending = [(0, "", "")]
    while pending:
        node, lead, indent = pending.pop()
        text = lead + labels[node]
        while len(children[node]) == 1:
            node = children[node][0]
            text += ("━" if node in accepted else "─") + labels[node]
        lines.append(text)
        branches = _branches(children[node], accepted)
        pending += [(child, indent + corner, indent + bar) for child, corner, bar in reversed(branches)]
    return lines


def _branches(siblings: Sequence[int], accepted: set[int]) -> list[tuple[int, str, str]]:
    """(node, corner, bar that goes on below it) of each sibling; at most one of them is accepted."""
    taken = next((place for place, node in enumerate(siblings) if node in accepted), -1)
    branches = []
    for place, node in enumerate(siblings):
        last = place == len(siblings) - 1
        if place < taken:
            branches.append((node, "┠─", "┃ "))
        elif place == taken:
            branches.append((node, "┗━" if last else "┡━", "  " if last else "│ "))
        else:
            branches.append((node, "└─" if last else "├─", "  " if last else "│ "))
    return branches


def _visible(text: str) -> str:
    shown = "".join(_VISIBLE.get(char, char if char.isprintable() else f"\\x{ord(char):02x}") for char in text)
    return shown or "∅"
