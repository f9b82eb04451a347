# Owns: the row-wise kernels and the places of a pass on a GPU, at the shapes of known models.
# Promises: bfloat16 results are one or two roundings from float64; bits repeat; slots beyond 2^31 elements are reached.
# Never: measures speed.
"""ops/kernels/rowwise.py and ops/kernels/places.py. T: places, N, K, D: heads, K/V heads, head dim, S: slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch on a GPU machine")

from ratoon.core.rope import RopeConfig
from ratoon.ops import fused, places
from ratoon.ops.kernels import rowwise
from ratoon.ops.launch import use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]
HEADS = {
    "qwen3-8b": (32, 8, 128, True),
    "smollm2": (9, 3, 64, False),
    "qwen2.5-1.5b": (12, 2, 128, False),
    "96 wide": (32, 8, 96, False),
    "256 wide": (16, 8, 256, True),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills what torch allocates with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    use_kernels("auto")


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def agree(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """`want` in float64. Roundings of half a bit each; NaN never passes."""
    half_bit = torch.finfo(got.dtype).eps / 2
    error = float((got.double() - want).norm())
    assert error <= (roundings * half_bit + 3e-7) * float(want.norm()), f"relative error {error / float(want.norm())}"


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def turned(x_TND: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.double().unsqueeze(2).unbind(1)
    return fused.apply_rope(x_TND, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 4096, 7168, 8192])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    for num_places in (1, 17, 300):
        x, weight = draw(num_places, size, dtype=dtype), draw(size, dtype=dtype)
        want = normed(x, weight)
        agree(fused.rms_norm(x, weight, EPS), want)
        buffer = torch.full((num_places, 3 * size + 5), 7.0, device="cuda", dtype=dtype)
        part = buffer[:, size + 3 : 2 * size + 3]
        agree(rowwise.rms_norm(x, weight, EPS, part), want)
        assert (buffer[:, : size + 3] == 7).all() and (buffer[:, 2 * size + 3 :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 12288])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    for num_places in (1, 300):
        gate_up = draw(num_places, 2 * width, dtype=dtype) * 4
        gate, up = gate_up.double().chunk(2, dim=1)
        agree(rowwise.swiglu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_rotary_table(head_dim: int) -> None:
    inv_freq = fused.inverse_frequencies(RopeConfig(theta=1e6), head_dim, torch.device("cuda"))
    position = torch.tensor([0, 1, 77, 4095, 131071, 1000003], device="cuda")
    angle = (position.float()[:, None] * inv_freq).double()
    want = torch.stack((angle.cos(), angle.sin()), dim=1) * 1.25
    assert (rowwise.rotary_table(position, inv_freq, 1.25) - want).abs().max() < 5e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HEADS)
def test_rotate_store(model: str, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, with_norm = HEADS[model]
    num_all = num_heads + 2 * num_kv_heads
    norms = [draw(head_dim, dtype=dtype) for _ in range(2)] if with_norm else [None, None]
    inv_freq = fused.inverse_frequencies(RopeConfig(), head_dim, torch.device("cuda"))
    for num_places in (1, 16, 64, 600):
        qkv = draw(num_places, num_all * head_dim, dtype=dtype)
        slot = torch.randperm(1023, device="cuda")[:num_places] + 1
        cache = torch.full((2, 1024, 2, num_kv_heads, head_dim), float("nan"), device="cuda", dtype=dtype)
        table = rowwise.rotary_table(torch.randint(4096, (num_places,), device="cuda"), inv_freq, 1.0)
        q, k, v = qkv.view(num_places, num_all, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        wanted = [x.double() if norm is None else normed(x, norm) for x, norm in zip((q, k), norms, strict=True)]
        given = (qkv, table, norms[0], norms[1], EPS, num_heads, num_kv_heads, cache[1], slot)
        got = rowwise.rotate_store(*given)
        agree(got, turned(wanted[0], table), 2)
        agree(cache[1, slot, 0], turned(wanted[1], table), 2)
        assert torch.equal(cache[1, slot, 1], v)
        untouched = torch.ones(1024, dtype=torch.bool, device="cuda").index_fill(0, slot, False)
        assert cache[0].isnan().all() and cache[1, untouched].isnan().all()
        kept = cache.clone()
        assert torch.equal(rowwise.rotate_store(*given), got)
        assert torch.equal(cache.nan_to_num(9.0), kept.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_layers", "num_kv_heads", "head_dim"), [(5, 8, 128), (5, 3, 64), (6, 8, 128)])
def test_context_store(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    inv_freq = fused.inverse_frequencies(RopeConfig(), head_dim, torch.device("cuda"))
    norm = draw(num_layers, head_dim, dtype=dtype)
    for num_places in (1, 16, 300):
        kv = draw(num_places, num_layers * 2 * num_kv_heads * head_dim, dtype=dtype)
        slot = torch.randperm(511, device="cuda")[:num_places] + 1
        cache = torch.full((num_layers, 512, 2, num_kv_heads, head_dim), float("nan"), device="cuda", dtype=dtype)
        table = rowwise.rotary_table(torch.randint(4096, (num_places,), device="cuda"), inv_freq, 1.0)
        rowwise.context_store(kv, table, norm, EPS, cache, slot)
        k, v = kv.view(num_places, num_layers, 2, num_kv_heads, head_dim).unbind(2)
        for layer in range(num_layers):
            agree(cache[layer, slot, 0], turned(normed(k[:, layer], norm[layer]), table), 2)
            assert torch.equal(cache[layer, slot, 1], v[:, layer])
        assert int(cache.isfinite().sum()) == kv.numel()


def test_slots_beyond_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    num_kv_heads, head_dim = 8, 128
    num_slots = 2**31 // (2 * num_kv_heads * head_dim) + 100
    if free < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    torch.use_deterministic_algorithms(False)
    cache = torch.zeros(2, num_slots, 2, num_kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    slot = torch.tensor([num_slots - 1, 5], device="cuda")
    table = torch.zeros(2, 2, head_dim // 2, device="cuda")
    table[:, 0] = 1
    qkv = draw(2, 3 * num_kv_heads * head_dim, dtype=torch.bfloat16)
    rowwise.rotate_store(qkv, table, None, None, 0.0, num_kv_heads, num_kv_heads, cache[1], slot)
    kv = qkv.view(2, 3, num_kv_heads, head_dim)[:, 1:]
    assert torch.equal(cache[1, slot], kv) and not cache[0, slot].any()
    rowwise.context_store(
        kv.repeat(1, 2, 1, 1).flatten(1), table, torch.ones(2, head_dim, device="cuda"), 0.0, cache, slot
    )
    assert torch.equal(cache[:, slot, 1], kv[:, 1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 4096])
def test_block_embeddings(size: int, dtype: torch.dtype) -> None:
    embed, anchor, mask = (
        draw(1000, size, dtype=dtype),
        torch.tensor([999, 0, 41], device="cuda"),
        draw(size, dtype=dtype),
    )
    want = torch.cat((embed[anchor].unsqueeze(1), mask.expand(3, 15, -1)), dim=1).flatten(0, 1)
    assert torch.equal(rowwise.block_embeddings(embed, anchor, mask, 1.0, 16), want)
    assert torch.equal(rowwise.block_embeddings(embed, anchor, mask, 2.5, 16), want * 2.5)


@pytest.mark.parametrize("page_size", [16, 64])
def test_places(page_size: int) -> None:
    num_seats, num_rows, num_pages = 33, 32, 20
    seat = torch.randperm(num_seats, device="cuda")[:num_rows]
    start = torch.randint(num_pages * page_size, (num_seats,), device="cuda")
    table = torch.randint(1, 5000, (num_seats, num_pages), device="cuda", dtype=torch.int32)
    row_of = torch.arange(num_rows + 1, device="cuda").repeat_interleave(9)
    local = torch.arange(9, device="cuda").repeat(num_rows + 1)
    base = torch.randint(num_pages * page_size, (num_rows,), device="cuda")
    results: dict[str, list[Tensor]] = {}
    for kernels in ("torch", "triton"):
        use_kernels(kernels)
        found = [
            *places.tree_places(seat, start, table, page_size, row_of, local, local // 2),
            *places.block_places(seat, start, table, page_size, 16),
            *places.block_places(seat, start, table, page_size, 512, base),
        ]
        results[kernels] = found
    for got, want in zip(results["triton"], results["torch"], strict=True):
        assert torch.equal(got, want)
