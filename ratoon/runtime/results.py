# Owns: the sizes of the result ring, and a round's result on the host.
# Promises: a whole round is unpacked in one go; a row gets its emitted tokens and no more.
# Never: decides anything about a request.
"""Round results. R: rows, D: path places, Q: forecast sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ratoon.ops.accept import ID_KINDS, REAL_KINDS, SCALARS
from ratoon.spec.state import Limits


class RowResult(NamedTuple):
    """One row of one round on the host. The tuples from `tokens` to `edge_gaps` hold one entry per emitted token."""

    accepted: int
    num_nodes: int
    done: bool
    bad: bool
    tokens: tuple[int, ...]
    runner_ups: tuple[int, ...]
    thirds: tuple[int, ...]
    edge_tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    top_logits: tuple[float, ...]
    third_gaps: tuple[float, ...]
    edge_gaps: tuple[float, ...]
    mass: tuple[float, ...]


assert SCALARS == ("number", "emitted", "accepted", "done", "bad", "num_nodes")
assert ID_KINDS == ("tokens", "runner_up", "third", "edge_token"), "RowResult's ids, in the device's order"
assert REAL_KINDS == ("gap", "top_logit", "third_gap", "edge_gap"), "RowResult's reals, in the device's order"


@dataclass(frozen=True)
class ResultLayout:
    """Columns of the ring (ops/accept.py `Ring`): int64 [places, rows, ints], float32 [places, rows, floats]."""

    places: int
    rows: int
    depth: int
    masses: int

    @classmethod
    def of(cls, limits: Limits) -> ResultLayout:
        return cls(limits.run_ahead + 1, limits.max_rows, limits.max_depth + 1, len(limits.forecast))

    @property
    def ints(self) -> int:
        return len(SCALARS) + len(ID_KINDS) * self.depth

    @property
    def floats(self) -> int:
        return len(REAL_KINDS) * self.depth + self.masses

    def unpack(self, ints: np.ndarray, floats: np.ndarray) -> list[RowResult]:
        """Every row of int64 [R, ints] and float32 [R, floats]. The tuples own their values."""
        rows, split = len(ints), len(REAL_KINDS) * self.depth
        scalars = ints[:, 1 : len(SCALARS)].tolist()
        # Most rounds emit few of the D tokens that a row may get; converting the rest would be most of the work.
        width = max((emitted for emitted, *_ in scalars), default=0)
        ids = ints[:, len(SCALARS) :].reshape(rows, len(ID_KINDS), self.depth)[:, :, :width].tolist()
        reals = floats[:, :split].reshape(rows, len(REAL_KINDS), self.depth)[:, :, :width].tolist()
        results = []
        for scalar, own_ids, own_reals, mass in zip(scalars, ids, reals, floats[:, split:].tolist(), strict=True):
            emitted, accepted, done, bad, num_nodes = scalar
            tokens, runner_ups, thirds, edge_tokens = [tuple(column[:emitted]) for column in own_ids]
            gaps, tops, third_gaps, edge_gaps = [tuple(column[:emitted]) for column in own_reals]
            flags, found = (accepted, num_nodes, bool(done), bool(bad)), (tokens, runner_ups, thirds, edge_tokens)
            results.append(RowResult(*flags, *found, gaps, tops, third_gaps, edge_gaps, tuple(mass)))
        return results
