# Owns: tests of the emulator: what a replay computes, what capture refuses, what it leaves readable.
# Promises: each op that a GPU could not capture is refused by name and line.
# Never: needs the buffer table's checks (tests/cpu/test_graphs.py).
from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratoon.runtime.buffers import BufferSpec, BufferTable
from ratoon.runtime.emulator import (
    BakedTensorError,
    CaptureError,
    EmulatorBackend,
    HostReadError,
    ReplayError,
    UndeclaredTensorError,
)


def toy(**options: Any) -> EmulatorBackend:
    return EmulatorBackend(allow_undeclared=True, **options)


def replayed(fn: Callable[[], Any], change: Callable[[], Any], *outputs: Tensor) -> None:
    """Capture fn, change its inputs, and hold the replay against fn itself, bit for bit; three times."""
    backend = toy()
    graph = backend.capture(fn, {})
    for _ in range(3):
        change()
        before = [tensor.clone() for tensor in outputs]
        with torch.inference_mode():
            fn()
        want = [tensor.clone() for tensor in outputs]
        for tensor, old in zip(outputs, before, strict=True):
            tensor.copy_(old)
        backend.replay(graph)
        for tensor, expected in zip(outputs, want, strict=True):
            assert torch.equal(tensor, expected)


# ---- replay computes what the function computes ----


def test_views_and_in_place_writes_reach_their_memory() -> None:
    x, y, out = torch.randn(4, 6), torch.randn(4, 6), torch.zeros(4, 6)

    def fn() -> None:
        mine = x.clone()
        view = mine.view(2, 2, 6).transpose(0, 1)[:, 0]
        view.mul_(3.0)  # a view of a view of an intermediate
        mine[1:3].add_(y[1:3])
        mine.t()[0] = 5.0
        mine.reshape(-1)[3:5].copy_(y.flatten()[3:5])
        out[1:].copy_(mine[1:])  # part of a declared buffer
        out[0].zero_()

    replayed(fn, lambda: (x.normal_(), y.normal_()), out)


def test_reshape_is_a_view_or_a_copy_by_storage() -> None:
    x, out = torch.randn(3, 4), torch.zeros(2, 12)

    def fn() -> None:
        base = x * 1.0
        same, copied = base.reshape(12), base.t().reshape(12)
        base.add_(1.0)  # seen through the first only
        out[0].copy_(same)
        out[1].copy_(copied)

    replayed(fn, x.normal_, out)


def test_lists_tuples_out_variants_and_mutating_lists() -> None:
    x, out = torch.randn(4, 6), torch.zeros(5, 6)

    def fn() -> None:
        left, right = x.split(3, dim=1)
        values, order = torch.cat([right, left], 1).topk(3)
        low, high = torch.aminmax(x, dim=1)
        rows = torch.empty(4, 3)
        torch.mul(values, order, out=rows)
        parts = [rows.clone(), rows + 1]
        torch._foreach_mul_(parts, 2.0)  # type: ignore[attr-defined]
        out[:4, :3].copy_(parts[0] + parts[1])
        out[:4, 3].copy_(high - low)
        out[:4, 4].copy_(x.sort(dim=1).values[:, 1])
        out[:4, 5].copy_(x.max(dim=1)[1])

    replayed(fn, x.normal_, out)


def test_casts_constants_and_scalars() -> None:
    x, out = torch.randn(4, 6), torch.zeros(4, 6)

    def fn() -> None:
        half = x.to(torch.bfloat16)
        ramp = torch.arange(6) * 2
        half[0] = 1.5
        mask = torch.ones(4, 6, dtype=torch.bool).tril()
        zero = torch.zeros(4, 6)
        zero += half.float()
        out.copy_(torch.where(mask, zero + ramp, torch.full_like(zero, -2.0)))

    replayed(fn, x.normal_, out)


