# Owns: what the device knows of every seat, and the numbers that size an engine.
# Promises: seat 0 is the dummy: done, at position 0, on page 0; commit alone moves start, anchor and done.
# Never: allocates (runtime/buffers.py does), or holds a token's text.
"""State of the round. S: seats (max_rows + 1), P: pages of a row, E: stop ids."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ratoon.core.request import MAX_STOP_TOKEN_IDS
from ratoon.ops.sample import SamplerState

STOP_IDS = 2 * MAX_STOP_TOKEN_IDS


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine, fixed at start. `max_model_len` counts prompt and output tokens of one row.

    `forecast` lists the (block, nodes) pairs at which a round reports its trees' probability mass. `edges`: plain
    rounds report the nearest filter edge of every draw, which judging a near-tie of sampled text needs.
    """

    max_rows: int
    max_nodes: int
    max_block: int
    max_depth: int
    max_ranks: int
    max_model_len: int
    page_size: int
    num_pages: int
    run_ahead: int = 0
    forecast: tuple[tuple[int, int], ...] = ()
    sample_group: int = 16
    edges: bool = True

    @property
    def num_seats(self) -> int:
        return self.max_rows + 1

    @property
    def scratch(self) -> int:
        """Slots that a round may write from `start` on: a tree's nodes and root, or a draft block."""
        return max(self.max_nodes + 1, self.max_block, 1)

    @property
    def pages_per_row(self) -> int:
        return -(-(self.max_model_len + self.scratch) // self.page_size)

    @property
    def context(self) -> int:
        """Most slots that one row's attention reads."""
        return self.pages_per_row * self.page_size


@dataclass(frozen=True)
class SeatState:
    """Seat-indexed device tensors, role state.

    start, anchor, limit int64 [S]: tokens 0..start are committed, number `start` is the anchor, no token past
    number limit - 1 is emitted. done bool [S]. budget, topk_cap int64 [S] (cap 0: all ranks). stop_id int64
    [S, E], -1 pads. page_table int32 [S, P], 0 pads. round_number int64 [1] counts launched rounds.
    attend_counters int32 [NUM_COUNTERS] are zero between the kernels that use them.
    """

    start_S: Tensor
    anchor_S: Tensor
    limit_S: Tensor
    done_S: Tensor
    budget_S: Tensor
    topk_cap_S: Tensor
    stop_id_SE: Tensor
    page_table_SP: Tensor
    round_number: Tensor
    attend_counters: Tensor
    sampler: SamplerState


@dataclass(frozen=True)
class RoundShape:
    """The host's whole influence on a round: rows, verify places (all rows' roots and nodes), block (0: no draft),
    nodes (most per row), sampler kind. `live` rounds ask the device for tighter sizes (eager mode)."""

    rows: int
    places: int
    block: int
    nodes: int
    sampler: str
    live: bool = False
