# Owns: running rounds: the four modes over one Round, seat writes, the result ring.
# Promises: every mode calls the same stage functions; padding is the dummy seat; results are read in launch order.
# Never: knows a request's text, or chooses a bucket.
"""Runs rounds for the engine. R: rows, T: places."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ratoon.core.request import SamplerKind, SamplingParams
from ratoon.core.tree import Tree
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.ops.sample import write_seat
from ratoon.ops.tree import Places
from ratoon.runtime.emulator import EmulatorBackend
from ratoon.runtime.graphs import CudaBackend, GraphKey, GraphSet, capture_order, teardown
from ratoon.runtime.kv import declare, seat_state
from ratoon.runtime.results import ResultLayout, RowResult
from ratoon.spec.round import Drafted, Round, Verified
from ratoon.spec.state import Limits, RoundShape

Mode = Literal["eager", "static", "graph", "staged"]


@dataclass(frozen=True)
class Launch:
    """A round in flight: its number, its seats, the bucket it ran."""

    number: int
    seats: tuple[int, ...]
    shape: RoundShape


class Runner:
    """One engine's device side. Not thread-safe."""

    def __init__(
        self,
        target: Decoder,
        drafter: DFlash | None,
        limits: Limits,
        device: torch.device,
        mode: Mode,
        debug: bool = False,
    ) -> None:
        self.limits, self.device, self.mode = limits, device, mode
        dtype = target.embed.weight.dtype
        self.table = declare(limits, target.config, drafter.config if drafter else None, dtype, device)
        self.state = seat_state(self.table)
        draft_cache = self.table["draft_cache"] if drafter else None
        self.round = Round(target, drafter, self.state, self.table["cache"], draft_cache, limits)
        self.layout = ResultLayout.of(limits)
        self.stage_ms: Counter[str] = Counter()
        self._stages = (self._stage_draft, self._stage_verify, self._stage_accept)
        self._traced: dict[int, Places] = {}
        self.graphs: GraphSet | None = None
        if mode in ("graph", "staged"):
            for name, net in (("target", target), ("drafter", drafter)):
                if net is not None:
                    self.table.bind_module(name, net)
            backend = CudaBackend(device) if device.type == "cuda" else EmulatorBackend()
            self.graphs = GraphSet(self.table, backend, debug=debug)
        self.shapes: tuple[RoundShape, ...] = ()
        self._generation = self.table.generation
        self.fallbacks: Counter[str] = Counter()
        self.trace = False
        self.num_launched = 0

    # ---- seats ------------------------------------------------------------------------------------------------

    def join(
        self, seat: int, prompt: Sequence[int], pages: Sequence[int], params: SamplingParams, stop_ids: Sequence[int],
        seed: int, limit: int, budget: int, topk_cap: int,
    ) -> None:  # fmt: skip
        """Writes a new tenant over all of a seat's state; the row starts at its last prompt token."""
        assert 0 < seat < self.limits.num_seats, f"seat {seat} is not allocatable"
        state, table_P = self.state, torch.zeros(self.limits.pages_per_row, dtype=torch.int32)
        table_P[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        state.page_table_SP[seat] = table_P.to(self.device)
        state.start_S[seat] = len(prompt) - 1
        state.anchor_S[seat] = prompt[-1]
        state.limit_S[seat] = limit
        state.budget_S[seat] = budget
        state.topk_cap_S[seat] = topk_cap
        state.stop_id_SE[seat] = -1
        state.stop_id_SE[seat, : len(stop_ids)] = torch.tensor(list(stop_ids), dtype=torch.int64, device=self.device)
        write_seat(state.sampler, seat, params, torch.tensor(list(prompt), dtype=torch.int64), seed)
        state.done_S[seat] = False

    def stop(self, seat: int) -> None:
        """Marks a seat done: rounds launched from now on commit nothing for it."""
        self.state.done_S[seat] = True

    def prefill(self, seat: int, prompt: Sequence[int], begin: int, end: int) -> None:
        """K/V of prompt tokens begin .. end - 1 of a seat, target and draft context, in exact sizes."""
        if end <= begin:
            return
        seat_R, base_R = self._ids([seat]), self._ids([begin])
        with torch.inference_mode():
            self.round.prefill(seat_R, self._ids(prompt[begin:end])[None], base_R, end)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def launch(self, seats: Sequence[int], shape: RoundShape) -> Launch:
        """Runs (or queues) one round for these seats; `read` gives its results."""
        with torch.inference_mode():
            if self.mode == "eager":
                self._eager(self._ids(seats), shape)
            else:
                self._padded(seats, shape)
        launch = Launch(self.num_launched, tuple(seats), shape)
        self.num_launched += 1
        return launch

    def _eager(self, seat_R: Tensor, shape: RoundShape) -> None:
        begun = time.perf_counter()
        drafted = self.round.draft_build(seat_R, shape)
        built = time.perf_counter()
        verified = self.round.verify(seat_R, drafted.places, shape)
        seen = time.perf_counter()
        self._accept(seat_R, drafted, verified, shape)
        if self.device.type == "cpu":
            # On a GPU the host runs ahead of the work, so these would be no stage times.
            spent = (built - begun, seen - built, time.perf_counter() - seen)
            for stage, seconds in zip(("draft_build", "verify", "accept_commit"), spent, strict=True):
                self.stage_ms[f"ms_{stage}"] += 1e3 * seconds  # pyright: ignore[reportArgumentType]
        self._trace(drafted.places)

    def _trace(self, places: Places) -> None:
        if self.trace:
            copies = {field.name: getattr(places, field.name).clone().cpu() for field in fields(Places)}
            self._traced[self.num_launched] = Places(**copies)

    def _padded(self, seats: Sequence[int], shape: RoundShape) -> None:
        self.fill(seats, shape)
        key = self.key_of(shape)
        if self.graphs is None or shape not in self.shapes:
            self.run_stages(shape)
        else:
            for part in key.staged() if self.mode == "staged" else (key,):
                self.graphs.replay(part)
        self._trace(self._drafted(shape).places)

    def fill(self, seats: Sequence[int], shape: RoundShape) -> None:
        """Writes the round's one host input: the list of seats, padded with the dummy."""
        inputs: dict[str, Tensor | None] = {"round.seat": torch.tensor(list(seats), dtype=torch.int64)}
        if self.graphs is None:
            self.table.fill(inputs, key=self.key_of(shape), mode="static")
        else:
            self.graphs.fill(self.key_of(shape), inputs, mode=self.mode)

    def run_stages(self, shape: RoundShape) -> None:
        """The padded round without a graph (static mode)."""
        with torch.inference_mode():
            for stage in self._stages:
                stage(shape)

    # ---- graphs -----------------------------------------------------------------------------------------------

    def key_of(self, shape: RoundShape) -> GraphKey:
        """The graph key of a padded shape."""
        sampler: SamplerKind = shape.sampler  # pyright: ignore[reportAssignmentType]
        return GraphKey(shape.rows, shape.places, shape.block, sampler, self._generation, nodes=shape.nodes)

    def capture(self, shapes: Iterable[RoundShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Opens padded shapes. In graph and staged mode each is captured, largest first: one graph, or three."""
        self._generation = self.table.generation
        by_key = {self.key_of(shape): shape for shape in shapes}
        order = capture_order(by_key)
        self.shapes = tuple(by_key[key] for key in reversed(order))
        if self.graphs is None:
            return
        for shape in self.shapes:
            for name, constant in self.round.constants(shape).items():
                if name not in self.table:
                    self.table.bind(name, constant)
        for number, key in enumerate(order):
            self._capture_one(self.graphs, key, by_key[key])
            if progress:
                progress(number + 1, len(order))

    def _capture_one(self, graphs: GraphSet, key: GraphKey, shape: RoundShape) -> None:
        if self.mode == "graph":
            graphs.capture(key, partial(self.run_stages, shape))
            return
        for part, stage in zip(key.staged(), self._stages, strict=True):
            graphs.capture(
                part, partial(stage, shape), outputs=self.table.names("output") if part.kind == "accept" else ()
            )

    def fit(self, shape: RoundShape) -> RoundShape:
        """The shape that this mode runs: live as it is in eager mode, else the smallest open one that holds it.

        Where none holds it, a padded shape of its own runs without a graph and is counted as a fall-back.
        """
        if self.mode == "eager":
            return replace(shape, live=True)
        sampler = "argmax" if shape.sampler == "argmax" else "general"
        for ready in self.shapes:
            spare_rows = ready.rows - shape.rows
            if (
                spare_rows >= 0
                and ready.places - spare_rows >= shape.places
                and (ready.sampler, ready.block) == (sampler, shape.block)
            ):
                return ready
        self.fallbacks["fallback_no_graph"] += self.graphs is not None
        return RoundShape(
            shape.rows, shape.places, shape.block, min(self.limits.max_nodes, shape.places - shape.rows), sampler
        )

    def _stage_draft(self, shape: RoundShape) -> None:
        drafted = self.round.draft_build(self._seats(shape), shape)
        for field in fields(Places):
            value = getattr(drafted.places, field.name)
            self._part(f"places.{field.name}", value.shape).copy_(value)
        if self.limits.forecast:
            self._part("draft.mass", drafted.mass_RQ.shape).copy_(drafted.mass_RQ)

    def _stage_verify(self, shape: RoundShape) -> None:
        verified = self.round.verify(self._seats(shape), self._drafted(shape).places, shape)
        self._part("verify.hidden", verified.hidden_TH.shape).copy_(verified.hidden_TH)
        if verified.taps_TX is not None:
            self._part("verify.taps", verified.taps_TX.shape).copy_(verified.taps_TX)

    def _stage_accept(self, shape: RoundShape) -> None:
        taps = self.table["verify.taps"][: shape.places] if self.round.drafter else None
        verified = Verified(self.table["verify.hidden"][: shape.places], taps)
        self._accept(self._seats(shape), self._drafted(shape), verified, shape)

    def _accept(self, seat_R: Tensor, drafted: Drafted, verified: Verified, shape: RoundShape) -> None:
        """The round's last stage, then its results into place `round number mod places` of the ring."""
        number = self.state.round_number.clone()
        result = self.round.accept_commit(seat_R, drafted.places, verified, shape)
        row_start = drafted.places.row_start
        num_nodes_R = row_start[1 : shape.rows + 1] - row_start[: shape.rows] - 1
        ints, floats = self.layout.pack(result, num_nodes_R, drafted.mass_RQ, number)
        place = number % self.layout.places
        self.table["result.ints"].index_copy_(0, place, ints.unsqueeze(0))
        self.table["result.floats"].index_copy_(0, place, floats.unsqueeze(0))

    def _seats(self, shape: RoundShape) -> Tensor:
        return self.table["round.seat"][: shape.rows]

    def _drafted(self, shape: RoundShape) -> Drafted:
        """The hand-over of build, as views of the declared buffers."""
        words = shape.nodes // 64 + 1
        places = Places(
            **{
                name: self.table[f"places.{name}"][: shape.places]
                for name in ("token", "row_of", "parent", "depth", "local")
            },
            row_start=self.table["places.row_start"][: shape.rows + 2],
            bits=self.table["places.bits"][: shape.places, :words],
        )
        if not self.limits.forecast:
            return Drafted(places, self.table["verify.hidden"].new_zeros((shape.rows, 0), dtype=torch.float32))
        return Drafted(places, self.table["draft.mass"][: shape.rows])

    def _part(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.table[name][tuple(slice(0, size) for size in shape)]

    # ---- results ----------------------------------------------------------------------------------------------

    def trees(self, launch: Launch) -> dict[int, tuple[Tree, tuple[int, ...]]]:
        """Draft tree and accepted path of each seat of a round that was launched while `trace` was set."""
        places = self._traced.pop(launch.number, None)
        if places is None:
            return {}
        results = self.read(launch)
        return {seat: _row_tree(places, row, results[row].tokens) for row, seat in enumerate(launch.seats)}

    def close(self) -> None:
        """Frees graphs, then caches."""
        self._traced.clear()
        if self.graphs is not None:
            teardown([self.graphs])

    def settle(self) -> None:
        """Call with nothing in flight. A round that Ctrl-C cut off may have run on the device and not been counted."""
        self._traced.clear()
        self.state.round_number.fill_(self.num_launched)

    def read(self, launch: Launch) -> list[RowResult]:
        """Results of a launched round, one per seat; waits for it. Each round is read once, oldest first."""
        place = launch.number % self.layout.places
        ints = self.table["result.ints"][place].cpu().numpy()
        floats = self.table["result.floats"][place].cpu().numpy()
        assert launch.number == ints[0, 0], f"result place {place} holds round {ints[0, 0]}, not {launch.number}"
        return [self.layout.unpack(ints[row], floats[row]) for row in range(len(launch.seats))]


def _row_tree(places: Places, row: int, tokens: Sequence[int]) -> tuple[Tree, tuple[int, ...]]:
    """One row's tree on the host (ranks and scores are not kept) and the nodes that `tokens` followed, root first."""
    begin, end = places.row_start[row : row + 2].tolist()
    token, depth = places.token[begin + 1 : end].numpy(), places.depth[begin + 1 : end].numpy()
    parent = places.parent[begin + 1 : end].numpy() - begin
    tree = Tree(token, parent, depth, np.zeros_like(token), np.zeros(len(token), dtype=np.float32))
    path = [0]
    for drawn in tokens:
        child = [node for node in range(1, len(token) + 1) if parent[node - 1] == path[-1] and token[node - 1] == drawn]
        if not child:
            break
        path += child
    return tree, tuple(path)