def test_parts_of_a_transformer() -> None:
    hidden, weight, bias = torch.randn(5, 8), torch.randn(24, 8), torch.randn(24)
    table, ids, out = torch.randn(9, 8), torch.zeros(5, dtype=torch.int64), torch.zeros(5, 8)
    slots = torch.zeros(5, dtype=torch.int64)
    cache = torch.zeros(12, 8)

    def fn() -> None:
        h = hidden + F.embedding(ids, table)
        q, k, v = F.linear(F.rms_norm(h, (8,)), weight, bias).view(5, 3, 2, 4).permute(1, 2, 0, 3)
        cache.index_copy_(0, slots, k.transpose(0, 1).reshape(5, 8))
        keys = cache[:5].view(5, 2, 4).transpose(0, 1)
        attended = F.scaled_dot_product_attention(q[None], keys[None], v[None], is_causal=True)[0]
        out.copy_(torch.einsum("nth,nth->th", attended, q).repeat(1, 2).softmax(-1).cumsum(0))

    def change() -> None:
        hidden.normal_()
        ids.copy_(torch.randint(9, (5,)))
        slots.copy_(torch.randperm(12)[:5])

    replayed(fn, change, out, cache)


_STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * 0.5,
    lambda a, b: (a @ b.t()).softmax(-1),
    lambda a, b: a.t(),
    lambda a, b: a.t().reshape(4, 4),
    lambda a, b: a.view(2, 8).reshape(4, 4) if a.is_contiguous() else a.contiguous(),
    lambda a, b: a.add_(b.clone()),
    lambda a, b: (a[:2].mul_(-1.0), a)[1],
    lambda a, b: torch.cat([a[2:], b[:2]]),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.gather(1, b.argsort(dim=1)),
    lambda a, b: a.index_select(0, b[:, 0].argsort()),
    lambda a, b: a.masked_fill(b < 0, 0.25),
    lambda a, b: a.to(torch.bfloat16).to(torch.float32),
    lambda a, b: a.scatter(0, b.argsort(dim=0), a),
    lambda a, b: a.unbind(0)[1].expand(4, 4),
    lambda a, b: torch.stack([a.sum(0), b.amax(1), a.mean(1), b[0]]),
    lambda a, b: a.max(dim=0)[0] * b,
)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    choice = random.Random(seed)
    steps = [(choice.choice(_STEPS), choice.randrange(100), choice.randrange(100)) for _ in range(25)]
    x, y, out = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4)

    def fn() -> None:
        values = [x.clone(), y.clone()]
        for step, left, right in steps:
            a, b = values[-1 - left % min(4, len(values))], values[-1 - right % min(4, len(values))]
            a = a.contiguous() if a.stride()[0] == 0 else a  # in-place on an expanded row is refused by torch
            values.append(step(a, b))
        out.copy_(values[-1])
        y.copy_(values[-2])  # a later replay starts from what this one left

    replayed(fn, x.normal_, out, y)


# ---- the semantics of a graph ----


def test_capture_executes_nothing_that_lasts() -> None:
    state, cache = torch.zeros(3), torch.ones(2, 2)
    backend = toy()
    graph = backend.capture(lambda: (state.add_(1.0), cache[0].zero_()), {})
    assert state.tolist() == [0.0] * 3 and cache.tolist() == [[1.0, 1.0]] * 2
    backend.replay(graph)
    backend.replay(graph)
    assert state.tolist() == [2.0] * 3 and cache.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_capture_that_fails_leaves_outside_memory_as_it_was() -> None:
    state = torch.zeros(3)
    with pytest.raises(HostReadError):
        toy().capture(lambda: state.add_(1.0).tolist(), {})
    assert state.tolist() == [0.0] * 3
    assert (state + torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0], "no mode may stay open"


def test_python_does_not_run_again() -> None:
    calls, x, out = [], torch.zeros(1), torch.zeros(1)
    options = types.SimpleNamespace(scale=2.0, extra=None)

    def fn() -> None:
        calls.append(1)
        out.copy_(x * options.scale if options.extra is None else x * options.extra)

    backend = toy()
    graph = backend.capture(fn, {})
    options.scale, options.extra = 100.0, torch.ones(1)
    x.fill_(3.0)
    backend.replay(graph)
    assert calls == [1] and out.item() == 6.0, "host numbers and None are frozen, as on a GPU"


