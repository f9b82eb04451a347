# Owns: graph keys, capture and replay, and the tests that a captured graph passes before it serves.
# Promises: a replay runs only on fresh inputs, unmoved buffers and the generation it was captured in.
# Never: autotunes or reads the host inside capture; replays after teardown.
"""Captured graphs of the graph contract (docs/CONTRACT.md clauses 1, 2, 4, 5, 9, 10)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from ratoon.core.request import SamplerKind
from ratoon.runtime.buffers import BorrowedOutput, BufferTable, ContractError

Kind = Literal["round", "draft", "verify", "accept", "prefill", "seat"]
Level = Literal["off", "quick", "full"]

STAGES: tuple[Kind, ...] = ("draft", "verify", "accept")


class BirthError(ContractError):
    """A freshly captured graph does not compute what the static mode computes."""


@dataclass(frozen=True)
class GraphKey:
    """The host's whole influence on a graph: no other Python number may reach a launch.

    rows: live rows R, the dummy not counted; places: packed places T; block: length B of the draft block; nodes: most
    per row, where a launch depends on it; kind 'prefill' uses places for the chunk and block 0, kind 'seat' no size.
    """

    rows: int
    places: int
    block: int
    sampler: SamplerKind = "greedy"
    generation: int = 0
    kind: Kind = "round"
    nodes: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.places) < 1 or min(self.block, self.generation, self.nodes) < 0:
            raise ValueError(f"graph key {self}: rows and places must be at least 1, the other numbers at least 0")
        if self.kind not in get_args(Kind) or self.sampler not in get_args(SamplerKind):
            raise ValueError(
                f"graph key {self}: kind must be one of {get_args(Kind)}, sampler of {get_args(SamplerKind)}"
            )

    def __str__(self) -> str:
        size = f"rows={self.rows} places={self.places} block={self.block}" + f" nodes={self.nodes}" * bool(self.nodes)
        return f"{self.kind}[{size} {self.sampler} gen={self.generation}]"

    @cached_property
    def family(self) -> GraphKey:
        """The key that shares this key's inputs: the three stages of a round share the round's."""
        return replace(self, kind="round") if self.kind in STAGES else self

    @property
    def mode(self) -> str:
        """Forward mode named in error messages."""
        return "staged" if self.kind in STAGES else "graph"

    def staged(self) -> tuple[GraphKey, GraphKey, GraphKey]:
        """The keys of the three graphs of a staged round."""
        draft, verify, accept = (replace(self, kind=kind) for kind in STAGES)
        return draft, verify, accept


def _size(key: GraphKey) -> tuple[int, ...]:
    return key.places, key.rows, key.block, key.nodes


def capture_order(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Largest first, so that the pool never grows after the first capture."""
    return sorted(keys, key=_size, reverse=True)


