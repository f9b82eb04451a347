# Owns: running rounds: the four modes over one Round, seat writes, prefill.
# Promises: every mode calls the same stage functions; padding is the dummy seat; results are read in launch order.
# Never: knows a request's text, or chooses a bucket.
"""Runs rounds for the engine. R: rows, T: places."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ratoon.ops.accept import Ring
from ratoon.ops.launch import set_recorder
from ratoon.ops.penalties import count_tokens
from ratoon.ops.tree import Places
from ratoon.runtime.emulator import EmulatorBackend
from ratoon.runtime.graphs import CudaBackend, GraphKey, GraphSet, capture_order, input_group, teardown
from ratoon.runtime.kv import declare, seat_state
from ratoon.runtime.prefill import EXACT_CHUNK, Chunk, chunk_sizes, chunks
from ratoon.runtime.readback import Readback
from ratoon.runtime.results import ResultLayout, RowResult
from ratoon.runtime.scheduler import Extension
from ratoon.runtime.seats import DUMMY, SeatRecords, Tenant
from ratoon.runtime.staging import event_maker
from ratoon.spec.round import Drafted, Round, Verified
from ratoon.spec.simulate import Simulation
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
        simulation: Simulation | None = None,
    ) -> None:
        self.limits, self.device, self.mode = limits, device, mode
        dtype = target.embed.weight.dtype
        # A CPU emulates its graphs, and capturing a chunk of a real model takes it seconds.
        graphed = mode != "eager" and (device.type == "cuda" or debug)
        self.chunks = chunk_sizes(limits.max_model_len, limits.context) if graphed else ()
        chunk = max(self.chunks, default=1)
        self.table = declare(limits, target.config, drafter.config if drafter else None, dtype, device, chunk)
        self.state = seat_state(self.table)
        self._records = SeatRecords(self.state)
        draft_cache = self.table["draft_cache"] if drafter else None
        self.round = Round(target, drafter, self.state, self.table["cache"], draft_cache, limits, simulation)
        self.layout = ResultLayout.of(limits)
        self._ring = Ring(self.table["result.ints"], self.table["result.floats"], self.layout.depth)
        self._readback = Readback((self._ring.ints, self._ring.floats), event_maker(device))
        self.stage_ms: Counter[str] = Counter()
        self._stages = (self._stage_draft, self._stage_verify, self._stage_accept)
        self._traced: dict[int, Places] = {}
        self.graphs: GraphSet | None = None
        if mode in ("graph", "staged"):
            for name, net in (("target", target), ("drafter", drafter)):
                if net is not None:
                    self.table.bind_module(name, net)
            backend = CudaBackend(device) if device.type == "cuda" else EmulatorBackend(on_capture=set_recorder)
            self.graphs = GraphSet(self.table, backend, debug=debug)
        self.shapes: tuple[RoundShape, ...] = ()
        self._generation = self.table.generation
        self._opened: frozenset[RoundShape] = frozenset()
        self._keys: dict[RoundShape, GraphKey] = {}
        self._fits: dict[RoundShape, RoundShape | None] = {}
        self.fallbacks: Counter[str] = Counter()
        self.trace = False
        self.num_launched = 0

    # ---- seats ------------------------------------------------------------------------------------------------

    def join(
        self, seat: int, prompt: Sequence[int], pages: Sequence[int], params: SamplingParams, stop_ids: Sequence[int],
        seed: int, limit: int, budget: int, topk_cap: int, output: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Writes a new tenant over all of a seat's state; the row starts at its last token.

        output: tokens that the row emitted before it gave up another seat. One copy and one unpack behind the rounds
        in flight, and more of each for a request with penalties.
        """
        assert 0 < seat < self.limits.num_seats, f"seat {seat} is not allocatable"
        records, key = self._records, self._seat_key()
        tenant = Tenant((*prompt, *output), pages, params, stop_ids, seed, limit, budget, topk_cap)
        self._fill(key, {"seat.words": records.compose(seat, tenant)})
        if self.graphs is not None and key in self.graphs:
            self.graphs.replay(key)
        else:
            with torch.inference_mode():
                records.unpack(self.table["seat.words"])
        if params.has_penalties:
            history = self.table["history.words"]
            composed = records.compose_history(seat, prompt, self.limits.max_model_len)
            with torch.inference_mode():
                self.table.fill({"history.words": torch.from_numpy(composed)}, group="history")
                records.unpack_history(history)
                if output:
                    count_tokens(self.state.sampler, self._ids([seat]), self._ids(output).unsqueeze(0))

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Grows the page tables of seats, behind the rounds in flight."""
        entries = [
            (seat, column, page) for seat, begin, pages in extensions for column, page in enumerate(pages, begin)
        ]
        words, width = self.table["pages.words"], len(self.table["pages.words"]) // 3
        for first in range(0, len(entries), width):
            # Surplus entries are zeros, which name the dummy's own page.
            padded = np.zeros((3, width), dtype=np.int64)
            part = entries[first : first + width]
            padded[:, : len(part)] = np.array(part, dtype=np.int64).T
            with torch.inference_mode():
                self.table.fill({"pages.words": torch.from_numpy(padded.ravel())}, mode=self.mode, group="pages")
                seat_N, column_N, page_N = words.view(3, width).unbind(0)
                table_SP = self.state.page_table_SP
                table_SP.index_put_((seat_N, column_N), page_N.to(table_SP.dtype))

    def stop(self, seat: int) -> None:
        """Marks a seat done: rounds launched from now on commit nothing for it."""
        with torch.inference_mode():
            self.state.done_S[seat].fill_(True)

    def prefill(self, seat: int, prompt: Sequence[int], begin: int, end: int) -> None:
        """K/V of prompt tokens begin .. end - 1 of a seat, target and draft context: in padded chunks where this runner
        has `chunks`, else in exact sizes."""
        if self.chunks:
            for chunk in chunks(begin, end, self.chunks, self.limits.context):
                self.fill_prefill(seat, prompt, chunk)
                key = self.prefill_key(chunk.size)
                if self.graphs is not None and key in self.graphs:
                    self.graphs.replay(key)
                else:
                    self.run_prefill(chunk.size)
            return
        with torch.inference_mode():
            for base in range(begin, end, EXACT_CHUNK):
                stop = min(base + EXACT_CHUNK, end)
                self.round.prefill(self._ids([seat]), self._ids(prompt[base:stop])[None], self._ids([base]), stop)

    def fill_prefill(self, seat: int, prompt: Sequence[int], chunk: Chunk) -> None:
        """Writes a prefill's inputs: the seat, the first position, the chunk's tokens."""
        ids = np.array(prompt[chunk.base : chunk.end], dtype=np.int64)
        inputs = {"prefill.seat": np.array([seat]), "prefill.base": np.array([chunk.base]), "prefill.ids": ids}
        self._fill(self.prefill_key(chunk.size), inputs)

    def run_prefill(self, size: int) -> None:
        """The padded prefill without a graph, on what was filled."""
        ids_RN, base_R = self.table["prefill.ids"][:size].unsqueeze(0), self.table["prefill.base"]
        with torch.inference_mode():
            self.round.prefill(self.table["prefill.seat"], ids_RN, base_R, self.limits.context)

    def _fill(self, key: GraphKey, inputs: Mapping[str, np.ndarray]) -> None:
        """Fills the inputs of the key's group."""
        given: dict[str, Tensor | None] = {name: torch.from_numpy(value) for name, value in inputs.items()}
        with torch.inference_mode():
            if self.graphs is None:
                self.table.fill(given, key=key, mode=self.mode, group=input_group(key))
            else:
                self.graphs.fill(key, given, mode=self.mode)

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
            self._readback.queue(self.num_launched % self.layout.places, len(seats))
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
        if self.graphs is None or shape not in self._opened:
            self.run_stages(shape)
        else:
            self.replay(shape)
        if self.trace:
            self._trace(self._drafted(shape).places)

    def replay(self, shape: RoundShape) -> None:
        """The captured round of an open shape, on what was filled."""
        assert self.graphs is not None, "only graphs are replayed"
        key = self.key_of(shape)
        for part in key.staged() if self.mode == "staged" else (key,):
            self.graphs.replay(part)

    def fill(self, seats: Sequence[int], shape: RoundShape) -> None:
        """Writes the round's one host input: the list of seats, padded with the dummy."""
        self._fill(self.key_of(shape), {"round.seat": np.array(seats, dtype=np.int64)})

    def run_stages(self, shape: RoundShape) -> None:
        """The padded round without a graph (static mode)."""
        with torch.inference_mode():
            for stage in self._stages:
                stage(shape)

    # ---- graphs -----------------------------------------------------------------------------------------------

    def key_of(self, shape: RoundShape) -> GraphKey:
        """The graph key of a padded shape."""
        if shape not in self._keys:
            sampler: SamplerKind = shape.sampler  # pyright: ignore[reportAssignmentType]
            key = GraphKey(shape.rows, shape.places, shape.block, sampler, self._generation, nodes=shape.nodes)
            self._keys[shape] = key
        return self._keys[shape]

    def _seat_key(self) -> GraphKey:
        return GraphKey(1, 1, 0, generation=self._generation, kind="seat")

    def prefill_key(self, size: int) -> GraphKey:
        """The graph key of a prefill of `size` places."""
        return GraphKey(1, size, 0, generation=self._generation, kind="prefill")

    def capture(self, shapes: Iterable[RoundShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Opens padded shapes. In graph and staged mode each is captured, one graph or three, and prefill and joins
        with them: largest first. progress(done, total) follows each."""
        self._generation = self.table.generation
        self._keys, self._fits = {}, {}
        by_key = {self.key_of(shape): shape for shape in shapes}
        self.shapes = tuple(by_key[key] for key in reversed(capture_order(by_key)))
        self._opened = frozenset(self.shapes)
        if self.graphs is None:
            return
        for shape in self.shapes:
            for name, constant in self.round.constants(shape).items():
                if name not in self.table:
                    self.table.bind(name, constant)
        jobs = {key: partial(self._capture_round, self.graphs, key, shape) for key, shape in by_key.items()}
        jobs |= self._other_captures(self.graphs)
        for number, key in enumerate(capture_order(jobs), start=1):
            jobs[key]()
            if progress:
                progress(number, len(jobs))

    def _other_captures(self, graphs: GraphSet) -> dict[GraphKey, Callable[[], object]]:
        """Prefill and joins, unless an earlier call has captured them. They write no result."""

        def dummy_record() -> None:
            record = torch.from_numpy(self._records.compose(0, DUMMY))
            self.table.fill({"seat.words": record}, group="seat")

        seat_key, unpack = self._seat_key(), partial(self._records.unpack, self.table["seat.words"])
        jobs: dict[GraphKey, Callable[[], object]] = {
            seat_key: partial(graphs.capture, seat_key, unpack, outputs=(), prepare=dummy_record)
        }
        for size in self.chunks:
            key = self.prefill_key(size)
            jobs[key] = partial(graphs.capture, key, partial(self.run_prefill, size), outputs=())
        return {key: job for key, job in jobs.items() if key not in graphs}

    def _capture_round(self, graphs: GraphSet, key: GraphKey, shape: RoundShape) -> None:
        if self.mode == "graph":
            graphs.capture(key, partial(self.run_stages, shape))
            return
        for part, stage in zip(key.staged(), self._stages, strict=True):
            graphs.capture(
                part, partial(stage, shape), outputs=self.table.names("output") if part.kind == "accept" else ()
            )

    def fit(self, shape: RoundShape) -> RoundShape:
        """The shape that this mode runs: live as it is in eager mode, else the smallest open one that holds it.

        Counted as fall-backs: a block longer than asked for, more rows than a greedy round would take (few shapes are
        captured for sampled rows), and, where no open shape holds it, a padded round without a graph.
        """
        if self.mode == "eager":
            return replace(shape, live=True)
        ready = self.serving(shape)
        if ready is None:
            self.fallbacks["fallback_no_graph"] += self.graphs is not None
            sampler = "argmax" if shape.sampler == "argmax" else "general"
            nodes = min(self.limits.max_nodes, shape.places - shape.rows)
            return RoundShape(shape.rows, shape.places, shape.block, nodes, sampler)
        if ready.block != shape.block:
            self.fallbacks["fallback_longer_block"] += 1
        elif ready.sampler != "argmax":
            greedy = self.serving(replace(shape, sampler="argmax"))
            if greedy is not None and greedy.rows < ready.rows:
                self.fallbacks["fallback_more_rows"] += 1
        return ready

    def serving(self, shape: RoundShape) -> RoundShape | None:
        """The open shape that a round of this shape gets, None where none holds it. A longer block is the second
        choice, plain rounds (block 0) stay plain."""
        if shape not in self._fits:
            sampler = "argmax" if shape.sampler == "argmax" else "general"
            holding = [
                ready
                for ready in self.shapes
                if ready.rows >= shape.rows
                and ready.places - (ready.rows - shape.rows) >= shape.places
                and ready.nodes >= shape.nodes
                and ready.sampler == sampler
                and (ready.block == shape.block or ready.block > shape.block > 0)
            ]
            self._fits[shape] = min(holding, key=lambda ready: ready.block, default=None)
        return self._fits[shape]

    def _stage_draft(self, shape: RoundShape) -> None:
        ready = self._drafted(shape)
        drafted = self.round.draft_build(self._seats(shape), shape, ready.places)
        ready.mass_RQ.copy_(drafted.mass_RQ)
        if drafted.truth_RL is not None:
            assert ready.truth_RL is not None
            ready.truth_RL.copy_(drafted.truth_RL)

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
        """The round's last stage; its results go into place `round number mod places` of the ring."""
        self.round.accept_commit(seat_R, drafted, verified, shape, self._ring)

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
        truth_RL, size = None, (shape.rows + 1, self.round.depths(shape.block) + 1)
        if self.round.simulation and shape.block and shape.nodes:
            truth_RL = self.table["draft.truth"][: size[0] * size[1]].view(size)
        return Drafted(places, self._mass(shape.rows), truth_RL)

    def _mass(self, rows: int) -> Tensor:
        if self.limits.forecast:
            return self.table["draft.mass"][:rows]
        return self.table["result.floats"].new_zeros((rows, 0))

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
        """Call with nothing in flight, before any other write. A round or a fill that Ctrl-C cut off may have run on
        the device and not been counted."""
        self.table.settle()
        self._traced.clear()
        with torch.inference_mode():
            self.state.round_number.fill_(self.num_launched)

    def read(self, launch: Launch) -> list[RowResult]:
        """Results of a launched round, one per seat; waits for it alone. Each round is read once, oldest first."""
        place = launch.number % self.layout.places
        ints, floats = self._readback.wait(place, len(launch.seats))
        assert launch.number == ints[0, 0], f"result place {place} holds round {ints[0, 0]}, not {launch.number}"
        return self.layout.unpack(ints, floats)


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
