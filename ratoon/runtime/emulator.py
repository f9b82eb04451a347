# Owns: the emulator that gives a CPU the semantics of a CUDA graph.
# Promises: replays run the recorded ops and no Python of the captured function, into the captured tensors.
# Never: lets pass in capture what a GPU would refuse or bake; leaves undeclared memory readable after a replay.
"""CPU stand-in for CUDA graphs: host numbers bake, moved buffers go stale and None bites, as on a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratoon.runtime.buffers import ContractError, describe

aten = torch.ops.aten

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_SKIPPED_FILES = (_TORCH_ROOT, __file__, os.path.join(os.path.dirname(__file__), "graphs.py"))

# Seen by the function mode: a plain dispatch recorder does not see .tolist() or .numpy() at all.
_HOST_READS = {
    getattr(torch.Tensor, name): name
    for name in (
        *("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__index__", "__float__", "__complex__"),
        *("__array__", "__contains__", "__format__", "__repr__", "pin_memory", "is_nonzero"),
    )
}
_BAKING = {  # the function and the place of its data among the arguments
    **{fn: 0 for fn in (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)},
    torch.Tensor.new_tensor: 1,
}
_SETITEM = torch.Tensor.__setitem__
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_METHODS = {"copy_", "fill_", "zero_", "add_", "sub_", "mul_", "div_", "masked_fill_", "index_copy_", "scatter_"}
_COPIES = {aten.clone.default, aten._to_copy.default}


class CaptureError(ContractError):
    """The captured function did what a CUDA graph cannot record."""


class HostReadError(CaptureError):
    """A tensor's value was read on the host inside capture."""


class BakedTensorError(CaptureError):
    """A tensor was made from Python data inside capture, so its value would be frozen in every replay."""


class UndeclaredTensorError(CaptureError):
    """A graph read or wrote a tensor that is neither declared in the table nor made inside the capture."""


class ReplayError(ContractError):
    """A recorded op failed in a replay; the message names the op and the line that recorded it."""


@dataclass(frozen=True)
class Node:
    """One recorded op: its name, the user's line, and the call that a replay makes."""

    name: str
    where: str
    call: Callable[[], Any]


@dataclass(repr=False, eq=False)
class EmulatedGraph:
    """A captured function: nodes to run in order and the memory to spoil afterwards."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[Callable[[], Any]] = field(default_factory=list)
    spoil: list[tuple[int, int, int]] = field(default_factory=list)
    baked: list[str] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    num_views: int = 0


def _user_line() -> str:
    """file:line of the innermost frame that belongs neither to torch nor to the graph machinery."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_SKIPPED_FILES) and not path.startswith("<"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _plain_name(func: OpOverload) -> str:
    return func._schema.name.removeprefix("aten::")


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The argument tensors that the op's schema says are written."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs[argument.name] if argument.name in kwargs else args[place] if place < len(args) else None
            yield from _tensors(value)


def _argument(func: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Value of a named schema argument, its default included; None where the op has no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if name in kwargs:
                return kwargs[name]
            return args[place] if place < len(args) else argument.default_value
    return None


# ---- what capture refuses ----


def _has_mask_index(func: OpOverload, args: Sequence[Any]) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1:2]))


def _refusal(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CaptureError | None:
    """Why a GPU could not capture this op, or None."""
    name, tags = _plain_name(func), func.tags
    if name in _INDEXING:
        if _has_mask_index(func, args):
            return CaptureError("boolean-mask indexing has a data-dependent size: use torch.where or masked_fill")
        return None
    if name == "equal" or torch.Tag.data_dependent_output in tags:
        return HostReadError("reads a tensor's value on the host: keep the decision on the device")
    if torch.Tag.dynamic_output_shape in tags and _argument(func, "output_size", args, kwargs) is None:
        return CaptureError("has an output whose size depends on data: use a fixed size and a mask")
    if torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs):
        return CaptureError("draws from torch's random state: use counter-based noise (ops/sample.py)")
    if name in ("set_", "resize_", "resize_as_") or (torch.Tag.inplace_view in tags and name != "detach_"):
        return CaptureError("changes a tensor's metadata in place, which a replay would not repeat")
    return None


