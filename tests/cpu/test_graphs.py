# Owns: tests of keys, capture, replay, teardown and the birth test, on a toy round over a paged cache.
# Promises: each planted fault is caught by name; on a machine with CUDA the same tests run real graphs.
# Never: needs a model.
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.runtime.buffers import BufferSpec, BufferTable, ContractError, StaleOutputError, poison
from ratoon.runtime.emulator import EmulatorBackend
from ratoon.runtime.graphs import (
    Backend,
    BirthCase,
    BirthError,
    CudaBackend,
    GraphKey,
    GraphSet,
    birth_test,
    capture_order,
    check_ranks,
    first_difference,
    key_hash,
    teardown,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MAX_ROWS, MAX_LEN, PAGE, DIM = 4, 8, 2, 3
NUM_PAGES = 1 + MAX_ROWS * MAX_LEN // PAGE


class Toy:
    """Sums each row's live K/V, appends one entry and moves `start` on: a round without a model."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.table = BufferTable(
            [
                BufferSpec("seats", (MAX_ROWS + 1,), torch.int64, "input", need=lambda key: key.rows + 1),
                BufferSpec("bias", (MAX_ROWS + 1,), torch.float32, "input", need=lambda key: key.rows + 1),
                BufferSpec("start", (MAX_ROWS + 1,), torch.int64, "state"),
                BufferSpec("page_table", (MAX_ROWS + 1, MAX_LEN // PAGE), torch.int64, "state"),
                BufferSpec("cache", (NUM_PAGES * PAGE, DIM), torch.float32, "kv", dummy_len=PAGE),
                BufferSpec("total", (MAX_ROWS + 1, DIM), torch.float32, "output", need=lambda key: key.rows + 1),
                BufferSpec("count", (MAX_ROWS + 1,), torch.int64, "output", need=lambda key: key.rows + 1),
                BufferSpec("partial", (MAX_ROWS + 1, DIM), torch.float32, "scratch", need=lambda key: key.rows + 1),
            ],
            device,
        )
        self.table["start"][0] = 1
        self.mask = "where"
        self.longest: int | None = None  # a host number that a round must not use
        self.skip_scratch = False

    def key(self, rows: int = MAX_ROWS) -> GraphKey:
        return GraphKey(rows, MAX_ROWS * MAX_LEN, 4, generation=self.table.generation)

    def round(self, key: GraphKey) -> None:
        table = self.table
        seat_R, bias_R = table.for_key("seats", key), table.for_key("bias", key)
        length_R = table["start"][seat_R]
        position_L = torch.arange(MAX_LEN, device=self.device)
        if self.longest is not None:
            position_L = position_L[: self.longest]
        slot_RL = table["page_table"][seat_R][:, position_L // PAGE] * PAGE + position_L % PAGE
        live_RL1 = (position_L[None] < length_R[:, None]).unsqueeze(-1)
        cache_RLD = table["cache"][slot_RL]
        masked_RLD = torch.where(live_RL1, cache_RLD, 0.0) if self.mask == "where" else cache_RLD * live_RL1
        partial = table.for_key("partial", key)
        if not self.skip_scratch:
            partial.copy_(masked_RLD.sum(1))
        table.for_key("total", key).copy_(partial + bias_R[:, None])
        table.for_key("count", key).copy_(length_R)
        self._append(seat_R, length_R, bias_R)

    def _append(self, seat_R: Tensor, length_R: Tensor, bias_R: Tensor) -> None:
        table = self.table
        real_R = seat_R != 0
        page_R = table["page_table"][seat_R, length_R // PAGE]
        slot_R = torch.where(real_R, page_R * PAGE + length_R % PAGE, 0)
        table["cache"].index_copy_(0, slot_R, torch.where(real_R, bias_R, 0.0)[:, None].expand(-1, DIM))
        table["start"].index_add_(0, seat_R, real_R.to(torch.int64))

    def capture(self, debug: bool = True, key: GraphKey | None = None, **options: Any) -> GraphSet:
        graphs = self.graphs(debug)
        key = key or self.key()
        graphs.capture(key, lambda: self.round(key), **options)
        return graphs

    def graphs(self, debug: bool = True, **options: Any) -> GraphSet:
        backend: Backend = CudaBackend() if self.device == "cuda" else EmulatorBackend()
        return GraphSet(self.table, backend, debug, **options)

    def inputs(self, seats: list[int]) -> dict[str, Tensor | None]:
        return {"seats": torch.tensor(seats, dtype=torch.int64), "bias": torch.tensor(seats, dtype=torch.float32) / 8}

    def case(self, name: str, graphs: GraphSet, lengths: Mapping[int, int]) -> BirthCase:
        """Rows of these seats and lengths on scattered pages."""
        table, seats = self.table, list(lengths)
        order = torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(len(seats))) + 1
        values = torch.randn(NUM_PAGES * PAGE, DIM, generator=torch.Generator().manual_seed(7))

        def prepare() -> None:
            table["start"].zero_()
            table["start"][0] = 1
            table["page_table"].zero_()
            table["page_table"][1:] = order.reshape(MAX_ROWS, -1).to(self.device)
            table["cache"].copy_(values)
            table["cache"][:PAGE] = 0
            for seat, length in lengths.items():
                table["start"][seat] = length

        def beyond() -> Tensor:
            dead = torch.ones(NUM_PAGES * PAGE, dtype=torch.bool, device=self.device)
            dead[:PAGE] = False
            for seat, length in lengths.items():
                for position in range(length):
                    dead[table["page_table"][seat, position // PAGE] * PAGE + position % PAGE] = False
            return dead

        def spoil(kind: Any) -> None:
            rows = torch.empty(int(beyond().sum()), DIM, device=self.device)
            poison(rows, kind)
            table["cache"][beyond()] = rows

        def observe() -> dict[str, Tensor]:
            rows = len(seats)
            slots = [
                int(table["page_table"][seat, position // PAGE]) * PAGE + position % PAGE
                for seat, length in lengths.items()
                for position in range(length + 1)
            ]
            return {
                "total": table["total"][:rows],
                "count": table["count"][:rows],
                "start": table["start"][1:],
                "cache": table["cache"][slots],
            }

        def fill() -> None:
            graphs.fill(self.key(), self.inputs(seats))

        return BirthCase(name, prepare, fill, observe, spoil)

    def cases(self, graphs: GraphSet) -> list[BirthCase]:
        return [
            self.case("changed", graphs, {2: 3, 1: 7, 4: 1, 3: 4}),
            self.case("shrink", graphs, {3: 2}),
            self.case("grow", graphs, {1: 1, 4: 6, 2: 5}),
        ]

    def birth(self, graphs: GraphSet, **options: Any) -> Any:
        return birth_test(graphs, self.key(), lambda: self.round(self.key()), self.cases(graphs), **options)


@pytest.fixture(params=DEVICES)
def toy(request: pytest.FixtureRequest) -> Toy:
    return Toy(request.param)


# ---- keys ----


def test_keys_print_order_and_validate() -> None:
    key = GraphKey(8, 64, 16, "general", 3, "verify")
    assert str(key) == "verify[rows=8 places=64 block=16 general gen=3]" and key.mode == "staged"
    assert key.family == replace(key, kind="round") and key.family.mode == "graph"
    assert [str(one).split("[")[0] for one in key.family.staged()] == ["draft", "verify", "accept"]
    assert replace(key, kind="prefill").family.kind == "prefill"
    small, wide, tall = GraphKey(1, 8, 4), GraphKey(1, 64, 4), GraphKey(8, 8, 4)
    assert capture_order([small, tall, wide]) == [wide, tall, small]
    assert "block=4 nodes=7 greedy" in str(replace(small, nodes=7))
    for change in ({"rows": 0}, {"places": 0}, {"block": -1}, {"nodes": -1}, {"kind": "decode"}, {"sampler": "beam"}):
        with pytest.raises(ValueError, match="graph key"):
            replace(key, **change)


def test_key_hash_is_fixed_and_sees_everything() -> None:
    key = GraphKey(8, 64, 16)
    hashes = {
        key_hash(key),
        key_hash(replace(key, rows=7)),
        key_hash(replace(key, generation=1)),
        key_hash(key, (8, 64)),
        key_hash(key, (8, 63)),
        key_hash(key, (8, 64), ("all_reduce", "all_gather")),
        key_hash(key, (8, 64), ("all_gather", "all_reduce")),
    }
    assert len(hashes) == 7 and all(0 <= value < 2**63 for value in hashes)
    assert key_hash(key) == 80784388686304121, "must not depend on the process (PYTHONHASHSEED)"


def test_fault_a6_ranks_with_different_graphs_are_named() -> None:
    key = GraphKey(8, 64, 16)
    same, other = key_hash(key), key_hash(replace(key, places=32))
    check_ranks(key, [same, same, same])
    with pytest.raises(ContractError, match=r"ranks \[1\] are about to run another graph"):
        check_ranks(key, [same, other, same])


# ---- replay equals static ----


def test_graph_equals_static_over_growing_and_shrinking_batches(toy: Toy) -> None:
    graphs, twin = toy.capture(), Toy(toy.device)
    key = toy.key()
    for one in (toy, twin):
        toy.cases(graphs)[0].prepare() if one is toy else None
    for name in ("start", "page_table", "cache"):
        twin.table[name].copy_(toy.table[name])
    for seats in ([1, 2, 3, 4], [3], [4, 2]):
        graphs.fill(key, toy.inputs(seats))
        graphs.replay(key)
        twin.table.fill(twin.inputs(seats), key=key)
        twin.round(key)
        for name in ("total", "count", "start", "cache"):
            assert first_difference(name, twin.table[name], toy.table[name]) is None, name
    assert toy.table["start"].tolist() == [1, 8, 5, 6, 3]


def test_small_key_uses_its_own_rows_of_the_same_buffers(toy: Toy) -> None:
    graphs, small = toy.capture(), toy.key(rows=1)
    graphs.capture(small, lambda: toy.round(small))
    assert graphs.keys == (toy.key(), small)
    toy.cases(graphs)[0].prepare()
    toy.table["total"].fill_(-5)
    graphs.fill(small, toy.inputs([1]))
    graphs.replay(small)
    assert bool((toy.table["total"][2:] == -5).all()) and bool((toy.table["total"][:2] != -5).all())
    with pytest.raises(ContractError, match="live length 3 exceeds the capacity 2"):
        graphs.fill(small, toy.inputs([1, 2, 3]))


# ---- planted faults before replay ----


@pytest.mark.parametrize("inputs", [{"bias": None}, {}])
def test_fault_a1_none_at_replay(toy: Toy, inputs: dict[str, Any]) -> None:
    graphs = toy.capture()
    with pytest.raises(ContractError) as caught:
        graphs.fill(toy.key(), {"seats": torch.tensor([1]), **inputs})
    for part in (str(toy.key()), "'bias'", "mode graph", "float32 [5]"):
        assert part in str(caught.value), part
    with pytest.raises(ContractError, match="not filled"):
        graphs.replay(toy.key())


def test_fault_a2_capture_of_a_key_larger_than_its_buffers(toy: Toy) -> None:
    graphs, key = toy.graphs(), toy.key(rows=MAX_ROWS + 1)
    with pytest.raises(ContractError, match=r"'seats' holds 5 rows and this key needs 6") as caught:
        graphs.capture(key, lambda: toy.round(key))
    assert str(key) in str(caught.value)


def test_fault_a3_stale_inputs_are_not_replayed(toy: Toy) -> None:
    graphs, key, small = toy.capture(), toy.key(), toy.key(rows=1)
    graphs.capture(small, lambda: toy.round(small))
    graphs.fill(key, toy.inputs([1]))
    graphs.replay(key)
    with pytest.raises(ContractError, match=r"seats, bias.*already used by this key") as caught:
        graphs.replay(key)
    assert str(key) in str(caught.value)
    graphs.fill(key, toy.inputs([1]))
    with pytest.raises(ContractError, match=r"last filled for round\[rows=4"):
        graphs.replay(small)
    graphs.capture(replace(key, sampler="general"), lambda: toy.round(key))
    with pytest.raises(ContractError, match="not filled"):
        graphs.replay(key)


def test_fault_a4_buffer_moved_behind_the_tables_back(toy: Toy) -> None:
    graphs = toy.capture()
    graphs.fill(toy.key(), toy.inputs([1]))
    toy.table["cache"].set_(toy.table["cache"].clone())  # type: ignore[call-overload]
    before = toy.table["total"].clone()
    with pytest.raises(ContractError, match=r"'cache' was captured at 0x.*moved: cache") as caught:
        graphs.replay(toy.key())
    assert str(toy.key()) in str(caught.value) and torch.equal(before, toy.table["total"])


def test_fault_a4_rebound_buffer_changes_the_generation(toy: Toy) -> None:
    key = toy.key(rows=1)
    graphs = toy.capture(debug=False, key=key)
    toy.table.rebind("cache", toy.table["cache"].clone())
    graphs.fill(key, toy.inputs([1]))
    with pytest.raises(ContractError, match=r"moved: 'cache'.*generation 1") as caught:
        graphs.replay(key)
    assert str(key) in str(caught.value)
    with pytest.raises(ContractError, match="was never captured"):
        graphs.replay(toy.key())
    with pytest.raises(ContractError, match="generation 1"):
        graphs.capture(replace(key, sampler="general"), lambda: None)
    assert graphs.drop_stale() == 1 and key not in graphs
    new = toy.key()
    graphs.capture(new, lambda: toy.round(new))
    graphs.fill(new, toy.inputs([1]))
    graphs.replay(new)


def test_addresses_are_sampled_outside_debug(toy: Toy) -> None:
    graphs, key = toy.graphs(debug=False, sample_every=4), toy.key()
    graphs.capture(key, lambda: toy.round(key))
    for _ in range(8):
        graphs.fill(key, toy.inputs([]))
        graphs.replay(key)
    assert graphs.num_address_checks == 2
    toy.table["cache"].set_(toy.table["cache"].clone())  # type: ignore[call-overload]
    graphs.fill(key, toy.inputs([]))
    with pytest.raises(ContractError, match="'cache'"):
        graphs.replay(key)


def test_capture_refuses_what_breaks_the_order(toy: Toy) -> None:
    graphs, small = toy.graphs(), toy.key(rows=1)
    graphs.capture(small, lambda: toy.round(small))
    with pytest.raises(ContractError, match="captured already"):
        graphs.capture(small, lambda: toy.round(small))
    with pytest.raises(ContractError, match=r"rows=4.*is larger than.*rows=1.*capture_order"):
        graphs.capture(toy.key(), lambda: toy.round(toy.key()))


def test_fault_warm_up_that_writes_a_real_seat_or_page(toy: Toy) -> None:
    graphs, key = toy.graphs(), toy.key()

    def harmful(name: str, at: int, value: float) -> Callable[[], Any]:
        return lambda: toy.table[name][at].fill_(value)

    with pytest.raises(ContractError, match=r"outside of seat 0 and page 0: 'start' at \[2\]: expected 0, got 5"):
        graphs.capture(key, harmful("start", 2, 5))
    with pytest.raises(ContractError, match=r"'cache' at \[2, 0\]: expected 0.0, got 1.0"):
        graphs.capture(key, harmful("cache", PAGE, 1.0))
    with pytest.raises(ContractError, match="page 0 of 'cache'"):
        graphs.capture(key, harmful("cache", 1, float("nan")))
    toy.table["cache"].zero_()
    graphs.capture(key, harmful("cache", 1, 0.0))


@pytest.mark.parametrize("debug", [True, False])
def test_counters_that_no_seat_owns_are_put_back_after_warm_up(toy: Toy, debug: bool) -> None:
    toy.table = BufferTable(
        [
            BufferSpec("x", (2,), torch.float32, "input"),
            BufferSpec("rounds", (1,), torch.int64, "state", dummy_len=0),
        ],
        toy.device,
    )
    graphs, key = toy.graphs(debug), toy.key()
    graphs.capture(key, lambda: toy.table["rounds"].add_(1), warmups=2)
    assert toy.table["rounds"].tolist() == [0]
    graphs.fill(key, {"x": torch.zeros(1)})
    graphs.replay(key)
    assert toy.table["rounds"].tolist() == [1]


def test_capture_runs_on_padding_and_prepared_inputs_only(toy: Toy) -> None:
    seen: list[list[int]] = []

    def three() -> None:
        toy.table["seats"][1:] = 3

    toy.table.fill(toy.inputs([1, 2]))
    key = toy.key()
    graphs = toy.graphs()
    graphs.backend.warm_up = lambda fn, times: seen.append(toy.table["seats"].tolist())  # type: ignore[method-assign]
    graphs.capture(key, lambda: None)
    graphs.capture(replace(key, rows=1), lambda: None, prepare=three)
    assert seen == [[0] * 5, [0, 3, 3, 3, 3]]


# ---- outputs, canaries, stages ----


def test_outputs_expire_per_graph(toy: Toy) -> None:
    graphs, key = toy.capture(outputs=["total"]), toy.key()
    other = replace(key, sampler="general")
    graphs.capture(other, lambda: toy.round(other), outputs=["count"])
    for one in (key, other):
        graphs.fill(one, toy.inputs([1]))
        graphs.replay(one)
        if one is key:
            total = graphs.output("total")
    total.read()
    graphs.fill(key, toy.inputs([1]))
    graphs.replay(key)
    with pytest.raises(StaleOutputError, match="'total'"):
        total.read()


def overflow(toy: Toy) -> None:
    """Writes row 0 of `partial` for the dummy, and one row past its end for seat 1."""
    wide = torch.as_strided(toy.table["partial"], (MAX_ROWS + 2, DIM), (DIM, 1))
    wide.index_fill_(0, (toy.table["seats"][:1] == 1) * (MAX_ROWS + 1), 1.0)


def test_fault_write_beside_a_buffer_is_found_after_the_replay(toy: Toy) -> None:
    graphs, key = toy.graphs(), toy.key()
    graphs.capture(key, lambda: overflow(toy))
    graphs.fill(key, toy.inputs([2]))
    graphs.replay(key)
    graphs.fill(key, toy.inputs([1]))
    with pytest.raises(ContractError, match="canary words after 'partial'"):
        graphs.replay(key)


def test_fault_write_beside_a_buffer_is_found_by_the_birth_test(toy: Toy) -> None:
    graphs, key = toy.graphs(debug=False), toy.key()

    def fn() -> None:
        toy.round(key)
        overflow(toy)

    graphs.capture(key, fn)
    case = toy.case("changed", graphs, {1: 3})
    cases = [replace(case, name=name) for name in ("changed", "shrink", "grow")]
    with pytest.raises(BirthError, match=r"case 'changed', poison nan: canary words after 'partial'"):
        birth_test(graphs, key, lambda: toy.round(key), cases, "quick")


def staged(toy: Toy) -> tuple[GraphSet, tuple[GraphKey, GraphKey, GraphKey]]:
    graphs, keys = toy.graphs(), toy.key().staged()
    table = toy.table
    fns = [
        lambda: table["partial"].copy_(table["bias"][:, None].expand(-1, DIM)),
        lambda: table["partial"].mul_(2.0),
        lambda: table["total"].copy_(table["partial"]),
    ]
    for key, fn in zip(keys, fns, strict=True):
        graphs.capture(key, fn, outputs=["total"] if key.kind == "accept" else [])
    return graphs, keys


def test_stages_share_one_fill_and_use_it_once_each(toy: Toy) -> None:
    graphs, keys = staged(toy)
    for seats in ([1, 2], [3]):
        graphs.fill(keys[0], toy.inputs(seats))
        for key in keys:
            graphs.replay(key)
        assert toy.table["total"][:, 0].tolist()[: len(seats)] == [seat / 4 for seat in seats]
    with pytest.raises(ContractError, match=r"accept\[.*already used"):
        graphs.replay(keys[2])


def test_groups_are_filled_one_by_one(toy: Toy) -> None:
    table = BufferTable(
        [
            BufferSpec("x", (2,), torch.float32, "input"),
            BufferSpec("mask", (2,), torch.float32, "input", pad=1.0, group="grammar"),
            BufferSpec("y", (2,), torch.float32, "output"),
        ],
        toy.device,
    )
    toy.table = table
    graphs, keys = toy.graphs(), toy.key().staged()
    graphs.capture(keys[0], lambda: table["y"].copy_(table["x"]))
    graphs.capture(keys[2], lambda: table["y"].mul_(table["mask"]), groups=["round", "grammar"])
    graphs.fill(keys[0], {"x": torch.tensor([3.0, 4.0])})
    graphs.replay(keys[0])
    with pytest.raises(ContractError, match=r"group 'grammar' \(mask\) are not filled"):
        graphs.replay(keys[2])
    graphs.fill(keys[2], {"mask": torch.tensor([0.0])}, group="grammar")
    graphs.replay(keys[2])
    assert table["y"].tolist() == [0.0, 4.0]


# ---- birth and death ----


@pytest.mark.parametrize(("level", "replays"), [("full", 18), ("quick", 6), ("off", 0)])
def test_birth_test_passes_a_sound_graph(toy: Toy, level: str, replays: int) -> None:
    graphs = toy.capture()
    scrubbed: list[int] = []

    def static() -> None:
        for name in ("partial", "total", "count"):
            assert not toy.table[name].any(), "the static run must start clean"
        toy.round(toy.key())

    cases = toy.cases(graphs)
    report = birth_test(graphs, toy.key(), static, cases, level, scrub=lambda: scrubbed.append(1))  # type: ignore[arg-type]
    assert report.num_replays == replays and len(scrubbed) == (level != "off")


def test_fault_a5_baked_host_number_is_found_by_the_birth_test(toy: Toy) -> None:
    """`kv_len = int(attribute)` is an ordinary slice at capture; only other lengths show that it was frozen."""
    toy.longest = 1
    graphs = toy.capture()
    toy.longest = MAX_LEN
    with pytest.raises(BirthError) as caught:
        toy.birth(graphs, level="quick")
    for part in (str(toy.key()), "case 'changed'", "poison nan", "the static mode", "'total' at [0, 0]", "expected"):
        assert part in str(caught.value), part


def test_fault_nan_beyond_the_live_length_leaks_through_a_multiplied_mask(toy: Toy) -> None:
    """Static and graph agree on such NaN, so the static run must stay clean; noise alone would not find it."""
    toy.mask = "multiply"
    graphs = toy.capture()
    with pytest.raises(BirthError, match=r"poison nan: .*'total' at \[0, 0\].*got nan"):
        toy.birth(graphs, level="full")


def test_fault_scratch_is_read_before_it_is_written(toy: Toy) -> None:
    toy.skip_scratch = True
    graphs = toy.capture()
    with pytest.raises(BirthError, match=r"case 'changed', poison noise: .*'total'"):
        toy.birth(graphs)


def test_fault_page_zero_made_nan_by_a_replay(toy: Toy) -> None:
    graphs, key = toy.graphs(debug=False), toy.key()

    def fn() -> None:
        toy.round(key)
        toy.table["cache"][0] = toy.table["cache"][2 * PAGE :].sum(0)  # a dead slot's K/V copied by padding

    graphs.capture(key, fn)
    with pytest.raises(BirthError, match=r"case 'changed', poison nan: page 0 of 'cache' holds a NaN"):
        birth_test(graphs, key, fn, toy.cases(graphs))


def test_fault_tail_that_the_fill_leaves_stale(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill that only writes the live prefix leaves poison, or yesterday's rows, in the padding."""
    graphs, table = toy.capture(), toy.table

    def live_only(given: Mapping[str, Tensor | None], live: Any = None, **options: Any) -> None:
        for name, tensor in given.items():
            assert tensor is not None
            table[name][: len(tensor)].copy_(tensor)

    def stale(*roles: str, kind: str = "nan") -> None:
        if "input" in roles:
            table["seats"].copy_(torch.tensor([1, 2, 2, 4, 4]))

    case = toy.cases(graphs)[1]
    monkeypatch.setattr(table, "fill", live_only)
    monkeypatch.setattr(table, "poison", stale)
    cases = [replace(case, name=name) for name in ("changed", "shrink", "grow")]
    with pytest.raises(BirthError, match=r"'start' at"):
        birth_test(graphs, toy.key(), lambda: toy.round(toy.key()), cases, "quick")


def test_fault_replay_that_is_not_repeatable(toy: Toy) -> None:
    graphs = toy.capture()
    cases = toy.cases(graphs)
    calls: list[int] = []

    def drifting() -> dict[str, Tensor]:
        calls.append(1)
        return {"total": torch.full((2,), 1.0 if len(calls) < 3 else 2.0)}

    cases[0] = replace(cases[0], observe=drifting)
    with pytest.raises(BirthError, match=r"its own first replay in 'total' at \[0\]: expected 1.0, got 2.0 \(2 of 2"):
        birth_test(graphs, toy.key(), lambda: toy.round(toy.key()), cases, "quick")


def test_birth_test_needs_its_cases_and_scrubs_after_a_failure(toy: Toy) -> None:
    graphs = toy.capture()
    with pytest.raises(ValueError, match=r"lack \['grow', 'shrink'\]"):
        birth_test(graphs, toy.key(), lambda: None, toy.cases(graphs)[:1])
    scrubbed: list[int] = []
    with pytest.raises(BirthError):
        birth_test(graphs, toy.key(), lambda: None, toy.cases(graphs), scrub=lambda: scrubbed.append(1))
    assert scrubbed == [1]


def test_teardown_in_order_and_nothing_after_it(toy: Toy) -> None:
    graphs, log = toy.capture(), []

    def logged(name: str, fn: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: log.append(name) or fn(*args)

    graphs.backend.release = logged("graph", graphs.backend.release)  # type: ignore[method-assign]
    graphs.backend.reset = logged("pool", graphs.backend.reset)  # type: ignore[method-assign]
    teardown([graphs], lambda: log.append("caches"), lambda: log.append("groups"))
    assert log == ["graph", "pool", "caches", "groups"] and graphs.closed
    for call in (lambda: graphs.replay(toy.key()), lambda: graphs.capture(toy.key(), lambda: None)):
        with pytest.raises(ContractError, match="torn down"):
            call()
    graphs.close()
    assert log == ["graph", "pool", "caches", "groups"]


def test_first_difference_compares_bits() -> None:
    nan = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    assert first_difference("x", nan, nan.clone()) is None
    found = first_difference("x", nan, torch.tensor([[1.0, float("nan")], [-0.0, 3.0]]))
    assert found is not None and found.coordinate == (1, 0) and found.num_different == 2
    assert str(found) == "'x' at [1, 0]: expected 0.0, got -0.0 (2 of 4 elements differ)"
    assert first_difference("x", torch.zeros(0), torch.zeros(0)) is None
    with pytest.raises(ContractError, match=r"'x' was torch.float32 \[2, 2\]"):
        first_difference("x", nan, nan[0])
