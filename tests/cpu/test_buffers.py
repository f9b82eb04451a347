# Owns: tests of declared buffers, fills, canaries, borrowed outputs and the staging ring.
# Promises: every refusal is checked by what its message names.
# Never: needs a graph.
from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratoon.runtime.buffers import (
    CANARY,
    GUARD_BYTES,
    BufferSpec,
    BufferTable,
    ContractError,
    StaleOutputError,
    poison,
    sentinel,
)
from ratoon.runtime.graphs import GraphKey
from ratoon.runtime.readback import Readback
from ratoon.runtime.staging import Event, StagingRing


def make_table(**changes: Any) -> BufferTable:
    specs = [
        BufferSpec("seats", (5,), torch.int32, "input", need=lambda key: key.rows + 1),
        BufferSpec("position", (8,), torch.int64, "input", pad=-1, need=lambda key: key.places),
        BufferSpec("scale", (4, 3), torch.bfloat16, "input", pad=1.0),
        BufferSpec("flag", (3,), torch.bool, "input", pad=1),
        BufferSpec("start", (6,), torch.int64, "state"),
        BufferSpec("pages", (2, 7, 3), torch.float32, "kv", dummy_dim=1, dummy_len=2),
        BufferSpec("tokens", (2, 4), torch.int32, "output", pad=-1),
        BufferSpec("partial", (9,), torch.float32, "scratch"),
        BufferSpec("chunk", (4,), torch.int64, "input", group="prefill"),
    ]
    return BufferTable(specs, **changes)


def inputs(rows: int = 2, places: int = 3) -> dict[str, Tensor | None]:
    return {
        "seats": torch.arange(1, rows + 1, dtype=torch.int32),
        "position": torch.arange(places) + 10,
        "scale": torch.full((rows, 3), 2.5, dtype=torch.bfloat16),
        "flag": torch.zeros(1, dtype=torch.bool),
    }


KEY = GraphKey(rows=3, places=6, block=4)


def test_fill_writes_live_prefixes_and_pads_every_tail() -> None:
    table = make_table()
    table.fill(inputs(rows=4, places=8))
    table.poison("input")
    table.fill(inputs(rows=2, places=3), live={"position": 2})
    assert table["seats"].tolist() == [1, 2, 0, 0, 0]
    assert table["position"].tolist() == [10, 11, -1, -1, -1, -1, -1, -1]
    assert table["scale"].float().tolist() == [[2.5] * 3] * 2 + [[1.0] * 3] * 2
    assert table["flag"].tolist() == [False, True, True]


def test_fill_leaves_state_outputs_and_other_groups_alone() -> None:
    table = make_table()
    for name in ("start", "pages", "tokens", "partial", "chunk"):
        table[name].fill_(7)
    table.fill(inputs())
    for name in ("start", "pages", "tokens", "partial", "chunk"):
        assert bool((table[name] == 7).all()), name
    table.fill({"chunk": torch.tensor([3])}, group="prefill")
    assert table["chunk"].tolist() == [3, 0, 0, 0]


def test_pad_values_stand_before_the_first_fill() -> None:
    table = make_table()
    assert table["position"].tolist() == [-1] * 8 and bool((table["tokens"] == -1).all())


@pytest.mark.parametrize("absent", [True, False])
def test_fault_a1_missing_input_is_named_before_anything_is_written(absent: bool) -> None:
    table = make_table()
    given = inputs()
    if absent:
        del given["position"]
    else:
        given["position"] = None
    with pytest.raises(ContractError) as caught:
        table.fill(given, key=KEY, mode="staged")
    message = str(caught.value)
    for part in (str(KEY), "mode staged", "'position'", "int64 [8]", "nothing" if absent else "supplied None", "never"):
        assert part in message, part
    assert table["seats"].tolist() == [0] * 5, "a refused fill must write nothing"


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("position", torch.zeros(3, dtype=torch.int32), ("dtype differs", "int32 [3]")),
        ("scale", torch.zeros(2, 4, dtype=torch.bfloat16), ("only the first dimension", "[2, 4]")),
        ("scale", torch.zeros(2, dtype=torch.bfloat16), ("only the first dimension",)),
        ("position", [1, 2], ("a list",)),
    ],
)
def test_mistyped_inputs_are_refused(name: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ContractError) as caught:
        make_table().fill({**inputs(), name: value}, key=KEY)
    for part in (name, str(KEY), *parts):
        assert part in str(caught.value), part


