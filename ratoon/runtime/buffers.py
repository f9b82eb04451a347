# Owns: every tensor that a graph may read or write, their addresses, canaries and padding.
# Promises: a fill writes every input or raises before anything is written; a moved buffer changes the generation.
# Never: writes role state in a fill; grows a buffer behind a captured graph.
"""Declared buffers of the graph contract (docs/CONTRACT.md clauses 1, 2, 4, 6, 7, 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, prod
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from ratoon.runtime.staging import StagingRing

Role = Literal["input", "state", "kv", "weight", "output", "scratch"]
Poison = Literal["nan", "noise"]

GUARD_BYTES = 256  # also the alignment: the widest vector load of a kernel stays inside one buffer
CANARY = 0xA5
NOISE = 1.0e4  # large, yet finite in bf16 and harmless when multiplied by a probability of exactly zero


class ContractError(ValueError):
    """A clause of the graph contract is broken; the message names the graph, the field and the remedy."""


class StaleOutputError(ContractError):
    """A borrowed output was read after a newer replay had overwritten it."""


@dataclass(frozen=True)
class BufferSpec:
    """One declared tensor.

    shape is sized for the largest key. `need` gives the rows of dim 0 that a key uses (None: all of them).
    Inputs of one `group` are filled together by one copy. Rows 0..dummy_len-1 along dummy_dim of a state or
    kv buffer are seat 0 or page 0: padded writes land there and comparisons leave them out. dummy_len 0 marks state
    that no seat owns, such as a round counter: a warm-up may change it and it is put back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    pad: float = 0
    group: str = "round"
    need: Callable[[Any], int] | None = None
    dummy_dim: int = 0
    dummy_len: int = 1

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"buffer '{self.name}': unknown role {self.role!r}; use one of {get_args(Role)}")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ValueError(f"buffer '{self.name}': shape {self.shape} needs one or more dims, all of at least 1")
        if not _can_hold(self.pad, self.dtype):
            raise ValueError(f"buffer '{self.name}': pad {self.pad} cannot be held by {self.dtype}")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def capacity(self, key: Any) -> int:
        """Rows of dim 0 that this key may fill, at most the rows allocated."""
        return self.shape[0] if key is None or self.need is None else min(self.need(key), self.shape[0])

    def live_part(self, tensor: Tensor) -> Tensor:
        """The tensor without its dummy seat or page."""
        return tensor.narrow(self.dummy_dim, self.dummy_len, tensor.shape[self.dummy_dim] - self.dummy_len)

    def dummy_part(self, tensor: Tensor) -> Tensor:
        """The dummy seat or page alone."""
        return tensor.narrow(self.dummy_dim, 0, self.dummy_len)


