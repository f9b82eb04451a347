# Owns: the row-wise kernels and the places of a pass against their references, in interpret mode.
# Promises: fresh memory is NaN, operands lie inside NaN, and slots that nobody named keep what they held.
# Never: measures speed.
"""ops/kernels/rowwise.py and ops/kernels/places.py. T: places, N, K, D: heads, K/V heads, head dim, S: slots.

The narrow type is float16: the interpreter cuts bfloat16 off instead of rounding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.core.drafter import DrafterConfig
from ratoon.core.rope import RopeConfig
from ratoon.models.dflash import DFlash
from ratoon.models.layers import Heads, RMSNorm, Rotary
from ratoon.ops import fused, places
from ratoon.ops.attention import block_layout, packed_layout
from ratoon.ops.kernels import rowwise
from ratoon.ops.launch import set_recorder, use_kernels

EPS = 0.03
"""Large, so that a norm without it is seen."""
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills what torch allocates: NaN for numbers, the largest value for integers."""
    torch.use_deterministic_algorithms(True)
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    use_kernels("auto")
    set_recorder(None)


@pytest.fixture(params=[1024, 4])
def blocked(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Few places take one head per program; with a small _FILL a program takes many."""
    monkeypatch.setattr(rowwise, "_FILL", request.param)
    return request.param


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values with NaN before and behind them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    room = torch.full((values.numel() + 512,), NAN, dtype=dtype)
    room[256:-256] = values.flatten()
    return room[256:-256].view(shape)


def wide(x: Tensor, extra: int = 24) -> Tensor:
    """The same rows, each followed by NaN."""
    room = torch.full((x.shape[0], x.shape[1] + extra), NAN, dtype=x.dtype)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def launches(function: Any) -> list[str]:
    names: list[str] = []
    set_recorder(lambda run, *args: (names.append(run.__name__), run(*args))[1])
    function()
    set_recorder(None)
    return names


# ---- norm and gate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 31, 32, 33, 576, 2048])
@pytest.mark.parametrize("num_places", [0, 1, 3])
def test_rms_norm(size: int, num_places: int) -> None:
    x, weight = draw(num_places, size, seed=1), draw(size, seed=2)
    want = fused.rms_norm(x, weight, EPS)
    use_kernels("triton")
    torch.testing.assert_close(fused.rms_norm(x, weight, EPS), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rowwise.rms_norm(wide(x), weight, EPS), want, rtol=1e-5, atol=1e-5)


def test_rms_norm_into_a_part_of_a_buffer() -> None:
    x, weight = draw(5, 40, seed=3), draw(40, seed=4)
    want = fused.rms_norm(x, weight, EPS)
    buffer = torch.full((7, 100), 7.0)
    part = buffer[1:6, 30:70]
    part.fill_(NAN)
    assert rowwise.rms_norm(x, weight, EPS, part) is part
    torch.testing.assert_close(part, want, rtol=1e-5, atol=1e-5)
    assert (buffer[:, :30] == 7).all() and (buffer[:, 70:] == 7).all() and (buffer[[0, 6]] == 7).all()
    assert rowwise.rms_norm(x, weight, EPS, x) is x
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)


def test_narrow_norms_round_once() -> None:
    x, weight = draw(4, 96, seed=5, dtype=torch.float16), draw(96, seed=6, dtype=torch.float16)
    want = fused.rms_norm(x.float(), weight.float(), EPS).to(torch.float16)
    got = rowwise.rms_norm(x, weight, EPS)
    assert got.dtype == torch.float16 and (got != want).sum() <= 2  # sums may differ in their last bit


@pytest.mark.parametrize("width", [1, 33, 1024, 1030])
@pytest.mark.parametrize("num_places", [0, 1, 3])
def test_swiglu(width: int, num_places: int) -> None:
    gate_up = draw(num_places, 2 * width, seed=7) * 4
    want = fused.swiglu(gate_up)
    torch.testing.assert_close(rowwise.swiglu(gate_up), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rowwise.swiglu(wide(gate_up)), want, rtol=1e-5, atol=1e-5)


# ---- rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "amplitude"), [(64, 1.0), (96, 1.3), (2, 1.0)])
def test_rotary_table(head_dim: int, amplitude: float) -> None:
    inv_freq = fused.inverse_frequencies(RopeConfig(theta=5e5), head_dim)
    position = torch.tensor([0, 1, 77, 4095, 131071, 1000003])
    cos, sin = fused.rotary(position, inv_freq, amplitude, torch.float32)
    table = rowwise.rotary_table(position, inv_freq, amplitude)
    assert table.shape == (6, 2, head_dim // 2) and table.dtype == torch.float32
    torch.testing.assert_close(table[:, 0], cos[:, 0, : head_dim // 2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(table[:, 1], sin[:, 0, head_dim // 2 :], rtol=1e-6, atol=1e-6)


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int, normed: bool) -> Heads:
    if not normed:
        return Heads(num_heads, num_kv_heads, head_dim)
    norms = [RMSNorm(head_dim, EPS) for _ in range(2)]
    for norm, seed in zip(norms, (11, 12), strict=True):
        norm.weight.copy_(draw(head_dim, seed=seed))
    return Heads(num_heads, num_kv_heads, head_dim, *norms)


def rotate(qkv: Tensor, table: Tensor, heads: Heads, cache: Tensor, slot: Tensor) -> Tensor:
    q_norm, k_norm = (None if norm is None else norm.weight for norm in (heads.q_norm, heads.k_norm))
    return rowwise.rotate_store(
        qkv, table, q_norm, k_norm, EPS if heads.q_norm else 0.0, heads.num_heads, heads.num_kv_heads, cache, slot
    )


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 96), (1, 1, 128), (2, 1, 256), (3, 3, 16)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_places", [0, 1, 4])
def test_rotate_store(shape: tuple[int, int, int], normed: bool, num_places: int, blocked: int) -> None:
    num_heads, num_kv_heads, head_dim = shape
    heads = heads_of(*shape, normed)
    qkv = draw(num_places, (num_heads + 2 * num_kv_heads) * head_dim, seed=13)
    rotary = Rotary(RopeConfig(amplitude=1.2), head_dim)
    position = torch.tensor([9, 9, 10, 700])[:num_places]
    slot = torch.tensor([12, 5, 19, 0])[:num_places]
    caches = torch.full((3, 20, 2, num_kv_heads, head_dim), NAN)

    q, k, v = heads.split(qkv, *rotary(position, torch.float32))
    want = caches.clone()
    want[1, slot] = torch.stack((k, v), dim=1)
    table = rowwise.rotary_table(position, rotary.inv_freq, rotary.rope.amplitude)
    given = qkv if normed else wide(qkv)
    before = given.clone()
    torch.testing.assert_close(rotate(given, table, heads, caches[1], slot), q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(given, before)


def test_values_are_stored_bit_for_bit_and_dummies_stay_in_slot_0(blocked: int) -> None:
    heads = heads_of(4, 2, 32, True)
    qkv = draw(6, 8 * 32, seed=14, dtype=torch.float16)
    cache = torch.full((9, 2, 2, 32), NAN, dtype=torch.float16)
    slot = torch.tensor([3, 0, 8, 0, 0, 4])
    table = rowwise.rotary_table(torch.arange(6), Rotary(RopeConfig(), 32).inv_freq, 1.0)
    q = rotate(qkv, table, heads, cache, slot)
    assert q.isfinite().all() and cache[[0, 3, 4, 8]].isfinite().all() and cache[[1, 2, 5, 6, 7]].isnan().all()
    assert torch.equal(cache[[3, 8, 4], 1], qkv[[0, 2, 5], 6 * 32 :].view(3, 2, 32))


def test_the_norm_rounds_before_the_rotation() -> None:
    heads = heads_of(2, 1, 64, True)
    for norm in (heads.q_norm, heads.k_norm):
        assert norm is not None
        norm.weight.data = norm.weight.data.to(torch.float16)
    qkv = draw(8, 4 * 64, seed=15, dtype=torch.float16)
    table = rowwise.rotary_table(torch.arange(8) * 31, Rotary(RopeConfig(), 64).inv_freq, 1.0)
    q = rotate(qkv, table, heads, torch.zeros(9, 2, 1, 64, dtype=torch.float16), torch.arange(8) + 1)
    assert heads.q_norm is not None
    normed = fused.rms_norm(qkv[:, :128].float().view(8, 2, 64), heads.q_norm.weight.float(), EPS)
    cos, sin = torch.cat((table[:, :1], table[:, :1]), -1), torch.cat((-table[:, 1:], table[:, 1:]), -1)
    want = fused.apply_rope(normed.to(torch.float16).float(), cos, sin).to(torch.float16)
    unrounded = fused.apply_rope(normed, cos, sin).to(torch.float16)
    assert (q != want).float().mean() < 0.02 < (unrounded != want).float().mean()


# ---- the drafter's kernels ----------------------------------------------------------------------------------------


def drafter(num_layers: int, num_kv_heads: int, head_dim: int, **changes: Any) -> DFlash:
    config = DrafterConfig(
        hidden_size=24,
        intermediate_size=32,
        num_layers=num_layers,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=EPS,
        rope=RopeConfig(amplitude=1.1),
        vocab_size=50,
        block_size=8,
        target_layer_ids=(1, 2),
        mask_token_id=41,
        windows=(None,) * num_layers,
        causal=(False,) * num_layers,
        **changes,
    )
    model = DFlash(config)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(draw(*parameter.shape, seed=100 + seed))
    return model


@pytest.mark.parametrize(("num_layers", "num_kv_heads", "head_dim"), [(1, 1, 64), (3, 2, 16), (2, 1, 96)])
def test_context_store(num_layers: int, num_kv_heads: int, head_dim: int, blocked: int) -> None:
    model = drafter(num_layers, num_kv_heads, head_dim)
    model.stack_context()
    assert model.context is not None
    position, slot = torch.tensor([4, 5, 6, 901, 2]), torch.tensor([3, 9, 1, 6, 0])
    kv = draw(5, num_layers * 2 * num_kv_heads * head_dim, seed=16)
    # The stacked product is not under test: it hands over `kv` as it is.
    model.context.proj = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    k, v = model.context_kv(kv, position)
    want = torch.full((num_layers, 10, 2, num_kv_heads, head_dim), NAN)
    want[:, slot] = torch.stack((k, v), dim=2)
    table = rowwise.rotary_table(position, model.rotary.inv_freq, model.rotary.rope.amplitude)
    got = torch.full_like(want, NAN)
    rowwise.context_store(wide(kv) if num_layers == 3 else kv, table, model.context.k_norm_LD, EPS, got, slot)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_many_dummy_places_may_name_slot_0() -> None:
    cache, kv = torch.full((2, 4, 2, 1, 16), NAN), draw(6, 2 * 2 * 16, seed=17)
    table = rowwise.rotary_table(torch.zeros(6, dtype=torch.int64), Rotary(RopeConfig(), 16).inv_freq, 1.0)
    rowwise.context_store(kv, table, draw(2, 16, seed=18), EPS, cache, torch.tensor([0, 2, 0, 0, 3, 0]))
    assert cache[:, [0, 2, 3]].isfinite().all() and cache[:, 1].isnan().all()
    assert torch.equal(cache[:, 2, 1, 0], kv[1].view(2, 2, 16)[:, 1])


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("num_rows", "block"), [(1, 1), (1, 8), (3, 4)])
def test_block_embeddings(scale: float, learned: bool, num_rows: int, block: int) -> None:
    model = drafter(1, 1, 16, input_embedding_scale=scale)
    if learned:
        model.set_mask_embedding(draw(24, seed=19))
    embed = wide(draw(50, 24, seed=20), extra=0)
    anchor = torch.tensor([49, 0, 7])[:num_rows]
    want = model.block_embeddings(embed, anchor, block)
    use_kernels("triton")
    got = model.block_embeddings(embed, anchor, block)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    mask = embed[41] if model.mask_embedding is None else model.mask_embedding
    torch.testing.assert_close(rowwise.block_embeddings(wide(embed), anchor, mask, scale, block), want, rtol=0, atol=0)


def test_block_embeddings_of_more_than_one_tile() -> None:
    embed, mask = draw(5, 1100, seed=21, dtype=torch.float16), draw(1100, seed=22)
    got = rowwise.block_embeddings(embed, torch.tensor([4, 2]), mask, 3.0, 3).view(2, 3, 1100)
    assert torch.equal(got[:, 0], embed[[4, 2]] * 3.0)
    assert torch.equal(got[:, 1:], (mask.to(torch.float16) * 3.0).expand(2, 2, 1100))


# ---- places -------------------------------------------------------------------------------------------------------

SEATS = torch.tensor([4, 0, 2, 5])
START = torch.tensor([0, 90, 17, 91, 15, 40])
TABLE = torch.randperm(35, generator=torch.Generator().manual_seed(8)).to(torch.int32).view(7, 5)[1:] + 1


def packed_rows(counts: list[int], dummies: int) -> dict[str, Tensor]:
    """row_start [R + 2], row_of, local and depth [T]."""
    sizes = torch.tensor([*counts, dummies])
    row_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    start = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    local = torch.arange(len(row_of)) - start[row_of]
    return {"row_start": start, "row_of": row_of, "local": local, "depth": (local + 1) // 2}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("counts", "dummies"), [([1], 0), ([3, 1, 7, 2], 5), ([60, 40], 0), ([30, 1, 1], 40)])
def test_tree_places(kernels: Any, page_size: int, counts: list[int], dummies: int) -> None:
    rows, num_rows = packed_rows(counts, dummies), len(counts)
    seat, width = SEATS[:num_rows], max(counts)
    row_of, local, depth = rows["row_of"], rows["local"], rows["depth"]
    layout = packed_layout(rows["row_start"], row_of, local, START[seat], TABLE[seat], page_size, width)
    use_kernels(kernels)
    slot, position = places.tree_places(seat, START, TABLE, page_size, row_of, local, depth)
    assert slot.dtype == position.dtype == torch.int64
    assert torch.equal(slot, layout.slot_T)
    start = torch.cat((START[seat], torch.zeros(1, dtype=torch.int64)))
    assert torch.equal(position, start[row_of] + depth)
    assert not slot[row_of == num_rows].any()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 100), (4, 16), (3, 33)])
@pytest.mark.parametrize("chunk", [False, True])
def test_block_places(kernels: Any, page_size: int, num_rows: int, width: int, chunk: bool) -> None:
    seat = SEATS[:num_rows]
    base = torch.tensor([33, 0, 79, 8])[:num_rows] if chunk else None
    first = START[seat] if base is None else base
    use_kernels(kernels)
    slot, position = places.block_places(seat, START, TABLE, page_size, width, base)
    assert slot.dtype == position.dtype == torch.int64
    assert torch.equal(slot, block_layout(first, TABLE[seat], page_size, width).slot_T)
    assert torch.equal(position.view(num_rows, width), first[:, None] + torch.arange(width))


def test_a_page_table_may_be_part_of_a_wider_one() -> None:
    wider = torch.full((6, 9), 10**6, dtype=torch.int32)
    wider[:, :5] = TABLE
    use_kernels("triton")
    for table in (TABLE, wider[:, :5]):
        slot, _ = places.block_places(SEATS, START, table, 8, 60)
        assert torch.equal(slot, block_layout(START[SEATS], TABLE[SEATS], 8, 60).slot_T)


# ---- the contract of a graph --------------------------------------------------------------------------------------


def test_each_operation_is_one_launch() -> None:
    heads, x = heads_of(2, 1, 16, True), draw(3, 64, seed=23)
    table = rowwise.rotary_table(torch.arange(3), Rotary(RopeConfig(), 16).inv_freq, 1.0)
    cache, slot, rows = torch.zeros(2, 9, 2, 1, 16), torch.tensor([1, 2, 3]), packed_rows([2, 2], 3)
    use_kernels("triton")
    counts = [
        launches(lambda: rowwise.rms_norm(x, x[0], EPS)),
        launches(lambda: rowwise.swiglu(x)),
        launches(lambda: rowwise.rotary_table(slot, x[0], 1.0)),
        launches(lambda: rotate(x, table, heads, cache[0], slot)),
        launches(lambda: rowwise.context_store(x, table, draw(2, 16, seed=24), EPS, cache, slot)),
        launches(lambda: rowwise.block_embeddings(x, torch.tensor([2, 0]), x[1], 1.0, 4)),
        launches(lambda: places.block_places(SEATS, START, TABLE, 8, 5)),
        launches(lambda: places.tree_places(SEATS[:2], START, TABLE, 8, rows["row_of"], rows["local"], rows["depth"])),
    ]
    assert [len(names) for names in counts] == [1] * 8


def test_a_recorded_launch_reads_seats_starts_and_slots_anew() -> None:
    calls: list[Any] = []
    use_kernels("triton")
    set_recorder(lambda run, *args: calls.append((run, args)))
    seat, start, table = SEATS.clone(), START.clone(), TABLE.clone()
    slot, position = places.block_places(seat, start, table, 8, 6)
    seat[0], start[0], table[2] = 3, 12, table[5].clone()
    ((run, args),) = calls
    run(*args)
    use_kernels("torch")
    want_slot, want_position = places.block_places(seat, start, table, 8, 6)
    assert torch.equal(slot, want_slot) and torch.equal(position, want_position)
