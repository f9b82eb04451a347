# Owns: how a prompt is cut into chunks for prefill graphs.
# Promises: every position is covered; no chunk reaches past the context; surplus places lie behind the prompt's part.
# Never: touches a tensor.
"""Chunks of a prompt for graphs of kind 'prefill': one row per replay, a few fixed sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CHUNKS = (128, 512, 2048)
EXACT_CHUNK = 512
"""Places at a time where prefill runs in exact sizes, without a graph."""

_MOST_WASTE = 1.5


@dataclass(frozen=True)
class Chunk:
    """Positions base .. end - 1 of a prompt in a graph of `size` places, of which the last ones may be surplus."""

    base: int
    end: int
    size: int


def chunk_sizes(max_model_len: int, context: int) -> tuple[int, ...]:
    """The sizes worth a graph: no larger than the longest prompt needs, and no larger than the context."""
    needed = [size for i, size in enumerate(CHUNKS) if i == 0 or CHUNKS[i - 1] < max_model_len - 1]
    return tuple(size for size in needed if size <= context)


def chunks(begin: int, end: int, sizes: tuple[int, ...], context: int) -> Iterator[Chunk]:
    """Cuts positions begin .. end - 1. sizes ascend and are at most `context`.

    A chunk that would reach past the context starts earlier and computes some positions once more: the same tokens at
    the same positions give the same K/V.
    """
    while begin < end:
        size = _size(end - begin, sizes)
        base = min(begin, context - size)
        stop = min(end, base + size)
        yield Chunk(base, stop, size)
        begin = stop


def _size(rest: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds the rest, unless much of it would be surplus: then the largest that is filled."""
    holding = next((size for size in sizes if size >= rest), None)
    filled = max((size for size in sizes if size <= rest), default=None)
    if holding is None or (filled is not None and holding > _MOST_WASTE * rest):
        assert filled is not None
        return filled
    return holding
