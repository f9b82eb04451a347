# Owns: the failures known from this field (graphs), planted into the real round under an emulated graph.
# Promises: each is named before the replay that would use it, and no row ever commits a token of a sick round.
# Never: plants into toy functions (test_graphs.py does).
"""FIELD A1 to A5 and A9 on the real runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.core.request import SamplingParams
from ratoon.lab.faults import planted
from ratoon.runtime.birth import check_births
from ratoon.runtime.buffers import ContractError
from ratoon.runtime.emulator import BakedTensorError
from ratoon.runtime.graphs import BirthError
from ratoon.spec import round as round_module
from ratoon.spec.passes import Passes
from tests.cpu.toy import Ask, Bench, Seat, make_drafter, make_target

NODES = 7
ASK = Ask(prompt=(5, 9, 1, 30), num=12, budget=NODES, cap=4)


def sick_bench(drafter: Any = None, captured: Sequence[tuple[int, int, str]] = ((1, NODES, "argmax"),)) -> Bench:
    return Bench(make_target(), drafter or make_drafter(), "graph", rows=2, nodes=15, max_len=64, captured=captured)


def committed(bench: Bench, seat: Seat) -> tuple[int, int, bool]:
    state = bench.runner.state
    return tuple(x[seat.number].item() for x in (state.start_S, state.anchor_S, state.done_S))  # pyright: ignore


def refuses(bench: Bench, seat: Seat, *words: str) -> None:
    """The next launch raises a contract error with these words, and the row has not moved."""
    before = committed(bench, seat)
    with pytest.raises(ContractError) as raised:
        bench.launch([seat])
    for word in words:
        assert word in str(raised.value), f"'{word}' is not in: {raised.value}"
    assert committed(bench, seat) == before


def test_a_healthy_bench_raises_nothing() -> None:
    bench = sick_bench()
    [text] = bench.run([ASK])
    assert len(text.tokens) == ASK.num


def test_fault_a1_none_at_replay() -> None:
    bench = sick_bench()
    seat = bench.join(ASK)
    with planted("none field"):
        refuses(bench, seat, "'round.seat'", "rows=1 places=8", "int64 [2]", "mode graph", "supplied None")


def test_fault_a1_nothing_at_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sick_bench()
    seat = bench.join(ASK)
    graphs = bench.runner.graphs
    assert graphs is not None
    monkeypatch.setattr(bench.runner, "fill", lambda seats, shape: graphs.fill(bench.runner.key_of(shape), {}))
    refuses(bench, seat, "'round.seat'", "rows=1 places=8", "int64 [2]", "mode graph")


def test_fault_a2_buffer_sized_for_a_smaller_budget() -> None:
    bench = sick_bench(captured=())
    bench.runner.table.reallocate("places.token", (8,))
    with pytest.raises(ContractError, match=r"rows=1 places=16.*'places.token' holds 8 rows and this key needs 16"):
        bench.runner.capture([bench.shape(1, 15, "argmax")])


def test_fault_a2_more_rows_than_the_key_holds() -> None:
    bench = sick_bench()
    seats = [bench.join(ASK), bench.join(ASK)]
    before = [committed(bench, seat) for seat in seats]
    with pytest.raises(ContractError, match=r"'round.seat'.*live length 2 exceeds the capacity 1"):
        bench.launch(seats, bench.shape(1, NODES, "argmax"))
    assert [committed(bench, seat) for seat in seats] == before


def test_fault_a3_stale_rows_are_not_replayed() -> None:
    bench = sick_bench()
    seat = bench.join(ASK)
    with planted("stale rows"):
        bench.read([seat], bench.launch([seat]))
        refuses(bench, seat, "'round'", "round.seat", "fill()")


@pytest.mark.parametrize(
    ("fault", "buffer"), [("moved buffer", "'target.norm.weight'"), ("grown scratch", "'verify.hidden'")]
)
def test_fault_a4_moved_buffer(fault: str, buffer: str) -> None:
    bench = sick_bench()
    seat = bench.join(ASK)
    shape = bench.natural([seat])
    key = str(bench.runner.key_of(shape))
    with planted(fault):
        bench.read([seat], bench.launch([seat], shape))
        refuses(bench, seat, buffer, key)


def test_fault_a4_moved_cache() -> None:
    bench = sick_bench()
    seat = bench.join(ASK)
    shape = bench.natural([seat])
    bench.read([seat], bench.launch([seat], shape))
    bench.runner.table.rebind("cache", bench.runner.table["cache"].clone())
    refuses(bench, seat, "'cache'", str(bench.runner.key_of(shape)))


def baking_drafter(number: Callable[[], Any]) -> Any:
    drafter = make_drafter()
    healthy = drafter.shape_logits

    def shape_logits(logits_NV: Tensor) -> Tensor:
        return healthy(logits_NV) + number()

    drafter.shape_logits = shape_logits  # pyright: ignore[reportAttributeAccessIssue]
    return drafter


def test_fault_a5_tensor_made_from_host_data_in_capture() -> None:
    bias = [0.0] * 48
    with pytest.raises(BakedTensorError, match=r"test_faults.py:\d+"):
        sick_bench(baking_drafter(lambda: torch.tensor(bias)))


def test_fault_a5_host_number_is_found_at_birth() -> None:
    rounds = iter(range(10**6))
    drafter = baking_drafter(lambda: torch.arange(48).mul(7).add(13 * next(rounds)).remainder(11).float())
    bench = sick_bench(drafter)
    with pytest.raises(BirthError, match=r"rows=1 places=8.*frozen at capture"):
        check_births(bench.runner, bench.runner.shapes, "quick")


def test_fault_a5_host_number_that_sampled_rows_alone_feel(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, healthy = iter(range(10**6)), round_module.sample_places

    def baked(hidden_TH: Tensor, logits: Any, state: Any, seat_T: Tensor, position_T: Tensor, *args: Any, **kw: Any):
        return healthy(hidden_TH, logits, state, seat_T, position_T + next(rounds), *args, **kw)

    monkeypatch.setattr(round_module, "sample_places", baked)
    bench = sick_bench(captured=((2, 3, "general"), (2, 3, "argmax")))
    with pytest.raises(BirthError, match=r"rows=2 places=8.*general"):
        check_births(bench.runner, bench.runner.shapes, "quick")


def test_fault_a5_host_number_in_prefill_is_found_at_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chunk begins, as a Python number."""
    begins, healthy = iter([8, 8]), Passes.chunk  # warm-up and capture

    def baked(passes: Passes, cache: Tensor, seat_R: Tensor, base_R: Tensor, width: int, context: int) -> Any:
        begin = next(begins, None)
        return healthy(
            passes, cache, seat_R, base_R if begin is None else torch.full_like(base_R, begin), width, context
        )

    monkeypatch.setattr(Passes, "chunk", baked)
    shapes = [(1, 0, "argmax")]
    bench = Bench(make_target(), make_drafter(), "graph", rows=2, nodes=15, max_len=120, captured=shapes)
    assert bench.runner.chunks == (128,) and next(begins, None) is None
    with pytest.raises(BirthError, match=r"prefill\[rows=1 places=128"):
        check_births(bench.runner, (), "quick")