def test_replay_reads_the_memory_of_capture_when_a_buffer_was_rebound() -> None:
    holder, out = {"x": torch.ones(2)}, torch.zeros(2)
    backend = toy()
    graph = backend.capture(lambda: out.copy_(holder["x"]), {})
    holder["x"] = torch.full((2,), 9.0)
    backend.replay(graph)
    assert out.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("spoil", [True, False])
def test_intermediates_are_spoiled_after_capture_and_replay(spoil: bool) -> None:
    x, out, leaked = torch.ones(3), torch.zeros(3), []

    def fn() -> None:
        big = x * 2
        leaked.extend((big, big.to(torch.bfloat16), big.to(torch.int64), big.to(torch.int32), big > 5, big.view(3, 1)))
        out.copy_(big)

    backend = toy(spoil=spoil)
    graph = backend.capture(fn, {})
    for _ in range(2):
        floats, integers = (leaked[0], leaked[1], leaked[5]), (leaked[2], leaked[3])
        assert all(bool(tensor.isnan().all()) == spoil for tensor in floats)
        assert all(bool((tensor > 2**30).all()) == spoil for tensor in integers)
        assert bool(leaked[4].all()) == spoil
        backend.replay(graph)
        assert out.tolist() == [2.0, 2.0, 2.0]


def test_fault_memory_that_is_read_before_the_replay_wrote_it() -> None:
    out, calls = torch.zeros(2), []

    def fn() -> None:
        half = torch.empty(2)
        half[0] = 1.0  # half[1] is whatever the pool held
        if not calls:
            calls.append(half)
        out.copy_(half)

    backend = toy()
    backend.replay(backend.capture(fn, {}))
    assert out[0].item() == 1.0 and bool(out[1].isnan())


def test_replay_error_names_op_and_line() -> None:
    index, table, out = torch.zeros(1, dtype=torch.int64), torch.randn(4), torch.zeros(1)
    backend = toy()
    graph = backend.capture(lambda: out.copy_(table[index]), {})
    index.fill_(4)
    with pytest.raises(ReplayError, match=r"aten.index.Tensor, recorded at .*test_emulator.py:\d+: index 4"):
        backend.replay(graph)


def test_release_frees_the_graph() -> None:
    backend, x = toy(), torch.ones(2)
    graph = backend.capture(lambda: x + 1, {})
    backend.release(graph)
    assert not graph.nodes and not graph.calls and not graph.keep and not graph.spoil
    backend.reset()


def test_one_node_per_launch() -> None:
    told: list[Any] = []
    backend = toy(on_capture=told.append)
    x, out = torch.ones(3), torch.zeros(3)

    def kernel(source: Tensor, target: Tensor, scale: float) -> None:
        target.copy_(source * scale if source.sum().item() > 0 else source)  # device code: host rules do not apply

    def launch(*args: Any) -> None:
        told[-1](kernel, *args) if told and told[-1] is not None else kernel(*args)

    def fn() -> None:
        doubled = x * 2.0
        launch(doubled, out, 3.0)

    graph = backend.capture(fn, {})
    assert [node.name for node in graph.nodes] == ["aten.mul.Tensor", "kernel"] and "test_emulator" in graph.nodes[
        1
    ].where
    assert len(told) == 2 and told[1] is None and out.tolist() == [0.0] * 3
    x.fill_(2.0)
    backend.replay(graph)
    assert out.tolist() == [12.0] * 3
    fn()
    with pytest.raises(CaptureError, match="inside a capture"):
        backend.record_call(kernel, x, out, 1.0)
    with pytest.raises(CaptureError, match="return None"):
        backend.capture(lambda: told[-1](torch.add, x, out), {})


# ---- what capture refuses ----

