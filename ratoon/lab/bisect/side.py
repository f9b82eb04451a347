# Owns: one engine in the middle of its requests: rounds one at a time, observed, from a state that can be set.
# Promises: rounds are the engine's own (admission, shape, launch, delivery); K/V beyond a live length is noise.
# Never: judges a round.
"""A side of a comparison. P: positions, L: layers, K, D: K/V heads, head dim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.observe import SCRATCH, Observation, listening
from ratoon.ops.launch import use_kernels
from ratoon.ops.tree import Places
from ratoon.runtime.buffers import NOISE
from ratoon.runtime.engine import Engine
from ratoon.runtime.rows import Row
from ratoon.runtime.runner import Launch
from ratoon.spec.state import RoundShape

WRONG_PAGES = "pages that are 0 or another row's"
CACHES = ("cache", "draft_cache")
_CARRIED = ("start_S", "anchor_S", "done_S")
_COUNTED = ("output_count_SV", "prompt_seen_SV")


@dataclass(frozen=True)
class Before:
    """What a round starts from: the tokens of each live row as the host knows them, its K/V per cache [L, P, 2, K, D],
    and how often each token was put out, int64 [S, V]."""

    tokens: tuple[tuple[int, ...], ...]
    kv: dict[str, tuple[Tensor, ...]]
    counts: Tensor


@dataclass(frozen=True)
class Stepped:
    """One observed round of the live rows. failure: why its results could not be delivered (a NaN)."""

    rows: tuple[Row, ...]
    before: Before
    emitted: tuple[tuple[int, ...], ...]
    shape: RoundShape
    places: Places
    seen: Observation
    failure: Exception | None


class Side:
    """An engine whose first `rows` prompts are seated and prefilled."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case, self.runner = engine, case, engine.runner
        rows = engine._intake.rows(list(case.prompts[: case.rows]), case.params)
        for row in rows:
            engine._loop.submit(row)
        with self._kernels():
            engine._loop.seat()
        self.rows = [row for row in rows if row.seat]
        assert len(self.rows) == len(rows), "an engine seats as many rows as its case has"
        self.runner.trace = True

    def close(self) -> None:
        self.engine.close()

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Two sides of one process may want different kernels."""
        use_kernels(self.case.kernels)  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            use_kernels("auto")

    @property
    def live(self) -> list[Row]:
        return [row for row in self.rows if row.finish_reason is None]

    def slots(self, row: Row, count: int) -> Tensor:
        """Slots of positions 0 .. count - 1, by the pages that the host gave the row."""
        size = self.runner.limits.page_size
        inside = torch.arange(size)
        return (torch.tensor(row.ticket.pages)[:, None] * size + inside).flatten()[:count].to(self.runner.device)

    def kv(self, name: str, row: Row, count: int) -> Tensor:
        """[L, count, 2, K, D] of a row's first positions."""
        return self.runner.table[name][:, self.slots(row, count)].clone()

    @property
    def caches(self) -> list[str]:
        return [name for name in CACHES if name in self.runner.table]

    # ---- equal states -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def adopt(self, other: Side) -> None:
        """Takes over the other side's rows: seat state and live K/V, by position."""
        for own, theirs in zip(self.rows, other.rows, strict=True):
            for name in _CARRIED:
                mine, given = getattr(self.runner.state, name), getattr(other.runner.state, name)
                mine[own.seat] = given[theirs.seat]
            for name in _COUNTED:
                mine, given = getattr(self.runner.state.sampler, name), getattr(other.runner.state.sampler, name)
                mine[own.seat] = given[theirs.seat]
            count = length(theirs)
            for name in set(self.caches) & set(other.caches):
                self.runner.table[name][:, self.slots(own, count)] = other.kv(name, theirs, count)

    @torch.inference_mode()
    def spoil(self) -> None:
        """Noise wherever no committed token's K/V lie: what a healthy round reads, it has written itself."""
        live = [self.slots(row, length(row)) for row in self.live]
        for name in self.caches:
            cache = self.runner.table[name]
            dead = torch.ones(cache.shape[1], dtype=torch.bool, device=cache.device)
            dead[: self.runner.limits.page_size] = False
            for slots in live:
                dead[slots] = False
            sign = torch.arange(cache.shape[1], device=cache.device) % 2 * 2 - 1
            for value in (1, -1):
                cache.masked_fill_((dead & (sign == value)).view(1, -1, 1, 1, 1), value * NOISE)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def step(self) -> Stepped:
        """One round of all live rows, delivered as the engine delivers it."""
        loop, rows, seen = self.engine._loop, tuple(self.live), Observation()
        before = self._before(rows)
        known = [len(row.tokens) for row in rows]
        with self._kernels(), listening(self.runner, seen):
            loop.launch()
            launch, _ = loop.in_flight[0]
            places = self.runner._traced[launch.number]
            failure = self._delivered()
        emitted = tuple(tuple(row.tokens[count:]) for row, count in zip(rows, known, strict=True))
        stepped = Stepped(rows, before, emitted, launch.shape, places, seen, failure)
        with torch.inference_mode():
            self._complete(stepped, launch)
        return stepped

    def _delivered(self) -> Exception | None:
        try:
            self.engine._loop.deliver()
        except RuntimeError as error:
            return error
        return None

    def _before(self, rows: tuple[Row, ...]) -> Before:
        tokens = tuple((*row.prompt, *row.tokens) for row in rows)
        kv = {name: tuple(self.kv(name, row, length(row)) for row in rows) for name in self.caches}
        return Before(tokens, kv, self.runner.state.sampler.output_count_SV.clone())

    def _complete(self, stepped: Stepped, launch: Launch) -> None:
        """Adds what a round leaves behind in buffers, in every mode, and cuts padding off."""
        seen, rows, places = stepped.seen, len(stepped.rows), stepped.places
        num_places = int(places.row_start[rows])
        for name in ("token", "parent", "depth", "local"):
            seen.add("build", name, getattr(places, name)[:num_places])
        words = min(places.bits.shape[1], -(-int(places.local[:num_places].max() + 1) // 64))
        seen.add("mask", "ancestor bits", places.bits[:num_places, :words])
        self._cut(stepped, num_places)
        if self.runner.mode != "eager":
            seen.add("verify", "hidden", self.runner.table["verify.hidden"][:num_places])
            if "verify.taps" in self.runner.table:
                seen.add("verify", "taps", self.runner.table["verify.taps"][:num_places])
        self._add_committed(stepped, num_places)

    def _cut(self, stepped: Stepped, num_places: int) -> None:
        seen, drafted = stepped.seen, len(stepped.rows) * stepped.shape.block
        for stage, count in (("mask", num_places), ("verify", num_places), ("accept", num_places), ("draft", drafted)):
            seen.trim(stage, count)
        if stepped.shape.block and self.runner.round.drafter is not None:
            drafts = len(stepped.rows) * self.runner.round.depths(stepped.shape.block)
            for key in [key for key in seen.values if key[0] == "build" and key[1].startswith("candidate")]:
                seen.values[key] = seen.values[key][:drafts]
            logits = seen.get("draft", "logits")
            if logits is not None:
                seen.add("draft", "logits", logits[:drafts])

    def _add_committed(self, stepped: Stepped, num_places: int) -> None:
        """Seat state after the round; K/V of the committed positions, and of the places that no commit moved."""
        seen, state, rows = stepped.seen, self.runner.state, stepped.rows
        seat_R = torch.tensor([row.seat for row in rows], device=self.runner.device)
        counts = torch.tensor([len(tokens) for tokens in stepped.emitted])
        seen.add("seat", WRONG_PAGES, torch.tensor([self._wrong_pages(row) for row in rows]))
        seen.add("accept", "number of tokens", counts)
        seen.add("accept", "tokens", torch.tensor([token for tokens in stepped.emitted for token in tokens]))
        for name in _CARRIED:
            seen.add("commit", name.removesuffix("_S"), getattr(state, name)[seat_R])
        for name in self.caches:
            after = [
                self.kv(name, row, len(tokens) - 1 + len(new))
                for row, tokens, new in zip(rows, stepped.before.tokens, stepped.emitted, strict=True)
            ]
            for layer in range(self.runner.table[name].shape[0]):
                seen.add("commit", f"keys and values of {name}", torch.cat([kv[layer] for kv in after]), layer)
        if len(rows) == 1:
            start, moved = len(stepped.before.tokens[0]) - 1, len(stepped.emitted[0])
            whole = self.kv("cache", rows[0], start + num_places)
            for layer in range(len(whole)):
                seen.add("verify", SCRATCH, whole[layer, start + moved :], layer)

    def _wrong_pages(self, row: Row) -> int:
        """How many entries of a row's page table the row may not write to, or are not what the host gave it."""
        table = self.runner.state.page_table_SP[row.seat][: len(row.ticket.pages)].tolist()
        taken = {0, *(page for other in self.rows if other is not row for page in other.ticket.pages)}
        return sum(page in taken or page != given for page, given in zip(table, row.ticket.pages, strict=True))

    def slot_of(self, stepped: Stepped, place: int) -> int | None:
        """The slot of entry `place` of a committed-K/V record, whose rows lie one behind the other."""
        for row, tokens, new in zip(stepped.rows, stepped.before.tokens, stepped.emitted, strict=True):
            count = len(tokens) - 1 + len(new)
            if place < count:
                return int(self.slots(row, count)[place])
            place -= count
        return None


def length(row: Row) -> int:
    """Positions of a row whose K/V are committed: all tokens but the anchor."""
    return len(row.prompt) + len(row.tokens) - 1
