# Owns: the products on a GPU, at the shapes of two known models.
# Promises: bfloat16 errors are those of one rounding; every kernel's bits repeat, launched early or not.
# Never: measures speed.
"""ops/kernels/linear.py in bfloat16 and float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch on a GPU machine")

from ratoon.ops import linear as reference
from ratoon.ops.kernels import linear
from ratoon.ops.launch import use_early, use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# rows of the weight, inputs, norm, gated, residual, bias
SHAPES = {
    "qwen3-8b qkv": (6144, 4096, 1, 0, 0, 0),
    "qwen3-8b o": (4096, 4096, 0, 0, 1, 0),
    "qwen3-8b gate_up": (24576, 4096, 1, 1, 0, 0),
    "qwen3-8b down": (4096, 12288, 0, 0, 1, 0),
    "qwen2 qkv": (2048, 1536, 1, 0, 0, 1),
    "smollm2 qkv": (960, 576, 1, 0, 0, 0),
    "smollm2 o": (576, 576, 0, 0, 1, 0),
    "smollm2 gate_up": (3072, 576, 1, 1, 0, 0),
    "smollm2 down": (576, 1536, 0, 0, 1, 0),
}


@pytest.fixture(autouse=True)
def exact_reference() -> Iterator[None]:
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cuda.matmul.allow_tf32 = kept
    use_kernels("auto")


def operands(name: str, num_places: int, dtype: torch.dtype) -> dict[str, Any]:
    out_size, in_size, norm, gated, residual, bias = SHAPES[name]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    return {
        "x_TH": draw(num_places, in_size),
        "weight_OH": (draw(out_size, in_size) * in_size**-0.5).contiguous(),
        "bias_O": draw(out_size) if bias else None,
        "norm_H": draw(in_size) if norm else None,
        "eps": 1e-6,
        "residual_TO": draw(num_places, out_size) if residual else None,
        "gated": bool(gated),
    }


def error(y: Tensor, given: dict[str, Any]) -> float:
    """Relative to the reference in float32 of the same (rounded) operands."""
    wide: dict[str, Any] = {k: v.float() if isinstance(v, Tensor) else v for k, v in given.items()}
    use_kernels("torch")
    want = reference.project(**wide)
    use_kernels("auto")
    return float((y.float() - want).norm() / want.norm())


@pytest.mark.parametrize("num_places", [1, 16, 17, 64, 129])
@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16(name: str, num_places: int) -> None:
    given = operands(name, num_places, torch.bfloat16)
    y = reference.project(**given)
    # One rounding to 8 bits is 0.0017 in this norm; the library path rounds norm and gate as well.
    assert error(y, given) < 4e-3
    assert torch.equal(reference.project(**given), y)


@pytest.mark.parametrize("num_places", [1, 33, 65])
@pytest.mark.parametrize("name", ["qwen2 qkv", "smollm2 gate_up", "smollm2 down"])
def test_float32(name: str, num_places: int) -> None:
    given = operands(name, num_places, torch.float32)
    assert error(reference.project(**given), given) < 1e-5


def in_graph(fn: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def test_an_early_launch_waits_for_what_it_reads() -> None:
    """A chain of products in one graph, each reading what the one before it wrote, some over a plain copy."""
    up = operands("smollm2 gate_up", 16, torch.bfloat16)
    down = operands("smollm2 down", 16, torch.bfloat16)
    x = up["x_TH"].clone()
    h, between = torch.empty_like(x), torch.empty_like(x)
    up["x_TH"] = down["residual_TO"] = h
    tile = linear.Tile(16, 16, 64, 8, early=True)
    for given in (up, down):
        del given["norm_H"], given["eps"]

    def chain() -> None:
        h.copy_(x)
        for layer in range(24):
            down["x_TH"] = linear.by_tiles(tile, **up)
            linear.by_tiles(tile, **down, out=h)
            if layer % 3 == 0:
                # Kernels of the library lie between, and the sums stay finite.
                between.copy_(h)
                h.copy_(torch.nn.functional.rms_norm(between, between.shape[-1:]))

    use_early(False)
    chain()
    want = h.clone()
    assert want.isfinite().all()
    use_early(True)
    graph = in_graph(chain)
    for _ in range(20):
        h.fill_(float("nan"))
        graph.replay()
        assert torch.equal(h, want)