X = torch.arange(12.0).view(3, 4)
I = torch.arange(3)  # noqa: E741


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tolist", lambda: X.tolist()),
        ("numpy", lambda: X.numpy()),
        ("__array__", lambda: np.asarray(X)),
        ("item", lambda: X[0, 0].item()),
        ("__bool__", lambda: 1 if X[0, 0] else 2),
        ("__bool__", lambda: max(X[0, 0], X[0, 1])),
        ("__int__", lambda: int(X[0, 0])),
        ("__index__", lambda: range(I[0])),
        ("_local_scalar_dense", lambda: X[: I[1]]),
        ("__float__", lambda: float(X[0, 0])),
        ("__complex__", lambda: complex(X[0, 0])),
        ("__contains__", lambda: 3.0 in X),
        ("__format__", lambda: f"{X[0, 0]}"),
        ("__repr__", lambda: repr(X)),
        ("cpu", lambda: X.cpu()),
        (".to(device)", lambda: X.to("cpu")),
        (".to(device)", lambda: X.to(torch.device("cpu"), torch.float64)),
        (".to(device)", lambda: X.to(device="cpu")),
        ("_local_scalar_dense", lambda: torch.is_nonzero(X[0, 0])),
        ("_local_scalar_dense", lambda: F.one_hot(I)),
        ("aten.equal", lambda: torch.equal(X, X)),
        ("allclose", lambda: torch.allclose(X, X)),
    ],
)
def test_host_reads_are_refused_by_name(name: str, read: Callable[[], Any]) -> None:
    with pytest.raises(HostReadError) as caught:
        toy().capture(read, {})
    assert name in str(caught.value) and "test_emulator.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nonzero", lambda: X.nonzero()),
        ("nonzero", lambda: torch.where(X > 1)),
        ("nonzero", lambda: torch.argwhere(X)),
        ("boolean-mask", lambda: X[X > 1]),
        ("boolean-mask", lambda: X.clone().__setitem__(X > 1, 0.0)),
        ("boolean-mask", lambda: X.clone().index_put_((X > 1,), torch.zeros(()))),
        ("masked_select", lambda: X.masked_select(X > 1)),
        ("unique", lambda: X.unique()),
        ("unique", lambda: torch.unique_consecutive(X)),
        ("bincount", lambda: torch.bincount(I)),
        ("repeat_interleave", lambda: torch.repeat_interleave(I, I)),
        ("in place", lambda: X.clone().t_()),
        ("in place", lambda: X.clone().resize_(2)),
        ("in place", lambda: torch.zeros(3, 4).set_(X)),  # type: ignore[call-overload]
        ("random state", lambda: torch.rand(3)),
        ("random state", lambda: X.clone().normal_()),
        ("random state", lambda: torch.multinomial(torch.ones(3), 1)),
        ("random state", lambda: F.dropout(X, 0.5)),
        (
            "random state",
            lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None], None, 0.5),
        ),
    ],
)
def test_ops_without_a_fixed_size_or_replayable_result_are_refused(name: str, op: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        toy().capture(op, {})
    assert name in str(caught.value) and "test_emulator.py:" in str(caught.value)


@pytest.mark.parametrize(
    "op",
    [
        lambda: X[I],
        lambda: X[:, None, 1:],
        lambda: X.clone().index_put_((I,), X),
        lambda: torch.nonzero_static(X, size=4),
        lambda: torch.repeat_interleave(I, I, output_size=3),
        lambda: F.dropout(X, 0.5, training=False),
        lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
        lambda: X.to(torch.bfloat16),
        lambda: X.to(I),
        lambda: [len(X), X.shape, X.numel(), list(X)],
        lambda: X.clone().__setitem__(0, 5.0),
        lambda: X.clone().__setitem__((slice(0, 2), I), 5.0),
        lambda: torch.as_tensor(X),
        lambda: torch.full((2,), 3.0),
    ],
)
def test_what_a_graph_can_record_is_let_through(op: Callable[[], Any]) -> None:
    toy().capture(op, {})


BAKED: list[tuple[str, Callable[[], Any]]] = [
    ("tensor", lambda: torch.tensor([1.0, 2.0])),
    ("tensor", lambda: torch.tensor(3)),
    ("as_tensor", lambda: torch.as_tensor([1, 2])),
    ("asarray", lambda: torch.asarray([1, 2])),
    ("scalar_tensor", lambda: torch.scalar_tensor(3.0)),
    ("new_tensor", lambda: X.new_tensor([1.0])),
    ("array", lambda: torch.from_numpy(np.ones(2)) + 1),
    ("legacy constructor", lambda: torch.LongTensor([1, 2]) + 1),
    ("list", lambda: X[[0, 2]]),
    ("list", lambda: X.clone().__setitem__([0, 2], 5.0)),
]


@pytest.mark.parametrize(("name", "make"), BAKED)
def test_fault_a5_tensors_from_python_data_are_refused_as_baked(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(BakedTensorError) as caught:
        toy().capture(make, {})
    assert name in str(caught.value) and "test_emulator.py:" in str(caught.value)


@pytest.mark.parametrize(("name", "make"), BAKED)
def test_baked_tensors_are_listed_where_allowed(name: str, make: Callable[[], Any]) -> None:
    graph = toy(allow_baked=True).capture(make, {})
    assert len(graph.baked) == 1 and name in graph.baked[0] and "test_emulator.py:" in graph.baked[0]


def test_fault_a5_baked_length_keeps_its_first_value() -> None:
    lengths, x, out = [2], torch.arange(4.0), torch.zeros(1)

    def fn() -> None:
        out.copy_((x * (torch.arange(4) < torch.tensor(lengths))).sum())

    with pytest.raises(BakedTensorError):
        toy().capture(fn, {})
    backend = toy(allow_baked=True)
    graph = backend.capture(fn, {})
    lengths[0] = 4
    backend.replay(graph)
    assert out.item() == 1.0, "frozen at length 2"


# ---- clause 1: declared tensors only ----


def declared_table() -> BufferTable:
    specs = [BufferSpec("x", (4,), torch.float32, "input"), BufferSpec("y", (4,), torch.float32, "output")]
    return BufferTable(specs)


def test_fault_undeclared_tensors_are_refused_by_line() -> None:
    table, module, backend = declared_table(), nn.Linear(4, 4), EmulatorBackend()

    def fn() -> None:
        table["y"].copy_(module(table["x"]))

    with pytest.raises(UndeclaredTensorError, match=r"float32 \[4, 4\].*bind\(\)"):
        backend.capture(fn, table.storages())
    table.bind_module("net", module)
    graph = backend.capture(fn, table.storages())
    table.fill({"x": torch.ones(4)})
    backend.replay(graph)
    with torch.inference_mode():
        assert torch.equal(table["y"], module(torch.ones(4)))


def test_allowed_baked_tensors_count_as_declared() -> None:
    table, backend = declared_table(), EmulatorBackend(allow_baked=True)
    graph = backend.capture(lambda: table["y"].copy_(table["x"] * torch.tensor([1.0, 2.0, 3.0, 4.0])), table.storages())
    table.fill({"x": torch.ones(4)})
    backend.replay(graph)
    assert table["y"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_fault_intermediate_of_another_graph_is_refused() -> None:
    table, backend, kept = declared_table(), EmulatorBackend(), []
    backend.capture(lambda: kept.append(table["x"] * 2), table.storages())
    with pytest.raises(UndeclaredTensorError, match="another graph's capture"):
        backend.capture(lambda: table["y"].copy_(kept[0]), table.storages())


def test_undeclared_targets_and_launch_arguments_are_refused() -> None:
    table, backend, other = declared_table(), EmulatorBackend(), torch.zeros(4)
    with pytest.raises(UndeclaredTensorError):
        backend.capture(lambda: other.copy_(table["x"]), table.storages())
    with pytest.raises(UndeclaredTensorError):
        backend.capture(lambda: backend.record_call(lambda a: None, other), table.storages())
    with pytest.raises(UndeclaredTensorError, match="frombuffer"):
        backend.capture(
            lambda: table["y"].copy_(torch.frombuffer(bytearray(16), dtype=torch.float32)), table.storages()
        )


def test_warm_up_runs_for_real() -> None:
    state = torch.zeros(1)
    toy().warm_up(lambda: state.add_(1.0), 3)
    assert state.item() == 3.0
