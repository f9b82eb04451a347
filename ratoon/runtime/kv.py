# Owns: which buffers an engine declares: inputs, seat state, caches, stage hand-overs, results.
# Promises: every tensor that outlives a stage is in the table, sized for the engine's limits.
# Never: computes with them.
"""Declaration of an engine's buffers. S: seats, T: places, W: bit words, H: hidden, X: taps wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import MAX_LOGIT_BIAS
from ratoon.ops.attention import NUM_COUNTERS
from ratoon.ops.sample import SamplerState
from ratoon.runtime.buffers import BufferSpec, BufferTable
from ratoon.runtime.graphs import GraphKey
from ratoon.runtime.results import ResultLayout
from ratoon.runtime.seats import SeatRecords
from ratoon.spec.state import STOP_IDS, Limits, SeatState

PLACE_FIELDS = ("token", "row_of", "parent", "depth", "local")


def declare(
    limits: Limits,
    target: ModelConfig,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    chunk: int = 1,
) -> BufferTable:
    """All buffers of one engine, allocated and padded: every seat is a done dummy. chunk: a prefill's most places."""
    return BufferTable(specs_of(limits, target, drafter, dtype, chunk), device, depth=limits.run_ahead + 2)


def specs_of(
    limits: Limits, target: ModelConfig, drafter: DrafterConfig | None, dtype: torch.dtype, chunk: int = 1
) -> list[BufferSpec]:
    """The same, before anything is allocated."""
    return [
        *_input_specs(limits, chunk),
        *_state_specs(limits),
        *_sampler_specs(limits, target.vocab_size),
        *_cache_specs(limits, target, drafter, dtype),
        *_stage_specs(limits, target, drafter, dtype),
    ]


def _need(kind: str, count: Callable[[GraphKey], int]) -> Callable[[GraphKey], int]:
    """Rows of a buffer that graphs of one kind ('round' includes its stages) use; the other kinds do not touch it."""
    return lambda key: count(key) if key.family.kind == kind else 0


def seat_state(table: BufferTable) -> SeatState:
    """The table's seat tensors as the round sees them."""
    own = {field.name: table[f"seat.{field.name}"] for field in fields(SeatState) if field.name != "sampler"}
    sampler = SamplerState(**{field.name: table[f"sampler.{field.name}"] for field in fields(SamplerState)})
    return SeatState(**own, sampler=sampler)


def _input_specs(limits: Limits, chunk: int) -> list[BufferSpec]:
    """The round's seats, a prompt's chunk, a seat's record, the prompt of a row with penalties, and page table entries
    (seats, columns, pages)."""

    def given(name: str, size: int, group: str, need: Callable[[GraphKey], int] | None = None) -> BufferSpec:
        return BufferSpec(name, (size,), torch.int64, "input", group=group, need=need)

    words = SeatRecords.num_words(STOP_IDS, limits.pages_per_row, MAX_LOGIT_BIAS)
    return [
        given("round.seat", limits.max_rows, "round", _need("round", lambda key: key.rows)),
        given("prefill.seat", 1, "prefill"),
        given("prefill.base", 1, "prefill"),
        given("prefill.ids", chunk, "prefill", _need("prefill", lambda key: key.places)),
        given("seat.words", words, "seat"),
        given("history.words", 1 + limits.max_model_len, "history"),
        given("pages.words", 3 * limits.max_rows, "pages"),
    ]


def _state_specs(limits: Limits) -> list[BufferSpec]:
    seats, int64 = limits.num_seats, torch.int64

    def state(name: str, shape: tuple[int, ...], dtype: torch.dtype, pad: float = 0) -> BufferSpec:
        return BufferSpec(f"seat.{name}", shape, dtype, "state", pad)

    return [
        state("start_S", (seats,), int64),
        state("anchor_S", (seats,), int64),
        state("limit_S", (seats,), int64),
        state("done_S", (seats,), torch.bool, 1),
        state("budget_S", (seats,), int64),
        state("topk_cap_S", (seats,), int64, 1),
        state("stop_id_SE", (seats, STOP_IDS), int64, -1),
        state("page_table_SP", (seats, limits.pages_per_row), torch.int32),
        BufferSpec("seat.round_number", (1,), int64, "state", 0, dummy_len=0),
        BufferSpec("seat.attend_counters", (NUM_COUNTERS,), torch.int32, "state", 0, dummy_len=0),
    ]


def _sampler_specs(limits: Limits, vocab: int) -> list[BufferSpec]:
    # The pads are the prototype's values: every seat starts as a greedy one.
    proto = SamplerState.allocate(1, vocab, MAX_LOGIT_BIAS, penalties=True)
    specs = []
    for field in fields(SamplerState):
        tensor = getattr(proto, field.name)
        shape, pad = (limits.num_seats, *tensor.shape[1:]), float(tensor.flatten()[0])
        specs.append(BufferSpec(f"sampler.{field.name}", shape, tensor.dtype, "state", pad))
    return specs


def _cache_specs(
    limits: Limits, target: ModelConfig, drafter: DrafterConfig | None, dtype: torch.dtype
) -> list[BufferSpec]:
    specs = []
    for name, config in (("cache", target), ("draft_cache", drafter)):
        if config is not None:
            slots = limits.num_pages * limits.page_size
            shape = (config.num_layers, slots, 2, config.num_kv_heads, config.head_dim)
            specs.append(BufferSpec(name, shape, dtype, "kv", 0, dummy_dim=1, dummy_len=limits.page_size))
    return specs


def _stage_specs(
    limits: Limits, target: ModelConfig, drafter: DrafterConfig | None, dtype: torch.dtype
) -> list[BufferSpec]:
    """What stages hand over: trees after build, hidden and taps after verify, results after commit."""
    places = limits.max_rows * (limits.max_nodes + 1)
    words, int64 = limits.max_nodes // 64 + 1, torch.int64

    def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> BufferSpec:
        return BufferSpec(name, shape, dtype, "scratch", 0, need=_need("round", lambda key: key.places))

    layout = ResultLayout.of(limits)
    specs = [scratch(f"places.{field}", (places,), int64) for field in PLACE_FIELDS]
    specs += [
        BufferSpec(
            "places.row_start",
            (limits.max_rows + 2,),
            int64,
            "scratch",
            need=_need("round", lambda key: key.rows + 2),
        ),
        scratch("places.bits", (places, words), int64),
        scratch("verify.hidden", (places, target.hidden_size), dtype),
        BufferSpec("result.ints", (layout.places, layout.rows, layout.ints), int64, "output", dummy_len=0),
        BufferSpec("result.floats", (layout.places, layout.rows, layout.floats), torch.float32, "output", dummy_len=0),
        # Flat: a round of fewer depths has shorter rows.
        BufferSpec("draft.truth", ((limits.max_rows + 1) * (limits.max_depth + 1),), int64, "scratch"),
    ]
    if limits.forecast:
        specs.append(BufferSpec("draft.mass", (limits.max_rows, len(limits.forecast)), torch.float32, "scratch"))
    if drafter is not None:
        specs.append(scratch("verify.taps", (places, drafter.tap_size), dtype))
    return specs
