# Owns: measuring what a bucket costs on this machine.
# Promises: runs on the dummy seat alone; median of a few runs after a warm-up.
# Never: decides.
"""The start-up cost tables of the budget policy (METHOD section 4, first version: short context)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.ops.tree import TreeBatch, no_trees, pack
from ratoon.runtime.runner import Runner
from ratoon.spec.budget import Bucket, CostTable, Curve
from ratoon.spec.round import Drafted, Round
from ratoon.spec.state import RoundShape

VERIFY_PLACES = (1, 4, 8, 16, 24, 32, 64)
DRAFT_ROWS = (1, 4)


def measure_costs(
    round_: Round, blocks: Sequence[int], nodes: int, device: torch.device, repeats: int = 3
) -> CostTable:
    """Milliseconds of draft + build by rows for each block, and of verify + accept + commit by places."""
    rows = [count for count in DRAFT_ROWS if count <= round_.limits.max_rows]
    places = [count for count in VERIFY_PLACES if count <= max(nodes + 1, 4)]
    with torch.inference_mode():
        # What is measured is no round of the engine's: its results are numbered by this counter.
        number = round_.state.round_number.clone()
        draft = {
            block: Curve(tuple(rows), tuple(_median_ms(_draft(round_, n, block, nodes), device, repeats) for n in rows))
            for block in blocks
        }
        verify = tuple(_median_ms(_verify(round_, count), device, repeats) for count in places)
        round_.state.round_number.copy_(number)
    return CostTable(draft, Curve(tuple(places), verify))


@dataclass(frozen=True)
class CapturedCosts(CostTable):
    """Milliseconds of the captured round that serves a bucket with a row count; infinite where none does, so that it
    is never chosen. One sampler kind's, so `place_ms` is in it already."""

    served: Mapping[tuple[int, Bucket], float]

    def round_ms(self, rows: int, bucket: Bucket, place_ms: float = 0.0) -> float:
        return self.served.get((rows, bucket), float("inf"))


def measure_rounds(runner: Runner, sampler: str, repeats: int = 3) -> CapturedCosts:
    """The costs of a runner's captured rounds, replayed on the dummy seat. Call with nothing in flight, or wait for it
    here."""
    number = runner.state.round_number.clone()
    ms = {shape: _replay_ms(runner, shape, repeats) for shape in runner.shapes if shape.sampler == sampler}
    with torch.inference_mode():
        runner.state.round_number.copy_(number)
    served: dict[tuple[int, Bucket], float] = {}
    for rows in range(1, runner.limits.max_rows + 1):
        for block, nodes in ((0, 0), *runner.limits.forecast):
            shape = runner.serving(RoundShape(rows, rows * (nodes + 1), block, nodes, sampler))
            # A longer block than the bucket's is its own bucket.
            if shape is not None and shape.block == block:
                served[rows, (block, nodes)] = ms[shape]
    return CapturedCosts({}, Curve((1,), (0.0,)), served)


def _replay_ms(runner: Runner, shape: RoundShape, repeats: int) -> float:
    def run() -> None:
        runner.fill((), shape)
        runner.replay(shape)

    return _median_ms(run, runner.device, repeats)


def measure_sampler(round_: Round, kind: str, device: torch.device, places: int = 4) -> float:
    """Milliseconds per place that a sampler kind costs beyond an argmax (on a CPU, milliseconds of noise)."""
    with torch.inference_mode():
        number = round_.state.round_number.clone()
        plain, sampled = (_median_ms(_verify(round_, places, sampler), device, 2) for sampler in ("argmax", kind))
        round_.state.round_number.copy_(number)
    return max(sampled - plain, 0.0) / places


def _median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[1:])


def _draft(round_: Round, rows: int, block: int, nodes: int) -> Callable[[], object]:
    seat_R = torch.zeros(rows, dtype=torch.int64, device=round_.state.start_S.device)
    shape = RoundShape(rows, rows * (nodes + 1), block, nodes, "argmax", live=True)
    return lambda: round_.draft_build(seat_R, shape)


def _verify(round_: Round, places: int, sampler: str = "argmax") -> Callable[[], object]:
    seat_R = torch.zeros(1, dtype=torch.int64, device=round_.state.start_S.device)
    nodes = places - 1
    block = round_.drafter.config.block_size if round_.drafter and nodes else 0
    shape = RoundShape(1, places, block, nodes, sampler, live=True)
    tree = _bush(nodes, seat_R) if nodes else no_trees(1, 0, seat_R.device)
    mass_RQ = torch.zeros(1, len(round_.limits.forecast), device=seat_R.device)
    drafted = Drafted(pack(tree, tree.num_nodes, seat_R, places), mass_RQ)

    def run() -> None:
        verified = round_.verify(seat_R, drafted.places, shape)
        round_.accept_commit(seat_R, drafted, verified, shape)

    return run


def _bush(nodes: int, like: Tensor) -> TreeBatch:
    """A two-deep bush: node 1 below the root, the others below node 1; its shape does not change the cost."""
    number = torch.arange(nodes, device=like.device).unsqueeze(0)
    first = number == 0
    return TreeBatch(
        token=number,
        parent=torch.where(first, 0, 1),
        depth=torch.where(first, 1, 2),
        rank=torch.zeros_like(number),
        score=torch.zeros_like(number, dtype=torch.float32),
        num_nodes=torch.full_like(like, nodes),
        depth_limit=2,
    )
