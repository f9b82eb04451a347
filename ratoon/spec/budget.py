# Owns: the budget policy: what a bucket costs, what it is expected to earn, and which one to run next.
# Promises: AR is always among the choices; every decision is counted.
# Never: imports torch, or sees a token.
"""Choosing the bucket on the host (METHOD section 4, first version).

Theta = expected committed tokens / expected milliseconds. A bucket is (block, nodes): (0, 0) is plain decoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Bucket = tuple[int, int]
PLAIN: Bucket = (0, 0)


@dataclass(frozen=True)
class Curve:
    """Milliseconds by size, measured at ascending sizes, straight between them and beyond the last pair."""

    sizes: tuple[int, ...]
    ms: tuple[float, ...]

    def at(self, size: float) -> float:
        if len(self.sizes) == 1:
            return self.ms[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.ms[right - 1 : right + 1]
        return y0 + (y1 - y0) * (max(size, x0) - x0) / (x1 - x0)


@dataclass(frozen=True)
class CostTable:
    """What the machine takes, measured at start-up: draft by rows x block, verify and commit by verify places."""

    draft: Mapping[int, Curve]
    verify: Curve

    def round_ms(self, rows: int, bucket: Bucket, place_ms: float = 0.0) -> float:
        """place_ms: what each place costs beyond an argmax, for sampled rows."""
        block, nodes = bucket
        places = rows * (nodes + 1)
        return (self.draft[block].at(rows) if block else 0.0) + self.verify.at(places) + places * place_ms


@dataclass
class _SeatForecast:
    mass: list[float]


@dataclass
class BudgetPolicy:
    """Picks (block, nodes) for the next round from moving averages of each seat's tree masses.

    `buckets` are the pairs whose mass a round reports, in that order: smaller blocks first. `scale` corrects the
    drafter's own probabilities by what was accepted; a probe drafts after `probe_every` plain rounds.
    """

    table: CostTable
    buckets: Sequence[Bucket]
    prior: Sequence[float]
    rate: float = 0.25
    hysteresis: float = 0.03
    probe_every: int = 16
    scale: float = 1.0
    decisions: Counter[Bucket] = field(default_factory=Counter)
    _seats: dict[int, _SeatForecast] = field(default_factory=dict)
    _last: Bucket = PLAIN
    _plain_rounds: int = 0

    def join(self, seat: int) -> None:
        """A new tenant: its forecast starts from the mean of the living ones, or the prior."""
        living = list(self._seats.values())
        mass = [sum(column) / len(living) for column in zip(*(s.mass for s in living), strict=True)] if living else None
        self._seats[seat] = _SeatForecast(mass or list(self.prior))

    def leave(self, seat: int) -> None:
        self._seats.pop(seat, None)

    def choose(self, seats: Sequence[int], place_ms: float = 0.0) -> Bucket:
        """The bucket of highest Theta; the last one is kept while within the hysteresis. place_ms: see `round_ms`."""
        theta = {PLAIN: len(seats) / self.table.round_ms(len(seats), PLAIN, place_ms)}
        for index, bucket in enumerate(self.buckets):
            earned = sum(1.0 + self.scale * self._seats[seat].mass[index] for seat in seats)
            theta[bucket] = earned / self.table.round_ms(len(seats), bucket, place_ms)
        best = max(theta, key=lambda bucket: theta[bucket])
        if theta.get(self._last, 0.0) >= theta[best] * (1 - self.hysteresis):
            best = self._last
        self._last = best
        return self._probe(best, theta)

    def _probe(self, best: Bucket, theta: Mapping[Bucket, float]) -> Bucket:
        self._plain_rounds = self._plain_rounds + 1 if best == PLAIN else 0
        if best == PLAIN and self.buckets and self._plain_rounds % self.probe_every == 0:
            best = max(self.buckets, key=lambda bucket: theta[bucket])
        self.decisions[best] += 1
        return best

    def observe(
        self, seat: int, bucket: Bucket, mass: Sequence[float], accepted: int, built: int | None = None
    ) -> None:
        """What a drafted round of a seat reported: masses of the buckets its block reaches, nodes accepted.

        built: most nodes that the round gave a row (None: enough for every bucket); no larger bucket's mass was seen.
        """
        forecast = self._seats.get(seat)
        if forecast is None or bucket == PLAIN:
            return
        block, _ = bucket
        before = dict(zip(self.buckets, forecast.mass, strict=True))
        seen = [other <= block and (built is None or nodes <= built) for other, nodes in self.buckets]
        for index in (index for index, known in enumerate(seen) if known):
            forecast.mass[index] += self.rate * (mass[index] - forecast.mass[index])
        if before.get(bucket):
            # What this block and tree cannot see is taken to rise and fall with what they can.
            change = forecast.mass[self.buckets.index(bucket)] / before[bucket]
            for index in (index for index, known in enumerate(seen) if not known):
                forecast.mass[index] *= change
        expected = mass[self.buckets.index(bucket)] if bucket in self.buckets else 0.0
        if expected > 0:
            # Slow: one round's accepted count is noise around its expectation.
            self.scale += 0.02 * (min(max(accepted / expected, 0.2), 3.0) - self.scale)