@pytest.mark.parametrize(
    ("name", "part"),
    [("positions", "not a declared buffer"), ("start", "role state"), ("chunk", "group 'prefill'")],
)
def test_names_that_are_no_inputs_of_the_group_are_refused(name: str, part: str) -> None:
    table = make_table()
    with pytest.raises(ContractError, match=part):
        table.fill({**inputs(), name: torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(ContractError, match=part):
        table.fill(inputs(), live={name: 1})


def test_capacity_is_the_keys_not_the_tables() -> None:
    table = make_table()
    table.fill(inputs(rows=4, places=6), key=KEY)
    with pytest.raises(ContractError) as caught:
        table.fill(inputs(rows=4, places=7), key=KEY)
    for part in ("'position'", str(KEY), "live length 7", "capacity 6"):
        assert part in str(caught.value), part
    table.fill(inputs(rows=4, places=7), live={"position": 6}, key=KEY)


@pytest.mark.parametrize("live", [-1, 4])
def test_live_length_outside_of_what_was_supplied_is_refused(live: int) -> None:
    with pytest.raises(ContractError, match=f"live length {live} is outside"):
        make_table().fill(inputs(places=3), live={"position": live})


def test_fault_a2_buffer_sized_for_a_smaller_key() -> None:
    table = make_table()
    table.check_capacity(GraphKey(rows=4, places=8, block=4))
    big = GraphKey(rows=4, places=9, block=4)
    with pytest.raises(ContractError) as caught:
        table.check_capacity(big)
    for part in ("'position'", str(big), "holds 8 rows", "needs 9"):
        assert part in str(caught.value), part


def test_for_key_gives_the_rows_of_the_key() -> None:
    table = make_table()
    assert table.for_key("seats", KEY).shape == (4,)
    assert table.for_key("position", KEY).shape == (6,)
    assert table.for_key("tokens", KEY).shape == (2, 4)


@pytest.mark.parametrize("name", ["position", "scale", "start", "pages", "tokens", "partial", "chunk"])
@pytest.mark.parametrize("side", [-1, 1])
def test_writes_beside_a_buffer_are_found_by_name(name: str, side: int) -> None:
    table = make_table()
    table.check_canaries()
    tensor = table[name]
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    start = tensor.storage_offset() * tensor.element_size()
    at = start - 1 if side < 0 else start + tensor.nbytes
    assert int(raw[at]) == CANARY
    raw[at] = 0
    with pytest.raises(ContractError, match=f"{'before' if side < 0 else 'after'} '{name}'"):
        table.check_canaries()


def test_buffers_are_aligned_for_vector_loads() -> None:
    table = make_table()
    base = table["seats"].untyped_storage().data_ptr()
    for name in ("seats", "position", "scale", "flag"):
        assert (table[name].data_ptr() - base) % GUARD_BYTES == 0


def test_reallocation_and_rebinding_bump_the_generation() -> None:
    table = make_table()
    table.reallocate("pages", (2, 9, 3))
    assert table.generation == 1 and table["pages"].shape == (2, 9, 3)
    table.reallocate("position", (12,))
    assert table.generation == 2 and table["position"].tolist() == [-1] * 12
    table.fill({**inputs(), "position": torch.arange(12)})
    assert table["position"].tolist() == list(range(12)) and table["seats"].tolist() == [1, 2, 0, 0, 0]
    old = table["start"].untyped_storage()
    table.rebind("start", torch.full((6,), 3))
    old.fill_(0)  # type: ignore[attr-defined]  # memory that is no longer the table's
    assert table.generation == 3 and table["start"].tolist() == [3] * 6
    table.check_canaries()


def test_rebinding_refuses_inputs_and_other_shapes() -> None:
    table = make_table()
    with pytest.raises(ContractError, match="cannot be rebound: it is filled by copy"):
        table.rebind("position", torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ContractError, match="'start' is int64"):
        table.rebind("start", torch.zeros(7, dtype=torch.int64))
    assert table.generation == 0


def test_bound_modules_are_followed_to_where_their_parameters_are() -> None:
    table = make_table()
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    table.bind_module("net", module)
    assert set(table.names("weight")) == {"net.0.weight", "net.0.bias", "net.1.weight"}
    before = table.addresses()
    assert table.moved(before) == []
    module[1].weight = nn.Parameter(torch.zeros(2, 3))
    assert table.moved(before) == ["net.1.weight"]
    with pytest.raises(ContractError, match=r"'net.1.weight' was captured at"):
        table.check_addresses(KEY, before)


def test_bound_fields_are_declared_once_and_kept_alive() -> None:
    @dataclass
    class Constants:
        ramp: Tensor
        width: int

    table, constants = make_table(), Constants(torch.arange(3), 3)
    table.bind_fields("tree", constants)
    table.bind_fields("tree", constants)
    assert table.names("weight") == ("tree.ramp",)
    alive = weakref.ref(constants.ramp)
    del constants
    assert alive() is not None and table["tree.ramp"].tolist() == [0, 1, 2]


def test_state_and_page_zero_parts() -> None:
    table = make_table()
    spec, pages = table.spec("pages"), table["pages"]
    assert spec.dummy_part(pages).shape == (2, 2, 3) and spec.live_part(pages).shape == (2, 5, 3)
    pages[0, 2, 0] = float("nan")
    table.check_dummies()
    pages[1, 1, 0] = float("inf")
    with pytest.raises(ContractError, match="page 0 of 'pages'"):
        table.check_dummies()


def test_poison_and_reset() -> None:
    table = make_table()
    table.poison("output", "scratch")
    assert bool(table["partial"].isnan().all()) and bool((table["tokens"] == 0x7F7F7F7F).all())
    table.reset("output")
    assert bool((table["tokens"] == -1).all()) and bool(table["partial"].isnan().all())
    noise = torch.zeros(2, 3, dtype=torch.bfloat16)
    poison(noise, "noise")
    assert bool(noise.isfinite().all()) and bool((noise.abs() > 5e3).all()) and len(set(noise.view(-1).tolist())) == 2
    assert sentinel(torch.bool) is True and sentinel(torch.int64) == 0x7F7F7F7F7F7F7F7F


def test_borrowed_outputs_expire_with_newer_replays_of_their_graph() -> None:
    table = make_table()
    table.advance(["tokens"])
    once, twice = table.borrow("tokens"), table.borrow("tokens", index=1, lifetime=2)
    table.advance([])  # another graph, which does not write them
    assert once.read().data_ptr() == table["tokens"].data_ptr() and twice.read().shape == (4,)
    table.advance(["tokens"])
    with pytest.raises(StaleOutputError, match=r"'tokens' was borrowed at replay 1 and read after replay 2"):
        once.read()
    twice.read()
    table.advance(["tokens"])
    with pytest.raises(StaleOutputError):
        twice.read()
    with pytest.raises(ContractError, match="role state"):
        table.borrow("start")


def test_borrowed_outputs_are_not_checked_outside_debug() -> None:
    table = make_table()
    borrowed = table.borrow("tokens", debug=False)
    table.advance(["tokens"])
    borrowed.read()


def test_staging_ring_asserts_its_protocol() -> None:
    ring = StagingRing(2, 16)
    assert ring.acquire() == 0
    with pytest.raises(AssertionError, match="never sent"):
        ring.acquire()
    ring.sent(0)
    assert ring.acquire() == 1
    with pytest.raises(AssertionError, match="without being acquired"):
        ring.sent(0)
    ring.sent(1)
    assert ring.acquire() == 0
    with pytest.raises(ValueError, match="at least one place"):
        StagingRing(0, 16)


def test_an_interrupted_fill_is_settled() -> None:
    table = make_table()
    table.staging().acquire()
    with pytest.raises(AssertionError, match="never sent"):
        table.fill(inputs())
    table.settle()
    table.settle()
    table.fill(inputs(rows=1))
    assert table["seats"].tolist() == [1, 0, 0, 0, 0]


class Clock:
    """Events of a device that runs behind the host: `done` says how many of its recordings have run."""

    def __init__(self) -> None:
        self.recorded, self.done, self.waits = 0, 0, []

    def event(self) -> Event:
        clock = self

        class Recorded:
            at = 0

            def record(self) -> None:
                clock.recorded += 1
                self.at = clock.recorded

            def query(self) -> bool:
                return clock.done >= self.at

            def synchronize(self) -> None:
                clock.waits.append(self.at)
                clock.done = max(clock.done, self.at)

        return Recorded()


def test_the_ring_waits_for_the_copy_that_used_its_place_and_for_no_other() -> None:
    clock = Clock()
    ring = StagingRing(2, 16, make_event=clock.event)
    for _ in range(2):
        ring.sent(ring.acquire())
    assert clock.waits == [] and ring.num_waits == 0
    ring.sent(ring.acquire())
    assert clock.waits == [1] and ring.num_waits == 1, "the second copy is still on its way"
    clock.done = 3
    ring.sent(ring.acquire())
    assert clock.waits == [1]


def test_reading_a_result_waits_for_its_round_alone() -> None:
    clock, ring = Clock(), torch.arange(12).reshape(3, 2, 2)
    readback = Readback((ring, ring.float()), clock.event)
    for place in range(3):
        readback.queue(place, 2)
    ring[0] = -1  # a later round that writes the same place of the device's ring
    ints, floats = readback.wait(0, 2)
    assert clock.waits == [1] and clock.done == 1, "rounds 2 and 3 are still running"
    assert ints.tolist() == [[0, 1], [2, 3]] and floats.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    readback.queue(0, 1)
    assert readback.wait(0, 1)[0].tolist() == [[-1, -1]] and clock.waits == [1, 4]


def test_results_in_host_memory_are_read_where_they_lie() -> None:
    ring = torch.zeros(2, 3, 4)
    readback = Readback((ring,), None)
    readback.queue(1, 2)
    ring[1] = 5
    (found,) = readback.wait(1, 2)
    assert found.shape == (2, 4) and bool((found == 5).all())


def test_consecutive_fills_use_different_host_places() -> None:
    table = make_table(depth=2)
    ring = table.staging()
    table.fill(inputs(rows=1))
    table.fill(inputs(rows=3))
    assert not torch.equal(ring.places[0], ring.places[1]), "a copy still in flight would have been overwritten"
    table.fill(inputs(rows=3))
    assert torch.equal(ring.places[0], ring.places[1])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"role": "inputs"}, "unknown role"),
        ({"shape": ()}, "needs one or more dims"),
        ({"shape": (0,)}, "needs one or more dims"),
        ({"dtype": torch.uint8, "pad": -1}, "cannot be held"),
        ({"dtype": torch.bool, "pad": 2}, "cannot be held"),
        ({"dtype": torch.int32, "pad": 0.5}, "cannot be held"),
        ({"dtype": torch.float16, "pad": 1e6}, "cannot be held"),
    ],
)
def test_specs_that_make_no_sense_are_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        BufferSpec(**{"name": "x", "shape": (2,), "dtype": torch.int32, "role": "input", **change})
    BufferSpec("x", (2,), torch.float16, "kv", pad=float("-inf"))


def test_twice_declared_and_unknown_names() -> None:
    spec = BufferSpec("x", (2,), torch.int32, "state")
    with pytest.raises(ValueError, match="'x' is declared twice"):
        BufferTable([spec, spec])
    with pytest.raises(ContractError, match="no buffer 'y' is declared; declared: x"):
        BufferTable([spec])["y"]
    with pytest.raises(ValueError, match="inputs are filled"):
        BufferTable([spec]).bind("z", torch.zeros(1), "input")


def test_buffers_can_be_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        table = make_table()
    table["start"].fill_(3)
    table.fill(inputs())