def _draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention ops carry the random tag for a dropout that inference leaves at zero."""
    return _plain_name(func) != "_fused_sdp_choice" and _argument(func, "dropout_p", args, kwargs) != 0.0


def _moves_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    targets = [*args[1:], kwargs.get("device")]
    return any(isinstance(to, torch.device | str) for to in targets)


class _HostGuard(TorchFunctionMode):
    """Refuses, by name and line, what never reaches the dispatcher or reaches it without a name."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.suspended or isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func in _HOST_READS:
            raise HostReadError(f"{_user_line()}: {_HOST_READS[func]} reads a tensor on the host inside capture")
        if func is torch.Tensor.to and _moves_device(args, kwargs):
            raise HostReadError(f"{_user_line()}: .to(device) inside capture moves a tensor: make it where it lives")
        if func in _BAKING and not any(isinstance(data, Tensor) for data in args[_BAKING[func] :][:1]):
            recorder.note_baked(func.__name__)
            with recorder.literal():
                return func(*args, **kwargs)
        if func is _SETITEM and isinstance(args[2], int | float) and not _has_data_index(args[1]):
            with recorder.literal():  # x[0] = 1.0 is a fill with a number, not a tensor made from data
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _has_data_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(not isinstance(part, int | slice | Tensor | None | type(Ellipsis)) for part in parts)


# ---- recording ----