def _can_hold(value: float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:
        return not isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if dtype == torch.bool:
        return value in (0, 1)
    return value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def sentinel(dtype: torch.dtype) -> float:
    """What poisoned memory holds: NaN, True, or an integer (bytes 0x7F) too large to be a place, page or token."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else int.from_bytes(b"\x7f" * dtype.itemsize, "little")


def poison(tensor: Tensor, kind: Poison = "nan") -> None:
    """Fill in place with NaN (or the integer sentinel), or, for 'noise', with finite values of about +-1e4."""
    if kind == "nan" or not tensor.dtype.is_floating_point:
        tensor.fill_(sentinel(tensor.dtype))
        return
    sign = torch.arange(tensor.numel(), device=tensor.device).remainder_(2).mul_(2).sub_(1)
    tensor.copy_(sign.reshape(tensor.shape).to(torch.float32).mul_(NOISE))


def describe(value: object) -> str:
    """Dtype and shape of a tensor, or what else it is."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True)
class BorrowedOutput:
    """An output that the next replays overwrite: read it in time or copy it."""

    name: str
    tensor: Tensor
    stamp: int
    lifetime: int
    clock: Callable[[], int]
    debug: bool

    def read(self) -> Tensor:
        """The tensor itself, not a copy. Raises StaleOutputError in debug once `lifetime` newer replays were made."""
        age = self.clock() - self.stamp
        if self.debug and age >= self.lifetime:
            raise StaleOutputError(
                f"output '{self.name}' was borrowed at replay {self.stamp} and read after replay {self.clock()}: "
                f"it lives for {self.lifetime} replay(s). Read it earlier, or clone it before the next replay."
            )
        return self.tensor


class _Block:
    """One allocation that holds buffers, each between two guards full of canaries."""

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device) -> None:
        self.specs = tuple(specs)
        self.offsets: dict[str, int] = {}
        self.guards: list[tuple[str, int, int]] = []
        end = 0
        for spec in specs:
            start = (end + 2 * GUARD_BYTES - 1) // GUARD_BYTES * GUARD_BYTES
            self.guards.append((f"before '{spec.name}'", end, start))
            self.offsets[spec.name], end = start, start + spec.nbytes
        self.nbytes = (end + 2 * GUARD_BYTES - 1) // GUARD_BYTES * GUARD_BYTES
        self.guards.append((f"after '{specs[-1].name}'", end, self.nbytes))
        self.guards = [(self._between(i), a, b) for i, (_, a, b) in enumerate(self.guards)]
        self.bytes = torch.full((self.nbytes,), CANARY, dtype=torch.uint8, device=device)
        self.tensors = {spec.name: self.view(self.bytes, spec).fill_(spec.pad) for spec in specs}

    def _between(self, index: int) -> str:
        before = f"after '{self.specs[index - 1].name}'" if index else ""
        behind = f"before '{self.specs[index].name}'" if index < len(self.specs) else ""
        return " and ".join(part for part in (before, behind) if part)

    def view(self, raw: Tensor, spec: BufferSpec) -> Tensor:
        """The buffer's interior inside `raw`, a byte tensor laid out like this block."""
        start = self.offsets[spec.name]
        return raw[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)


class _PackedInputs(_Block):
    """The inputs of one group: composed on the host over their padding, sent by one copy."""

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device, depth: int) -> None:
        super().__init__(specs, device)
        self.padding = self.bytes.cpu().clone()
        self.ring = StagingRing(depth, self.nbytes, device)
        self._staged = [{spec.name: self.view(place, spec) for spec in specs} for place in self.ring.places]

    def write(self, inputs: Mapping[str, Tensor], live: Mapping[str, int]) -> None:
        """Pad everything, then lay the live prefixes over it; tensors already on the device are copied there."""
        index = self.ring.acquire()
        place, staged = self.ring.places[index], self._staged[index]
        place.copy_(self.padding)
        on_device = []
        for name, tensor in inputs.items():
            if tensor.is_cpu:
                staged[name][: live[name]].copy_(tensor[: live[name]])
            else:
                on_device.append(name)
        self.bytes.copy_(place, non_blocking=True)
        self.ring.sent(index)
        for name in on_device:
            self.tensors[name][: live[name]].copy_(inputs[name][: live[name]])

    def reset(self) -> None:
        """All padding: what capture and warm-up run on."""
        self.write({}, {})