def key_hash(key: GraphKey, bucket: Sequence[int] = (), collectives: Sequence[str] = ()) -> int:
    """63-bit number, equal on ranks that are about to run the same graph with the same order of collectives."""
    text = repr((str(key), tuple(bucket), tuple(collectives)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def check_ranks(key: GraphKey, hashes: Sequence[int]) -> None:
    """hashes[i] is rank i's key_hash, hashes[0] the reference. Raises ContractError naming ranks that differ."""
    odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if odd:
        raise ContractError(
            f"graph {key}: ranks {odd} are about to run another graph, bucket or order of collectives than rank 0. "
            "Choose the bucket from data that all ranks share."
        )


# ---- backends ----


class Backend(Protocol):
    """What captures and replays: CUDA graphs, or the emulator on CPU."""

    name: str

    def warm_up(self, fn: Callable[[], Any], times: int) -> None: ...

    def capture(self, fn: Callable[[], Any], declared: Mapping[int, str]) -> Any: ...

    def replay(self, graph: Any) -> None: ...

    def release(self, graph: Any) -> None: ...

    def reset(self) -> None: ...


class CudaBackend:
    """CUDA graphs: one memory pool and one capture stream for all of them.

    The cuBLAS workspace belongs to (handle, stream). Warm-up runs on the capture stream, so the workspace exists
    before capture and outside of the pool, and no graph owns it.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._replay_stream: int | None = None

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Run fn on the capture stream: kernels compile and tune, and the workspace is allocated, before capture."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(times):
                fn()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        torch.cuda.synchronize(self.device)

    def capture(self, fn: Callable[[], Any], declared: Mapping[int, str]) -> torch.cuda.CUDAGraph:
        """Record fn. Other threads may go on using the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        context = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.inference_mode(), context:
            fn()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Queue the graph on the current stream, which must be the same one every time: graphs share pool memory."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self._replay_stream not in (None, stream):
            raise ContractError("graphs of one pool must be replayed on one stream: they share memory and workspace")
        self._replay_stream = stream
        graph.replay()

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        torch.cuda.synchronize(self.device)
        graph.reset()

    def reset(self) -> None:
        """Give the pool back; every graph must have been released before."""
        self.pool = None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


# ---- captured graphs ----


@dataclass(frozen=True)
class Captured:
    """A graph and what it was captured with."""

    key: GraphKey
    graph: Any
    addresses: Mapping[str, int]
    groups: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class _Fill:
    """The last fill of an input group: for which family of keys, and which of them have used it."""

    family: GraphKey
    used: set[GraphKey] = field(default_factory=set)


class GraphSet:
    """All captured graphs over one buffer table.

    debug: check addresses and canaries at every replay, and that warm-up touched the dummy only. Otherwise addresses
    are checked at every `sample_every`-th replay and canaries never; the generation and the fills always are.
    """

    def __init__(self, table: BufferTable, backend: Backend, debug: bool = False, sample_every: int = 64) -> None:
        self.table = table
        self.backend = backend
        self.debug = debug
        self.sample_every = sample_every
        self.num_address_checks = 0
        self._captured: dict[GraphKey, Captured] = {}
        self._largest: dict[Kind, GraphKey] = {}
        self._fills: dict[str, _Fill] = {}
        self._closed = False

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._captured)

    def captured(self, key: GraphKey) -> Captured:
        """The captured graph of a key; raises ContractError where there is none."""
        if key not in self._captured:
            known = ", ".join(map(str, self._captured)) or "none"
            raise ContractError(f"graph {key} was never captured (captured: {known}). Capture it at start-up.")
        return self._captured[key]

    # ---- capture ----

    def capture(
        self,
        key: GraphKey,
        fn: Callable[[], Any],
        *,
        groups: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        prepare: Callable[[], None] | None = None,
        warmups: int = 1,
    ) -> Captured:
        """Warm up and capture fn, which reads and writes declared buffers only.

        groups: input groups that fn reads (default: 'prefill' or 'seat' for these kinds, else 'round'); outputs: the
        output buffers it overwrites (default: all); prepare: makes dummy inputs beyond the pad values, before each run.
        """
        self._check_capturable(key)
        groups = (input_group(key),) if groups is None else tuple(groups)
        self._dummy_inputs(groups, prepare)
        before = self._state()
        self.backend.warm_up(fn, warmups)
        self._check_harmless(key, before)
        self._dummy_inputs(groups, prepare)
        graph = self.backend.capture(fn, self.table.storages())
        names = self.table.names("output") if outputs is None else tuple(outputs)
        captured = Captured(key, graph, self.table.addresses(), groups, names)
        self._captured[key] = captured
        self._largest.setdefault(key.kind, key)
        return captured

    def _check_capturable(self, key: GraphKey) -> None:
        if self._closed:
            raise ContractError(f"graph {key}: this graph set was torn down; make a new one")
        if key in self._captured:
            raise ContractError(f"graph {key} is captured already")
        if key.generation != self.table.generation:
            raise ContractError(
                f"graph {key}: the buffer table is at generation {self.table.generation}. "
                "Make keys from the table's generation, after the last allocation."
            )
        largest = self._largest.get(key.kind)
        if largest is not None and _size(key) > _size(largest):
            raise ContractError(
                f"graph {key} is larger than {largest}, captured before it, so the pool would grow. "
                "Capture in capture_order(keys)."
            )
        self.table.check_capacity(key)

    def _dummy_inputs(self, groups: Sequence[str], prepare: Callable[[], None] | None) -> None:
        self.table.reset_inputs(*groups)
        for group in groups:
            self._fills.pop(group, None)
        if prepare is not None:
            prepare()

    def _state(self) -> dict[str, Tensor]:
        """Copies of state without a dummy part (counters), in debug of all state and K/V."""
        table = self.table
        names = [name for name in table.names("state", "kv") if self.debug or not table.spec(name).dummy_len]
        return {name: table[name].clone() for name in names}

    def _check_harmless(self, key: GraphKey, before: Mapping[str, Tensor]) -> None:
        """Put counters back; raise ContractError if warm-up changed a real seat or page, or made page 0 not finite."""
        for name, old in before.items():
            spec, now = self.table.spec(name), self.table[name]
            if not spec.dummy_len:
                now.copy_(old)
                continue
            spec.dummy_part(old).copy_(spec.dummy_part(now))
            found = first_difference(name, old, now)
            if found is not None:
                raise ContractError(
                    f"graph {key}: warm-up wrote outside of seat 0 and page 0: {found}. Padded rows must be the dummy."
                )
        if self.debug:
            self.table.check_dummies()
            self.table.check_canaries()

    # ---- replay ----

    def fill(
        self,
        key: GraphKey,
        inputs: Mapping[str, Tensor | None],
        live: Mapping[str, int] | None = None,
        group: str | None = None,
        mode: str | None = None,
    ) -> None:
        """Fill one input group for the next replay of this key (or of its stages). See BufferTable.fill."""
        group = input_group(key) if group is None else group
        self._fills.pop(group, None)
        self.table.fill(inputs, live, key=key, mode=mode or key.mode, group=group)
        self._fills[group] = _Fill(key.family)

    def replay(self, key: GraphKey) -> int:
        """Run a captured graph; returns the replay's number. Raises ContractError, before anything runs, for an old
        generation, a moved buffer, or inputs that were not filled for this key since its last replay."""
        if self._closed:
            raise ContractError(f"graph {key}: this graph set was torn down; no graph may be replayed")
        captured = self.captured(key)
        self._check_generation(captured)
        if self.debug or self.table.num_replays % self.sample_every == 0:
            self.num_address_checks += 1
            self.table.check_addresses(key, captured.addresses)
        self._use_fills(captured)
        self.backend.replay(captured.graph)
        if self.debug:
            self.table.check_canaries()
        return self.table.advance(captured.outputs)

    def _check_generation(self, captured: Captured) -> None:
        if captured.key.generation != self.table.generation:
            moved = ", ".join(f"'{name}'" for name in self.table.moved(captured.addresses)) or "none any more"
            raise ContractError(
                f"graph {captured.key}: buffers were reallocated or rebound since capture (moved: {moved}) and the "
                f"table is at generation {self.table.generation}. Capture again; old graphs read freed memory."
            )

    def _use_fills(self, captured: Captured) -> None:
        key = captured.key
        for group in captured.groups:
            fill = self._fills.get(group)
            if fill is None or fill.family != key.family or key in fill.used:
                filled = "not filled" if fill is None else f"last filled for {fill.family}"
                used = " and already used by this key" if fill is not None and key in fill.used else ""
                raise ContractError(
                    f"graph {key}: the inputs of group '{group}' ({', '.join(self.table.group_names(group))}) are "
                    f"{filled}{used}. Every replay needs its own fill() of every input: stale rows would run again."
                )
        for group in captured.groups:
            self._fills[group].used.add(key)

    def output(self, name: str, index: int | None = None, lifetime: int = 1) -> BorrowedOutput:
        """Borrow an output of the last replay; reading it after `lifetime` newer ones raises in debug."""
        return self.table.borrow(name, index, lifetime, self.debug)

    # ---- death ----

    def drop_stale(self) -> int:
        """Release graphs of older generations; returns how many."""
        stale = [key for key in self._captured if key.generation != self.table.generation]
        for key in stale:
            self.backend.release(self._captured.pop(key).graph)
        if stale:
            self._largest = {}
        return len(stale)

    def close(self) -> None:
        """Release every graph, then the pool. Nothing can be captured or replayed afterwards."""
        if self._closed:
            return
        self._closed = True
        for captured in self._captured.values():
            self.backend.release(captured.graph)
        self._captured.clear()
        self.backend.reset()

    @property
    def closed(self) -> bool:
        return self._closed


def input_group(key: GraphKey) -> str:
    """The group of inputs that graphs of this key's kind read, unless they say otherwise."""
    return key.kind if key.kind in ("prefill", "seat") else "round"


def teardown(
    graph_sets: Sequence[GraphSet],
    free_caches: Callable[[], None] | None = None,
    destroy_groups: Callable[[], None] | None = None,
) -> None:
    """Graphs and pools, then caches, then process groups: NCCL from 2.26 hangs at exit while graphs live."""
    for graphs in graph_sets:
        graphs.close()
    if free_caches is not None:
        free_caches()
    if destroy_groups is not None:
        destroy_groups()


# ---- comparing bit for bit ----


@dataclass(frozen=True)
class Difference:
    """Where two tensors first differ."""

    name: str
    coordinate: tuple[int, ...]
    want: Any
    got: Any
    num_different: int
    num_elements: int

    def __str__(self) -> str:
        count = f"{self.num_different} of {self.num_elements} elements differ"
        return f"'{self.name}' at {list(self.coordinate)}: expected {self.want!r}, got {self.got!r} ({count})"


def _words(tensor: Tensor) -> Tensor:
    """[numel, itemsize] bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1)


def first_difference(name: str, want: Tensor, got: Tensor) -> Difference | None:
    """First coordinate at which two tensors of one shape and dtype differ in a bit. Synchronises."""
    if want.shape != got.shape or want.dtype != got.dtype:
        raise ContractError(f"'{name}' was {want.dtype} {list(want.shape)} and is {got.dtype} {list(got.shape)}")
    if not want.numel():
        return None
    differs = (_words(want) != _words(got)).any(dim=1)
    count = int(differs.sum())
    if not count:
        return None
    at = int(differs.to(torch.uint8).argmax())
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), tuple(want.shape)))
    return Difference(name, coordinate, want[coordinate].item(), got[coordinate].item(), count, want.numel())


# ---- clause 10: the birth test ----


@dataclass(frozen=True)
class BirthCase:
    """One set of inputs for the birth test; every callback must do the same each time it is called.

    prepare: write state and all K/V of the borrowed seats and pages, clean beyond the live lengths (rows of different
    lengths and trees, on scattered pages);
    fill: fill every input group of the key, through GraphSet.fill; poison(kind): spoil K/V beyond the live lengths with
    'noise' or 'nan'; observe: live parts of outputs, state and K/V, without dummy rows and page 0.
    """

    name: str
    prepare: Callable[[], None]
    fill: Callable[[], None]
    observe: Callable[[], Mapping[str, Tensor]]
    poison: Callable[[Literal["noise", "nan"]], None]


@dataclass(frozen=True)
class BirthReport:
    """What a birth test ran."""

    keys: tuple[GraphKey, ...]
    level: Level
    num_cases: int
    num_replays: int


def birth_test(
    graphs: GraphSet,
    keys: GraphKey | Sequence[GraphKey],
    static: Callable[[], None],
    cases: Sequence[BirthCase],
    level: Level = "full",
    scrub: Callable[[], None] | None = None,
) -> BirthReport:
    """Replay a new graph on inputs unlike those of its capture and compare with the static mode bit for bit.

    keys: one key, or the stages of a round in order; static: the same computation on the same buffers without a graph;
    cases: at least 'changed', 'shrink' and 'grow', in the order in which they should follow each other.
    full: each case without poison, with noise and with NaN; quick: with NaN only; off: nothing. Each replay is made
    twice. The static run is never poisoned, so poison that would leak into both modes is seen as well.
    Raises BirthError naming key, case, poison, field, coordinate and both values. `scrub` runs in any event.
    """
    order = (keys,) if isinstance(keys, GraphKey) else tuple(keys)
    if level == "off":
        return BirthReport(order, level, 0, 0)
    kinds: tuple[str, ...] = ("none", "noise", "nan") if level == "full" else ("nan",)
    missing = {"changed", "shrink", "grow"} - {case.name for case in cases}
    if missing:
        raise ValueError(f"birth test of {order[0]}: the cases lack {sorted(missing)}")
    num_replays = 0
    try:
        for case in cases:
            want = _observe_static(graphs, static, case)
            for kind in kinds:
                where = f"birth test of {order[0]}, case '{case.name}', poison {kind}"
                first = _observe_replay(graphs, order, case, kind)
                _compare(f"{where}: the replay differs from the static mode", want, first)
                again = _observe_replay(graphs, order, case, kind)
                _compare(f"{where}: the replay differs from its own first replay", first, again)
                num_replays += 2 * len(order)
    finally:
        if scrub is not None:
            scrub()
    return BirthReport(order, level, len(cases), num_replays)


def _clone(observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in observed.items()}


def _observe_static(graphs: GraphSet, static: Callable[[], None], case: BirthCase) -> dict[str, Tensor]:
    case.prepare()
    graphs.table.reset("output", "scratch")
    case.fill()
    static()
    return _clone(case.observe())


def _observe_replay(graphs: GraphSet, order: Sequence[GraphKey], case: BirthCase, kind: str) -> dict[str, Tensor]:
    table = graphs.table
    case.prepare()
    if kind == "none":
        table.reset("output", "scratch")
    else:
        table.poison("output", "scratch", "input")  # inputs too: the fill must not leave any of it in a tail
        case.poison("noise" if kind == "noise" else "nan")
    case.fill()
    try:
        for key in order:
            graphs.replay(key)
        table.check_canaries()
        table.check_dummies()
    except ContractError as error:
        raise BirthError(f"birth test of {order[0]}, case '{case.name}', poison {kind}: {error}") from error
    return _clone(case.observe())


def _compare(where: str, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    if want.keys() != got.keys():
        raise BirthError(f"{where} in what was observed: {sorted(got)} instead of {sorted(want)}")
    for name in want:
        found = first_difference(name, want[name], got[name])
        if found is not None:
            raise BirthError(
                f"{where} in {found}. A number or address was frozen at capture, or memory past the live end is read."
            )