class _Recorder(TorchDispatchMode):
    """Turns every op into a node; knows which storages were made inside the capture."""

    def __init__(self, declared: Mapping[int, str], allow_baked: bool, allow_undeclared: bool) -> None:
        super().__init__()
        self.declared = declared
        self.allow_baked = allow_baked
        self.allow_undeclared = allow_undeclared
        self.graph = EmulatedGraph()
        self.suspended = False
        self._literal_depth = 0
        self._made: dict[int, Tensor] = {}
        self._constants: set[int] = set()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def literal(self) -> _Literal:
        return _Literal(self)

    def note_baked(self, name: str) -> None:
        """A tensor is being made from Python data."""
        report = f"{_user_line()}: {name} makes a tensor from Python data inside capture; replays keep its first value"
        if not self.allow_baked:
            raise BakedTensorError(f"{report}. Make it an input of the buffer table, or a bound constant.")
        if report not in self.graph.baked:
            self.graph.baked.append(report)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # inference mode hands composite ops over whole, and a nonzero may hide inside one
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._lift(func, args, kwargs)
        refusal = _refusal(func, args, kwargs)
        if refusal is not None:
            raise type(refusal)(f"{_user_line()}: {func} {refusal}")
        inputs = {_storage_id(tensor) for tensor in self._known(func, args, kwargs)}
        self._save_before(_written(func, args, kwargs))
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result, inputs)
        return result

    def _lift(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """A tensor that C++ made from Python data: a list used as an index, from_numpy, torch.Tensor([..])."""
        if not self._literal_depth:
            self.note_baked("a list, array or legacy constructor")
        result = func(*args, **kwargs)
        self._constants.update(_storage_id(tensor) for tensor in _tensors((args, result)))
        self.graph.keep.append((args, result))
        return result

    def _known(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """All argument tensors; raises UndeclaredTensorError for one that nobody declared."""
        tensors = _tensors((args, kwargs))
        for tensor in tensors:
            identity = _storage_id(tensor)
            if self.allow_undeclared or identity in self._made or identity in self.declared:
                continue
            if identity not in self._constants:
                raise UndeclaredTensorError(
                    f"{_user_line()}: {func} uses a tensor {describe(tensor)} that is neither declared in "
                    "the buffer table nor made inside this capture (also: from another graph's capture, or by "
                    "torch.frombuffer). Declare it: bind() for weights and constants, a BufferSpec for the rest."
                )
        return tensors

    def _save_before(self, written: Iterator[Tensor]) -> None:
        """Keep what outside memory holds before its first write: a capture executes nothing, so it is put back."""
        for tensor in written:
            identity = _storage_id(tensor)
            if identity not in self._made and identity not in self._saved:
                storage = tensor.untyped_storage()
                self._saved[identity] = (storage, storage.clone())

    def _record(self, func: OpOverload, args: Any, kwargs: Any, result: Any, inputs: set[int]) -> None:
        outputs = _tensors(result)
        fresh = [tensor for tensor in outputs if _storage_id(tensor) not in inputs]
        for tensor in fresh:
            self._made.setdefault(_storage_id(tensor), tensor)
        self.graph.keep.append(outputs)
        if not fresh and not func._schema.is_mutable:
            self.graph.num_views += bool(outputs)
            return  # a view of memory that the replay refreshes anyway, or a number made from shapes
        if _plain_name(func) in _UNFILLED:
            return  # a GPU records no kernel for it either
        call = _into(func, args, kwargs, outputs, fresh) if fresh else _in_place(func, args, kwargs)
        self.add(str(func), call)

    def add(self, name: str, call: Callable[[], Any]) -> None:
        self.graph.nodes.append(Node(name, _user_line(), call))
        self.graph.calls.append(call)

    def record_call(self, fn: Callable[..., None], args: Sequence[Any]) -> None:
        """One opaque node, for example a kernel launch: fn writes into its arguments and returns None."""
        touched = self._known(getattr(fn, "__name__", fn), args, {})
        self.suspended = True
        try:
            self._save_before(iter(touched))
            returned = fn(*args)
        finally:
            self.suspended = False
        if returned is not None:
            raise CaptureError(f"{_user_line()}: a launch must write into its arguments and return None")
        self.add(getattr(fn, "__name__", "call"), partial(fn, *args))

    def finish(self) -> EmulatedGraph:
        """The graph, with the memory to spoil after each replay."""
        for tensor in self._made.values():
            storage = tensor.untyped_storage()
            byte = 0xFF if tensor.dtype.is_floating_point else 0x01 if tensor.dtype == torch.bool else 0x7F
            if storage.nbytes():
                self.graph.spoil.append((storage.data_ptr(), byte, storage.nbytes()))
        return self.graph

    def restore(self) -> None:
        """Undo the capture's own writes to outside memory."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)


class _Literal:
    """While open, numbers lifted by the dispatcher are literals of the program or already reported."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        self.recorder._literal_depth += 1

    def __exit__(self, *exc: object) -> None:
        self.recorder._literal_depth -= 1


# ---- replaying results into the captured tensors ----


def _into(func: OpOverload, args: Any, kwargs: Any, outputs: list[Tensor], fresh: list[Tensor]) -> Callable[[], Any]:
    """A call that re-runs the op and leaves its fresh results in the tensors made at capture."""
    if not _tensors((args, kwargs)) and len(outputs) == 1:
        return partial(outputs[0].copy_, outputs[0].clone())  # made from numbers alone, and draws are refused
    if func in _COPIES:
        return partial(outputs[0].copy_, args[0])
    if len(fresh) == len(outputs) and not func._schema.is_mutable:
        for write in _writers(func):
            if _same_bits(write, args, kwargs, outputs):
                return partial(write, *args, **kwargs, out=outputs[0] if len(outputs) == 1 else outputs)
    if len(outputs) == 1:
        return _CopyOne(partial(func, *args, **kwargs), outputs[0])
    kept = [any(tensor is one for one in fresh) for tensor in outputs]
    return _CopyMany(partial(func, *args, **kwargs), outputs, kept)


def _in_place(func: OpOverload, args: Any, kwargs: Any) -> Callable[[], Any]:
    """The recorded call itself; through the tensor's method where that is the same and saves the boxed call."""
    name = _plain_name(func)
    if name in _METHODS and args and isinstance(args[0], Tensor):
        return partial(getattr(args[0], name), *args[1:], **kwargs)
    return partial(func, *args, **kwargs)


@dataclass(frozen=True)
class _CopyOne:
    call: Callable[[], Any]
    target: Tensor

    def __call__(self) -> None:
        result = self.call()
        self.target.copy_(result if isinstance(result, Tensor) else _tensors(result)[0])


@dataclass(frozen=True)
class _CopyMany:
    call: Callable[[], Any]
    targets: list[Tensor]
    kept: list[bool]

    def __call__(self) -> None:
        for target, result, keep in zip(self.targets, _tensors(self.call()), self.kept, strict=True):
            if keep:
                target.copy_(result)


def _writers(func: OpOverload) -> Iterator[Callable[..., Any]]:
    """Functions of the op's own arguments and `out`: torch's binding (2 us less per call), then the overload."""
    names = _out_names(func)
    if not names:
        return
    plain = getattr(torch, _plain_name(func), None)
    if plain is not None and names[1] == ["out"]:
        yield plain
    overload, outs = names
    if outs == ["out"]:
        yield overload
    else:
        yield lambda *args, out, **kwargs: overload(*args, **kwargs, **dict(zip(outs, out, strict=True)))


def _out_names(func: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The overload with the same arguments that writes into given tensors, and the names of those."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func._overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        plain = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if outs and plain == wanted and len(outs) == len(func._schema.returns):
            return candidate, outs
    return None


def _same_bits(write: Callable[..., Any], args: Any, kwargs: Any, outputs: list[Tensor]) -> bool:
    """Try the writing form once: some round or lay out their result differently from the plain op."""
    trial = [torch.empty_like(tensor) for tensor in outputs]
    try:
        write(*args, **kwargs, out=trial[0] if len(trial) == 1 else trial)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(trial, outputs, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---- the backend ----


class EmulatorBackend:
    """Captures and replays on CPU. Same interface as CudaBackend.

    spoil: overwrite undeclared intermediates after each replay (NaN; integers and bools a sentinel).
    allow_baked: collect tensors made from Python data in the graph's `baked` list instead of raising.
    allow_undeclared: do without a buffer table (toy functions).
    on_capture: called with `record_call` when a capture opens and with None when it closes, so that the one
    launch function of the ops room can hand its launches over.
    """

    name = "emulator"

    def __init__(
        self,
        spoil: bool = True,
        allow_baked: bool = False,
        allow_undeclared: bool = False,
        on_capture: Callable[[Callable[..., None] | None], None] | None = None,
    ) -> None:
        self.spoil = spoil
        self.allow_baked = allow_baked
        self.allow_undeclared = allow_undeclared
        self._on_capture = on_capture
        self._recorder: _Recorder | None = None

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Run the function for real, as a GPU must before capture."""
        with torch.inference_mode():
            for _ in range(times):
                fn()

    def capture(self, fn: Callable[[], Any], declared: Mapping[int, str]) -> EmulatedGraph:
        """Record fn's ops. Outside memory is left as it was. Raises CaptureError naming op and line."""
        self._recorder = recorder = _Recorder(declared, self.allow_baked, self.allow_undeclared)
        self._tell(self.record_call)
        try:
            with torch.inference_mode(), _HostGuard(recorder), recorder:
                fn()
        finally:
            self._tell(None)
            self._recorder = None
            recorder.restore()
        graph = recorder.finish()
        self._spoil(graph)
        return graph

    def _tell(self, record: Callable[..., None] | None) -> None:
        if self._on_capture is not None:
            self._on_capture(record)

    def record_call(self, fn: Callable[..., None], *args: Any) -> None:
        """Run fn(*args) and record it as one node. fn may write any tensor among args and returns None."""
        if self._recorder is None:
            raise CaptureError("record_call is for launches inside a capture; call the function itself elsewhere")
        self._recorder.record_call(fn, args)

    def replay(self, graph: EmulatedGraph) -> None:
        """Run the recorded calls. Raises ReplayError naming the op that failed."""
        done = 0
        try:
            with torch.inference_mode():
                for call in graph.calls:
                    call()
                    done += 1
        except (RuntimeError, IndexError, ValueError) as error:
            node = graph.nodes[done]
            raise ReplayError(f"replay failed in op {done}, {node.name}, recorded at {node.where}: {error}") from error
        self._spoil(graph)

    def _spoil(self, graph: EmulatedGraph) -> None:
        """A real pool would hand this memory to the next graph."""
        if self.spoil:
            memset = ctypes.memset
            for address, byte, nbytes in graph.spoil:
                memset(address, byte, nbytes)

    def release(self, graph: EmulatedGraph) -> None:
        """Forget a graph's nodes and memory."""
        graph.spoil.clear()
        graph.calls.clear()
        graph.nodes.clear()
        graph.keep.clear()

    def reset(self) -> None:
        """Nothing is shared between emulated graphs."""
