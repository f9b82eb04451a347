# Owns: the result ring: what a round hands to the host, packed on the device and unpacked here.
# Promises: one place per round in flight; a result is read once its round has run, before its place is used again.
# Never: decides anything about a request.
"""Round results. R: rows, D: path places, Q: forecast sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.spec.round import RoundResult
from ratoon.spec.state import Limits

_SCALARS = ("emitted", "accepted", "done", "bad", "num_nodes")


@dataclass(frozen=True)
class RowResult:
    """One row of one round on the host; the arrays hold the emitted tokens only."""

    tokens: tuple[int, ...]
    accepted: int
    num_nodes: int
    done: bool
    bad: bool
    runner_ups: tuple[int, ...]
    edge_tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    top_logits: tuple[float, ...]
    edge_gaps: tuple[float, ...]
    mass: tuple[float, ...]


@dataclass(frozen=True)
class ResultLayout:
    """Columns of the two packed tensors: int64 [places, rows, ints], float32 [places, rows, floats]."""

    places: int
    rows: int
    depth: int
    masses: int

    @classmethod
    def of(cls, limits: Limits) -> ResultLayout:
        return cls(limits.run_ahead + 1, limits.max_rows, limits.max_depth + 1, len(limits.forecast))

    @property
    def ints(self) -> int:
        return 1 + len(_SCALARS) + 3 * self.depth

    @property
    def floats(self) -> int:
        return 3 * self.depth + self.masses

    def pack(self, result: RoundResult, num_nodes_R: Tensor, mass_RQ: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [rows, ints] and float32 [rows, floats]; rows past the round's are zero. number int64 [1]."""
        scalars = (
            number.expand_as(result.emitted_R),
            result.emitted_R,
            result.accepted_R,
            result.done_R.to(torch.int64),
            result.bad_R.to(torch.int64),
            num_nodes_R,
        )
        ids = torch.stack((result.tokens_RD, result.runner_up_RD, result.edge_token_RD), dim=1)
        reals = torch.stack((result.gap_RD, result.top_logit_RD, result.edge_gap_RD), dim=1)
        spare_rows, spare_depth = self.rows - ids.shape[0], self.depth - ids.shape[2]
        pad = torch.nn.functional.pad
        ints = torch.cat((torch.stack(scalars, dim=1), pad(ids, (0, spare_depth)).flatten(1)), dim=1)
        floats = torch.cat((pad(reals, (0, spare_depth)).flatten(1), mass_RQ), dim=1)
        return pad(ints, (0, 0, 0, spare_rows)), pad(floats, (0, 0, 0, spare_rows))

    def unpack(self, ints: np.ndarray, floats: np.ndarray) -> RowResult:
        """One row of both tensors."""
        _, emitted, accepted, done, bad, num_nodes = ints[: 1 + len(_SCALARS)].tolist()
        ids = ints[1 + len(_SCALARS) :].reshape(3, self.depth)[:, :emitted].tolist()
        reals = floats[: 3 * self.depth].reshape(3, self.depth)[:, :emitted].tolist()
        return RowResult(
            tokens=tuple(ids[0]),
            accepted=accepted,
            num_nodes=num_nodes,
            done=bool(done),
            bad=bool(bad),
            runner_ups=tuple(ids[1]),
            edge_tokens=tuple(ids[2]),
            gaps=tuple(reals[0]),
            top_logits=tuple(reals[1]),
            edge_gaps=tuple(reals[2]),
            mass=tuple(floats[3 * self.depth :].tolist()),
        )