class BufferTable:
    """The declared tensors of an engine: allocated here between canaries, or bound where they already live.

    `generation` rises with every reallocation or rebinding; a graph captured before that refuses to run.
    """

    def __init__(self, specs: Iterable[BufferSpec], device: torch.device | str = "cpu", depth: int = 2) -> None:
        self.device = torch.device(device)
        self.depth = depth
        self.generation = 0
        self._specs: dict[str, BufferSpec] = {}
        self._sources: dict[str, Callable[[], Tensor]] = {}
        self._blocks: dict[str, _Block] = {}
        self._stamps: dict[str, int] = {}
        self.num_replays = 0
        for spec in specs:
            self._declare(spec)
        for group in {spec.group for spec in self._specs.values() if spec.role == "input"}:
            self._allocate_group(group)
        for spec in self._specs.values():
            if spec.role != "input":
                self._allocate(spec)

    # ---- declaring, binding, moving ----

    def _declare(self, spec: BufferSpec) -> None:
        if spec.name in self._specs:
            raise ValueError(f"buffer '{spec.name}' is declared twice")
        self._specs[spec.name] = spec

    def _allocate(self, spec: BufferSpec) -> None:
        with torch.inference_mode(False):  # else writes to them outside inference mode would be refused
            self._blocks[f"/{spec.name}"] = block = _Block([spec], self.device)
        self._sources[spec.name] = lambda: block.tensors[spec.name]

    def _allocate_group(self, group: str) -> None:
        specs = [spec for spec in self._specs.values() if spec.role == "input" and spec.group == group]
        with torch.inference_mode(False):
            self._blocks[group] = block = _PackedInputs(specs, self.device, self.depth)
        for spec in specs:
            self._sources[spec.name] = lambda name=spec.name: block.tensors[name]

    def bind(self, name: str, source: Tensor | Callable[[], Tensor], role: Role = "weight") -> None:
        """Declare a tensor that lives elsewhere (no canaries). A callable is asked for the tensor of the moment."""
        fetch = source if callable(source) and not isinstance(source, Tensor) else (lambda: source)
        tensor = fetch()
        if role == "input":
            raise ValueError(f"buffer '{name}': inputs are filled through the table's own memory and cannot be bound")
        shape = tuple(tensor.shape) or (1,)
        self._declare(BufferSpec(name, shape, tensor.dtype, role))
        self._sources[name] = fetch  # type: ignore[assignment]

    def bind_module(self, prefix: str, module: nn.Module) -> None:
        """Declare each parameter and buffer of a module once; a parameter that is replaced later counts as moved."""
        for path, owner in module.named_modules():
            for store in (owner._parameters, owner._buffers):
                for leaf, tensor in store.items():
                    name = ".".join(part for part in (prefix, path, leaf) if part)
                    if tensor is not None and name not in self._specs:
                        self.bind(name, lambda store=store, leaf=leaf: store[leaf])  # type: ignore[misc]

    def bind_fields(self, prefix: str, holder: object) -> None:
        """Declare each tensor field of a dataclass once, and keep it alive: a constant that an op caches may be dropped
        from its cache while a graph still reads it."""
        for field in fields(holder):  # type: ignore[arg-type]
            value, name = getattr(holder, field.name), f"{prefix}.{field.name}"
            if isinstance(value, Tensor) and name not in self._specs:
                self.bind(name, value)

    def reallocate(self, name: str, shape: tuple[int, ...]) -> None:
        """Give a buffer a new size; its contents (an input: its whole group's) become padding. Bumps the generation."""
        spec = self.spec(name)
        self._specs[name] = spec = replace(spec, shape=shape)
        if spec.role == "input":
            self._allocate_group(spec.group)
        else:
            self._allocate(spec)
        self.generation += 1

    def rebind(self, name: str, source: Tensor) -> None:
        """Let another tensor of the same shape and dtype be this buffer. Bumps the generation."""
        spec = self.spec(name)
        if spec.role == "input":
            raise ContractError(f"input '{name}' cannot be rebound: it is filled by copy. Pass the tensor to fill().")
        if tuple(source.shape) != tuple(self[name].shape) or source.dtype != spec.dtype:
            raise ContractError(f"'{name}' is {describe(self[name])}; it cannot be rebound to {describe(source)}")
        self._blocks.pop(f"/{name}", None)
        self._sources[name] = lambda: source
        self.generation += 1

    # ---- looking up ----

    def __getitem__(self, name: str) -> Tensor:
        self.spec(name)
        return self._sources[name]()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def spec(self, name: str) -> BufferSpec:
        if name not in self._specs:
            raise ContractError(f"no buffer '{name}' is declared; declared: {', '.join(sorted(self._specs))}")
        return self._specs[name]

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Declared names of these roles (none given: all), in order of declaration."""
        return tuple(name for name, spec in self._specs.items() if not roles or spec.role in roles)

    def group_names(self, group: str) -> tuple[str, ...]:
        """Names of the inputs that are filled together."""
        return tuple(spec.name for spec in self._group(group).specs)

    def for_key(self, name: str, key: Any) -> Tensor:
        """The leading rows that the key uses: what a captured function should read."""
        return self[name][: self.spec(name).capacity(key)]

    def storages(self) -> dict[int, str]:
        """Identity of every declared storage and the name of a buffer in it."""
        return {self[name].untyped_storage()._cdata: name for name in self._specs}

    # ---- clause 6: capacity ----

    def check_capacity(self, key: Any) -> None:
        """Raises ContractError for a buffer that has fewer rows than the key needs."""
        for spec in self._specs.values():
            need = spec.shape[0] if spec.need is None else spec.need(key)
            if need > spec.shape[0]:
                raise ContractError(
                    f"graph {key}: buffer '{spec.name}' holds {spec.shape[0]} rows and this key needs {need}. "
                    "It was sized for a smaller key: size every buffer for the largest key before the first capture."
                )

    # ---- clause 2: filling ----

    def fill(
        self,
        inputs: Mapping[str, Tensor | None],
        live: Mapping[str, int] | None = None,
        *,
        key: Any = None,
        mode: str = "graph",
        group: str = "round",
    ) -> None:
        """Write the live prefix of every input of the group and reset its tail to the pad value.

        inputs: name to [n, ...] tensor; live: name to the number of leading rows that count (default: all given).
        Raises ContractError, before anything is written, for a missing, unknown, mistyped or too long input.
        """
        specs = {spec.name: spec for spec in self._group(group).specs}
        lengths = dict(live or {})
        for name in [*inputs, *lengths]:
            if name not in specs:
                raise ContractError(f"graph {key}: {self._why_not_filled(name, group, sorted(specs))}")
        for name, spec in specs.items():
            supplied = inputs.get(name, "nothing (the name is absent)")
            lengths[name] = self._check_input(spec, supplied, lengths.get(name), key, mode)
        self._group(group).write(dict(inputs), lengths)  # type: ignore[arg-type]

    def _group(self, group: str) -> _PackedInputs:
        block = self._blocks.get(group)
        if not isinstance(block, _PackedInputs):
            raise ContractError(f"no input is declared in group '{group}'")
        return block

    def _why_not_filled(self, name: str, group: str, known: list[str]) -> str:
        if name not in self._specs:
            return f"'{name}' is not a declared buffer; the inputs of group '{group}' are {', '.join(known)}."
        spec = self._specs[name]
        if spec.role != "input":
            return f"'{name}' has role {spec.role}: fill() never touches it. Write it by a seat write or in the graph."
        return f"'{name}' belongs to group '{spec.group}', not '{group}': fill that group."

    @staticmethod
    def _check_input(spec: BufferSpec, supplied: object, length: int | None, key: Any, mode: str) -> int:
        """Number of live rows; raises ContractError with everything needed to find the caller's mistake."""
        if isinstance(supplied, Tensor) and supplied.dtype == spec.dtype and supplied.shape[1:] == spec.shape[1:]:
            given_rows = supplied.shape[0] if supplied.dim() else -1
            rows = given_rows if length is None else length
            if 0 <= rows <= given_rows and rows <= spec.capacity(key):
                return rows
        BufferTable._refuse_input(spec, supplied, length, key, mode)

    @staticmethod
    def _refuse_input(spec: BufferSpec, supplied: object, length: int | None, key: Any, mode: str) -> NoReturn:
        captured = f"captured as {str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
        given = supplied if isinstance(supplied, str) else describe(supplied)
        where = f"graph {key}, mode {mode}: input '{spec.name}' ({captured}) was supplied {given}"
        if not isinstance(supplied, Tensor):
            raise ContractError(
                f"{where}. Supply a tensor for every input in every round: one that a round does not use "
                "is padded with its dummy row, or passed as an empty tensor, never left out and never None."
            )
        if supplied.dtype != spec.dtype:
            raise ContractError(f"{where}: the dtype differs. Convert it where it is made; a fill never casts.")
        if supplied.dim() != len(spec.shape) or tuple(supplied.shape[1:]) != spec.shape[1:]:
            raise ContractError(f"{where}: only the first dimension may differ. Pad the others where it is made.")
        rows = supplied.shape[0] if length is None else length
        if not 0 <= rows <= supplied.shape[0]:
            raise ContractError(f"{where}: live length {rows} is outside of what was supplied.")
        raise ContractError(
            f"{where}: live length {rows} exceeds the capacity {spec.capacity(key)} of this key. "
            "Choose a larger key or admit fewer rows: a fill never truncates and never grows a buffer."
        )

    def settle(self) -> None:
        """Makes fills possible again after one that an interrupt cut off."""
        for block in self._blocks.values():
            if isinstance(block, _PackedInputs):
                block.ring.settle()

    def reset_inputs(self, *groups: str) -> None:
        """Fill whole groups with padding, so that capture and warm-up touch seat 0 and page 0 only."""
        for group in groups:
            self._group(group).reset()

    def staging(self, group: str = "round") -> StagingRing:
        """The ring that this group's fills go through."""
        return self._group(group).ring

    # ---- clauses 1, 4, 10: addresses, canaries, poison ----

    def addresses(self) -> dict[str, int]:
        """Address of every declared buffer at this moment."""
        return {name: fetch().data_ptr() for name, fetch in self._sources.items()}

    def moved(self, captured: Mapping[str, int]) -> list[str]:
        """Names whose address is not the captured one, or that are gone."""
        sources = self._sources
        return [name for name, old in captured.items() if name not in sources or sources[name]().data_ptr() != old]

    def check_addresses(self, key: Any, captured: Mapping[str, int]) -> None:
        """Raises ContractError naming each buffer that has moved since capture."""
        moved = self.moved(captured)
        if moved:
            name = moved[0]
            raise ContractError(
                f"graph {key}: buffer '{name}' was captured at {captured[name]:#x} and is now at "
                f"{self[name].data_ptr():#x} (moved: {', '.join(moved)}). A replay would read the old memory. "
                "Copy into the buffer instead of rebinding it, or go through reallocate()/rebind() and capture again."
            )

    def check_canaries(self) -> None:
        """Raises ContractError naming the buffer beside the first guard that was written over. Synchronises."""
        guards = [(f"{where}", block.bytes[a:b]) for block in self._blocks.values() for where, a, b in block.guards]
        if not guards or not bool(torch.cat([part for _, part in guards]).ne(CANARY).any()):
            return
        broken = [where for where, part in guards if bool(part.ne(CANARY).any())]
        raise ContractError(
            f"canary words {broken[0]} were written over (all: {'; '.join(broken)}): a kernel wrote outside of "
            "its buffer. Check the largest index that the key allows against the declared shape."
        )

    def check_dummies(self) -> None:
        """Raises ContractError if page 0 of a kv buffer is not finite: masked loads would spread it. Synchronises."""
        for name in self.names("kv"):
            page = self.spec(name).dummy_part(self[name])
            if page.dtype.is_floating_point and not bool(torch.isfinite(page).all()):
                raise ContractError(
                    f"page 0 of '{name}' holds a NaN or infinity: padded rows wrote it and masked loads spread it. "
                    "The dummy row must compute finite values (length 1, one-node tree)."
                )

    def reset(self, *roles: Role) -> None:
        """Fill every buffer of these roles with its pad value."""
        for name in self.names(*roles):
            self[name].fill_(self.spec(name).pad)

    def poison(self, *roles: Role, kind: Poison = "nan") -> None:
        """Fill every buffer of these roles with poison."""
        for name in self.names(*roles):
            poison(self[name], kind)

    # ---- clause 7: outputs ----

    def advance(self, outputs: Iterable[str]) -> int:
        """A replay has overwritten these outputs; returns the replay's number."""
        self.num_replays += 1
        for name in outputs:
            self._stamps[name] = self._stamps.get(name, 0) + 1
        return self.num_replays

    def borrow(self, name: str, index: int | None = None, lifetime: int = 1, debug: bool = True) -> BorrowedOutput:
        """An output (or place `index` of it) as the last replay left it, valid for `lifetime` replays that write it."""
        if self.spec(name).role != "output":
            raise ContractError(f"'{name}' has role {self.spec(name).role}: only outputs are borrowed")
        tensor = self[name] if index is None else self[name][index]
        stamp = self._stamps.get(name, 0)
        return BorrowedOutput(name, tensor, stamp, lifetime, lambda: self._stamps.get(name, 0), debug)
