# Owns: paged attention on a GPU, at the shapes of known models.
# Promises: every pass is held against a float64 softmax that knows neither pages nor tiles; bits repeat in graphs too.
# Never: measures speed.
"""ops/kernels/attention.py in bfloat16 and float32. R: rows, T: places, S: slots or seats, P: pages of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch on a GPU machine")

from ratoon.models.dflash import visible
from ratoon.ops.attention import NUM_COUNTERS, Span
from ratoon.ops.kernels.attention import attend
from ratoon.ops.tree import TreeBatch, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGE = 16
Heads = tuple[int, int, int]
QWEN3: Heads = (32, 8, 128)
SMOLLM2: Heads = (9, 3, 64)


@dataclass(frozen=True)
class Case:
    """Rows in scattered pages; slots that no row owns hold NaN. position: RoPE positions of each row's slots."""

    span: Span
    q_TND: Tensor
    cache: Tensor
    bases: tuple[int, ...]
    counts: tuple[int, ...]
    position: tuple[Tensor, ...]


def make_case(
    bases: Sequence[int],
    counts: Sequence[int],
    heads: Heads,
    *,
    tree: bool,
    surplus: int = 0,
    by_row: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    """Rows of `counts` own places after `bases` prefix slots; the trees' parents are random."""
    generator = torch.Generator("cuda").manual_seed(seed)
    num_rows, (num_q, num_kv, head_dim) = len(bases), heads
    num_pages = max(-(-(base + count) // PAGE) for base, count in zip(bases, counts, strict=True))
    page_RP = torch.randperm(num_rows * num_pages, generator=generator, device="cuda").view(num_rows, -1) + 1
    seat_R = torch.randperm(num_rows, generator=generator, device="cuda") + 1
    table_SP = torch.zeros(num_rows + 1, num_pages, dtype=torch.int32, device="cuda")
    table_SP[seat_R] = page_RP.int()
    base_R, base_S = torch.tensor(bases, device="cuda"), torch.full((num_rows + 1,), 2**40, device="cuda")
    base_S[seat_R] = base_R
    cache = torch.full((num_rows * num_pages + 1, PAGE, 2, num_kv, head_dim), float("nan"), device="cuda", dtype=dtype)
    cache = cache.view(-1, 2, num_kv, head_dim)
    cache[:PAGE] = 0
    depth_RN = [torch.arange(count) for count in counts]
    packed = None
    if tree:
        trees = _random_trees([count - 1 for count in counts], seed)
        packed = pack(trees, trees.num_nodes, torch.zeros(num_rows, dtype=torch.int64), sum(counts) + surplus)
        depth_RN = [packed.depth[packed.row_of == row] for row in range(num_rows)]
    position = []
    for row, (base, count) in enumerate(zip(bases, counts, strict=True)):
        slot = torch.arange(base + count, device="cuda")
        kv = torch.randn(base + count, 2, num_kv, head_dim, generator=generator, device="cuda")
        cache[page_RP[row, slot // PAGE] * PAGE + slot % PAGE] = kv.to(dtype)
        position.append(torch.cat((torch.arange(base), base + depth_RN[row])).cuda())
    places = sum(counts) + surplus
    q_TND = torch.randn(places, num_q, head_dim, generator=generator, device="cuda").to(dtype)
    span = Span(seat_R, base_S, base_R if by_row else None, table_SP, PAGE, num_pages * PAGE, max(counts))
    if packed is not None:
        parts = dict(row_start=packed.row_start.cuda(), depth_T=packed.depth.cuda(), bits_TW=packed.bits.cuda())
        span = dataclasses.replace(span, **parts)
    return Case(span, q_TND, cache, tuple(bases), tuple(counts), tuple(position))


def _random_trees(sizes: Sequence[int], seed: int) -> TreeBatch:
    rng = np.random.default_rng(seed)
    parent, depth = (np.zeros((len(sizes), max(*sizes, 1)), dtype=np.int64) for _ in range(2))
    for row, size in enumerate(sizes):
        for node in range(1, size + 1):
            parent[row, node - 1] = above = int(rng.integers(max(0, node - 5), node))
            depth[row, node - 1] = 1 + (depth[row, above - 1] if above else 0)
    parent_RM, depth_RM = torch.from_numpy(parent), torch.from_numpy(depth)
    score = torch.zeros(parent_RM.shape)
    return TreeBatch(parent_RM, parent_RM, depth_RM, parent_RM, score, torch.tensor(sizes), int(depth.max()))


def oracle(case: Case, causal: bool, window: int | None) -> Tensor:
    """float64 [T, N * D]; 0 for surplus places."""
    (places, num_q, head_dim), num_kv, span = case.q_TND.shape, case.cache.shape[2], case.span
    out = torch.zeros(places, num_q, head_dim, dtype=torch.float64, device="cuda")
    first = 0
    for row, (base, count, position) in enumerate(zip(case.bases, case.counts, case.position, strict=True)):
        slot = torch.arange(base + count, device="cuda")
        page = span.page_table_SP[span.seat_R[row], slot // PAGE].long()
        k, v = case.cache[page * PAGE + slot % PAGE].double().repeat_interleave(num_q // num_kv, 2).unbind(1)
        q = case.q_TND[first : first + count].double()
        seen = visible(position[base:, None], position, window, causal)
        if span.bits_TW is not None:
            node = torch.arange(count, device="cuda")
            bits = span.bits_TW[first : first + count][:, node // 64] >> (node % 64) & 1
            seen = visible(position[base:, None], position, window, True)
            seen[:, base:] &= bits.bool()
        score = torch.einsum("tnd,snd->nts", q, k) * head_dim**-0.5
        weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first : first + count] = torch.einsum("nts,snd->tnd", weight, v)
        first += count
    return out.flatten(1)


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference in units of the largest result; NaN is infinitely wrong."""
    return float(((got.double() - want).abs() / want.abs().max()).nan_to_num(nan=torch.inf).max())


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, as a graph's pool may."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    with torch.no_grad():
        yield


def check(case: Case, causal: bool = True, window: int | None = None) -> None:
    want = oracle(case, causal, window)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    bound = 2e-2 if case.q_TND.dtype == torch.bfloat16 else 1e-5
    for given in (None, counters):
        got = attend(case.q_TND, case.cache, case.span, causal, window, given)
        assert error(got, want) < bound
        assert torch.equal(got, attend(case.q_TND, case.cache, case.span, causal, window, given))
    assert not counters.any()


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@DTYPES
@pytest.mark.parametrize("heads", [QWEN3, SMOLLM2, (14, 2, 64), (64, 8, 128), (16, 2, 256), (6, 6, 96)])
def test_a_tree_of_one_row(heads: Heads, dtype: torch.dtype) -> None:
    check(make_case([1000], [64], heads, tree=True, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("heads", [QWEN3, SMOLLM2])
def test_plain_decoding(heads: Heads, dtype: torch.dtype) -> None:
    check(make_case([517], [1], heads, tree=True, dtype=dtype))
    check(make_case([0, 144, 1023, 400], [1] * 4, heads, tree=True, dtype=dtype))


@pytest.mark.parametrize("heads", [QWEN3, SMOLLM2])
def test_uneven_trees_and_surplus_places(heads: Heads) -> None:
    counts = np.random.default_rng(1).integers(1, 40, 33).tolist()
    bases = np.random.default_rng(2).integers(0, 700, 33).tolist()
    check(make_case(bases, counts, heads, tree=True, surplus=50))
    check(make_case([300, 64], [128, 90], heads, tree=True, surplus=3))
    check(make_case([300, 64], [128, 90], heads, tree=True, surplus=3), window=37)


@DTYPES
@pytest.mark.parametrize("window", [None, 5, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_draft_blocks(causal: bool, window: int | None, dtype: torch.dtype) -> None:
    check(make_case([700], [16], QWEN3, tree=False, dtype=dtype), causal, window)
    check(make_case([0, 31, 700, 255, 512], [16] * 5, SMOLLM2, tree=False, dtype=dtype), causal, window)


@pytest.mark.parametrize(("base", "width"), [(0, 512), (700, 256), (1000, 130)])
def test_chunks_of_a_prompt(base: int, width: int) -> None:
    check(make_case([base], [width], QWEN3, tree=False, by_row=True))
    check(make_case([base, 3], [width, width], SMOLLM2, tree=False, by_row=True))


def test_a_long_row_in_many_ranges() -> None:
    check(make_case([20_000], [1], QWEN3, tree=True))
    check(make_case([20_000, 5], [9, 2], (8, 2, 128), tree=True))


def test_graphs_replayed_in_turn_share_their_counters() -> None:
    """Rows grow between replays, so the ranges that there are to count change too."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    cases = [make_case([900], [64], QWEN3, tree=True), make_case([300, 40], [1, 1], SMOLLM2, tree=True)]
    graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    for case in cases:
        attend(case.q_TND, case.cache, case.span, True, None, counters)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                out = attend(case.q_TND, case.cache, case.span, True, None, counters)
        graphs.append((graph, out))
    for step in range(60):
        case, (graph, out) = cases[step % 2], graphs[step % 2]
        shorter = torch.tensor(case.bases, device="cuda") * (60 - step) // 60
        case.span.base_S[case.span.seat_R] = shorter
        graph.replay()
        assert torch.equal(out, attend(case.q_TND, case.cache, case.span, True, None, counters))
        assert torch.isfinite(out).all() and not counters.any()
