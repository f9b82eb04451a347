# Owns: the shape of the next round: what its rows' budgets ask for, or what the policy chooses.
# Promises: a fixed budget is never shared away; costs are measured once, when the first automatic row needs them.
# Never: launches a round of the engine's.
"""Choosing the next round's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ratoon.core.request import batch_sampler_kind
from ratoon.runtime.costs import measure_costs, measure_rounds, measure_sampler
from ratoon.runtime.results import RowResult
from ratoon.runtime.rows import Row
from ratoon.runtime.runner import Runner
from ratoon.spec.budget import PLAIN, BudgetPolicy, CostTable
from ratoon.spec.state import RoundShape


class Chooser:
    """Shapes of one runner's rounds. `counts` holds how often each bucket was chosen."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._limits = runner, runner.limits
        self.policy: BudgetPolicy | None = None
        self.counts: Counter[str] = Counter()
        self._place_ms: dict[str, float] = {"argmax": 0.0}
        self._tables: dict[str, CostTable] = {}

    def prepare(self) -> None:
        """Measures a GPU's rounds at start-up, where the first automatic request would wait for it."""
        if self._runner.device.type == "cuda":
            self._policy_of()

    def join(self, row: Row) -> None:
        if row.is_auto:
            self._policy_of().join(row.seat)

    def leave(self, seat: int) -> None:
        if self.policy:
            self.policy.leave(seat)

    def shape(self, live: Sequence[Row]) -> RoundShape:
        """The next round's shape, for all of these rows."""
        kind = batch_sampler_kind({row.kind for row in live})
        fixed = [row.budget for row in live if not row.is_auto]
        most = max(fixed, default=0)
        block, nodes, places = self._limits.max_block if most else 0, most, sum(fixed) + len(fixed)
        auto = [row.seat for row in live if row.is_auto]
        if auto:
            bucket = self._choose(auto, kind)
            self.counts[f"bucket_{bucket[0]}x{bucket[1]}"] += 1
            block, places = max(block, bucket[0]), places + len(auto) * (bucket[1] + 1)
            # A live round builds for the largest bucket, so that its mass is known; a captured one is as it is.
            built = self._policy_nodes() if bucket != PLAIN and self._runner.mode == "eager" else bucket[1]
            nodes = max(nodes, built)
            if fixed:
                # A fixed budget is a promise: with enough places for every row, none is shared away.
                nodes = max(most, bucket[1])
                places = len(live) * (nodes + 1)
        return self._runner.fit(RoundShape(len(live), places, block, nodes, kind))

    def observe(self, row: Row, shape: RoundShape, result: RowResult) -> None:
        """What a drafted round told of an automatic row."""
        if row.is_auto and shape.block:
            bucket = (shape.block, shape.places // shape.rows - 1)
            self._policy_of().observe(row.seat, bucket, result.mass, result.accepted, shape.nodes)

    def _choose(self, seats: list[int], kind: str) -> tuple[int, int]:
        policy = self._policy_of()
        if self._tables:
            policy.table = self._tables["argmax" if kind == "argmax" else "general"]
            return policy.choose(seats)
        return policy.choose(seats, self._sampler_ms(kind))

    def _policy_nodes(self) -> int:
        return max(nodes for _, nodes in self._limits.forecast)

    def _sampler_ms(self, kind: str) -> float:
        """Cost per place of a sampler kind beyond an argmax, measured when it first comes."""
        if kind not in self._place_ms:
            self._place_ms[kind] = measure_sampler(self._runner.round, kind, self._runner.device)
        return self._place_ms[kind]

    def _policy_of(self) -> BudgetPolicy:
        if self.policy is None:
            buckets = self._limits.forecast
            # Optimistic, so that the first rounds draft and tell.
            prior = [min(nodes, block - 1) * 0.5 for block, nodes in buckets]
            self.policy = BudgetPolicy(self._measured(), buckets, prior)
        return self.policy

    def _measured(self) -> CostTable:
        """Costs: of the captured rounds on a GPU, where launches without a graph would be all that is measured."""
        runner = self._runner
        if runner.device.type == "cuda" and runner.graphs is not None:
            self._tables = {kind: measure_rounds(runner, kind) for kind in ("argmax", "general")}
            return self._tables["argmax"]
        blocks = sorted({block for block, _ in self._limits.forecast})
        return measure_costs(runner.round, blocks, self._policy_nodes(), runner.device)
