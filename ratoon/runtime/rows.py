# Owns: one request from its prompt to its output: tokens, text, stop strings, what each round reported.
# Promises: text and tokens end exactly at a stop, whatever a round brought beyond it; partial characters wait.
# Never: touches the device or another request.
"""Requests in the engine."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field
from typing import Any

from ratoon.core.request import FinishReason, RequestOutput, SamplerKind, SamplingParams
from ratoon.runtime.results import RowResult
from ratoon.runtime.scheduler import Ticket
from ratoon.runtime.text import Detokenizer, Tokenizer

_PER_TOKEN = slice(RowResult._fields.index("runner_ups"), RowResult._fields.index("mass"))
"""What a round tells of each token; the names are RequestOutput's too."""


@dataclass
class Row:
    """A request's life. `text` is what `decode` has made so far; `streams`: somebody reads it as it comes.

    `ticket` is how the scheduler knows it: limit, priority and deadline are the ticket's. The seed is drawn once, so
    that a row that yields its place goes on with the same text.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    budget: int
    topk_cap: int
    is_auto: bool
    tokenizer: Tokenizer | None
    submitted: float
    limit: InitVar[int]
    priority: InitVar[int] = 0
    deadline: InitVar[float] = float("inf")
    streams: bool = True
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    kind: SamplerKind = field(init=False)
    seed: int = field(init=False)
    ticket: Ticket = field(init=False)
    _detokenizer: Detokenizer | None = field(init=False)
    _accepted: list[int] = field(default_factory=list)
    _columns: list[list] = field(default_factory=lambda: [[] for _ in RowResult._fields[_PER_TOKEN]])
    _decoded: int = 0
    _searched: int = 0
    _sent: int = 0
    _first: float = 0.0
    _last: float = 0.0

    def __post_init__(self, limit: int, priority: int, deadline: float) -> None:
        self.kind, self.seed = self.params.sampler_kind, self.params.seed_or_fresh()
        self.ticket = Ticket(0, self.prompt, limit, self.tokens, priority, deadline)
        self._detokenizer = Detokenizer(self.tokenizer) if self.tokenizer else None

    @property
    def seat(self) -> int:
        """Where it sits; 0 while it waits."""
        return self.ticket.seat

    def take(self, result: RowResult) -> list[int]:
        """Adds a round's tokens up to the first stop; returns those added. A finished row takes nothing."""
        if self.finish_reason is not None or not (result.tokens or result.done):
            return []
        self._last = time.perf_counter()
        self._first = self._first or self._last
        before = len(self.tokens)
        if self.params.stop:
            self._take_up_to_a_stop(result.tokens)
        else:
            self.tokens += result.tokens
        added = len(self.tokens) - before
        if added:
            # What a stop string cut off was neither emitted nor accepted.
            self._accepted.append(min(result.accepted, added - 1))
            # Not the results themselves: kept objects are what Python's collector stops the rounds to look through.
            told: Any = result[_PER_TOKEN]
            for column, values in zip(self._columns, told, strict=True):
                column += values
        if self.finish_reason is None and result.done:
            stopped = bool(self.tokens) and self.tokens[-1] in self.stop_ids
            self._finish("stop" if stopped else "length")
        return self.tokens[before:]

    def _take_up_to_a_stop(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.decode()
            if self._cut_at_stop_string():
                break

    def decode(self) -> str:
        """Text of all tokens so far, without a character whose last byte has not come. Only text that somebody reads
        is made before the end."""
        if self._detokenizer and self._decoded < len(self.tokens):
            self.text += self._detokenizer.put(self.tokens[self._decoded :])
            self._decoded = len(self.tokens)
        return self.text

    def _cut_at_stop_string(self) -> bool:
        # Earlier text holds none, so a new one ends in what came last.
        begin = max(self._searched - max(map(len, self.params.stop), default=0) + 1, 0)
        hits = [at for at in (self.text.find(stop, begin) for stop in self.params.stop) if at >= 0]
        self._searched = len(self.text)
        if not hits:
            return False
        self.text = self.text[: min(hits)]
        self.finish_reason = "stop"
        return True

    def _finish(self, reason: FinishReason) -> None:
        self._finish_text()
        self._cut_at_stop_string()
        self.finish_reason = self.finish_reason or reason

    def abort(self) -> None:
        """Ends the request where it is."""
        if self.finish_reason is None:
            self._finish_text()
            self.finish_reason = "abort"

    def _finish_text(self) -> None:
        self.decode()
        if self._detokenizer:
            self.text += self._detokenizer.finish()

    def new_text(self) -> str:
        """Text that can no longer change: all of it once finished, else without what may begin a stop string."""
        end = len(self.text)
        if self.finish_reason is None:
            end = len(self.decode())
            end -= max((_overlap(self.text, stop) for stop in self.params.stop), default=0)
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return new

    def output(self) -> RequestOutput:
        """Everything about the finished request."""
        assert self.finish_reason is not None, "the request is not finished"
        kept = len(self.tokens)
        names = RowResult._fields[_PER_TOKEN]
        columns: dict[str, Any] = {
            name: tuple(column[:kept]) for name, column in zip(names, self._columns, strict=True)
        }
        return RequestOutput(
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.tokens),
            text=self.text,
            finish_reason=self.finish_reason,
            rounds=len(self._accepted),
            accepted=tuple(self._accepted),
            ttft_s=max(self._first - self.submitted, 0.0),
            decode_s=self._last - self._first,
            **columns,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