def test_birth_tests_report_their_progress() -> None:
    bench, told = sick_bench(captured=((1, 0, "argmax"), (1, 3, "argmax"), (2, 3, "argmax"), (1, 0, "general"))), []
    check_births(bench.runner, bench.runner.shapes, "quick", lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)], "the ends of argmax, and the one general"


def test_birth_test_passes_the_real_round_and_gives_back_clean_seats() -> None:
    bench = sick_bench(captured=((1, NODES, "argmax"), (2, 3, "general"), (1, 0, "argmax")))
    assert check_births(bench.runner, bench.runner.shapes, "full") > 0
    assert bool(bench.runner.state.done_S.all())
    assert not bool(bench.runner.table["cache"].any())
    assert check_births(bench.runner, bench.runner.shapes, "off") == 0


def test_birth_test_passes_a_sound_prefill() -> None:
    bench = Bench(make_target(), make_drafter(), "graph", rows=1, nodes=15, max_len=120, captured=((1, 0, "argmax"),))
    assert check_births(bench.runner, (), "full") == 18, "three cases, three poisons, twice"


def test_fault_a9_page_0_made_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sick_bench()
    bench.runner.table["draft_cache"][:, 0] = torch.nan
    with pytest.raises(ContractError, match="page 0 of 'draft_cache' holds a NaN"):
        bench.runner.table.check_dummies()


def test_fault_nan_of_the_target_is_flagged_and_nothing_is_silent() -> None:
    bench = Bench(make_target(), make_drafter(), "static", rows=1, nodes=15, max_len=64)
    seat = bench.join(Ask(prompt=(5, 9, 1), num=4, budget=3, cap=2, params=SamplingParams()))
    bench.runner.table["cache"][:, seat.pages[0] * bench.limits.page_size] = torch.nan
    launch = bench.launch([seat])
    assert bench.runner.read(launch)[0].bad
