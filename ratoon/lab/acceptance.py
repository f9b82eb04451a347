# Owns: tau and acceptance over outputs, whole or cut where figures must not count (definitions: METHOD.md section 5).
# Promises: a cut counts whole rounds up to the one that wrote the last kept token, and that token as the last.
# Never: runs an engine; guesses where an output does not say.
"""Acceptance of finished outputs: tau, tau before stop strings, tau before repetition, shares per position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from ratoon.core.request import RequestOutput

GRAM = 8


def accept_per_position(outputs: Sequence[RequestOutput]) -> list[float]:
    """Share of all rounds whose accepted path reaches depth 1, 2, ... (unconditional)."""
    accepted = [count for output in outputs for count in output.accepted]
    deepest = max(accepted, default=0)
    return [round(sum(a >= depth for a in accepted) / len(accepted), 4) for depth in range(1, deepest + 1)]


def tau(outputs: Sequence[RequestOutput], kept: Iterable[int] | None = None) -> float | None:
    """Emitted tokens per row and round, of each output only the first `kept` tokens; None where there is no round."""
    lengths = [len(output.token_ids) for output in outputs] if kept is None else list(kept)
    rounds = sum(rounds_of(output, length) for output, length in zip(outputs, lengths, strict=True))
    return round(sum(lengths) / rounds, 3) if rounds else None


def rounds_of(output: RequestOutput, length: int) -> int:
    """Rounds until `length` tokens were there."""
    if length >= len(output.token_ids):
        return output.rounds
    ends = accumulate(accepted + 1 for accepted in output.accepted)
    return 1 + sum(end < length for end in ends) if length else 0


def until_stop(output: RequestOutput, stops: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """Tokens until the text holds one of `stops`, the token that completes it included, as the engine would cut."""
    ids = list(output.token_ids)

    def stopped(length: int) -> bool:
        text = decode(ids[:length])
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(ids)):
        return len(ids)
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return high


def until_repeat(output: RequestOutput) -> int:
    """Tokens before the first that ends a run of 8 which the answer held already: from there on a loop inflates tau."""
    seen: set[tuple[int, ...]] = set()
    for end in range(GRAM, len(output.token_ids) + 1):
        gram = output.token_ids[end - GRAM : end]
        if gram in seen:
            return end - 1
        seen.add(gram)
    return len(output.token_ids)
