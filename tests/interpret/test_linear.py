# Owns: the product kernels against their reference, in interpret mode.
# Promises: operands lie inside NaN, results inside a guard; each option of a product is seen alone and with the others.
# Never: measures speed.
"""ops/kernels/linear.py. float32: bfloat16 dots are wrong in the interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.ops import linear as reference
from ratoon.ops.kernels import linear
from ratoon.ops.kernels.linear import Tile
from ratoon.ops.launch import set_recorder, use_kernels

EPS = 1e-3
OPTIONS = [
    dict(zip(("norm", "bias", "gated", "residual"), on, strict=True))
    for on in itertools.product((0,), (0, 1), (0, 1), (0, 1))
]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield
    use_kernels("auto")
    set_recorder(None)


def among_nan(tensor: Tensor) -> Tensor:
    """The same values, with NaN before and behind them in memory."""
    room = torch.full((tensor.numel() + 512,), float("nan"))
    room[256:-256] = tensor.flatten()
    return room[256:-256].view(tensor.shape)


def operands(num_places: int, out_size: int, in_size: int, options: dict[str, int]) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(num_places * out_size + in_size)

    def draw(*shape: int) -> Tensor:
        return among_nan(torch.randn(shape, generator=gen))

    width = out_size // 2 if options["gated"] else out_size
    return {
        "x_TH": draw(num_places, in_size),
        "weight_OH": draw(out_size, in_size).mul_(in_size**-0.5),
        "bias_O": draw(out_size) if options["bias"] else None,
        "norm_H": draw(in_size) if options["norm"] else None,
        "eps": EPS,
        "residual_TO": draw(num_places, width) if options["residual"] else None,
        "gated": bool(options["gated"]),
    }


def expected(given: dict[str, Any]) -> Tensor:
    use_kernels("torch")
    return reference.project(**given)


def guarded(like: Tensor) -> tuple[Tensor, Tensor]:
    """A NaN-filled result place and the memory around it, filled with sevens."""
    room = torch.full((like.numel() + 128,), 7.0)
    place = room[64:-64].view(like.shape)
    place.fill_(float("nan"))
    return place, room


def run(tile: Tile | None, given: dict[str, Any], out: Tensor | None = None) -> Tensor:
    """The bare product: norms are a launch of their own, which `project` makes."""
    bare = {name: value for name, value in given.items() if name not in ("norm_H", "eps")}
    return linear.by_tiles(tile, **bare, out=out) if tile else linear.by_library(**bare, out=out)


def check(given: dict[str, Any], tile: Tile | None) -> None:
    want = expected(given)
    out, room = guarded(want)
    returned = run(tile, given, out)
    assert returned is out
    torch.testing.assert_close(out, want, rtol=2e-4, atol=2e-4)
    assert (room[:64] == 7).all() and (room[-64:] == 7).all()


def named(options: dict[str, int]) -> str:
    return "+".join(name for name, on in options.items() if on) or "bare"


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_every_option_beside_every_other(options: dict[str, int]) -> None:
    check(operands(5, 40, 72, options), Tile(16, 16, 16, 1))


@pytest.mark.parametrize("num_places", [1, 2, 15, 16, 17, 33])
def test_places_around_the_edges_of_a_tile(num_places: int) -> None:
    options = {"norm": 0, "bias": 0, "gated": 1, "residual": 1}
    check(operands(num_places, 48, 64, options), Tile(16, 32, 32, 1))


@pytest.mark.parametrize(
    ("out_size", "in_size", "tile"),
    [
        (16, 32, Tile(16, 16, 32, 1)),  # one program, one step
        (18, 33, Tile(16, 16, 32, 1)),  # one row and one input too many
        (14, 31, Tile(16, 16, 32, 1)),  # less than one tile
        (14, 31, Tile(16, 16, 16, 1)),
        (576, 576, Tile(16, 64, 64, 1)),
        (36, 72, Tile(32, 16, 16, 1)),  # the last step is partly empty
    ],
)
@pytest.mark.parametrize("gated", [0, 1])
def test_sizes_that_no_tile_divides(out_size: int, in_size: int, tile: Tile, gated: int) -> None:
    check(operands(3, out_size, in_size, {"norm": 0, "bias": 1, "gated": gated, "residual": 1}), tile)


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_the_library_path(options: dict[str, int]) -> None:
    check(operands(70, 24, 40, options), None)


@pytest.mark.parametrize("tile", [Tile(16, 16, 16, 1), None])
def test_the_residual_may_be_the_result(tile: Tile | None) -> None:
    given = operands(20, 24, 40, {"norm": 0, "bias": 0, "gated": 0, "residual": 1})
    want, out = expected(given), given["residual_TO"]
    assert run(tile, given, out) is out
    torch.testing.assert_close(out, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("num_places", [0, 1, 64, 65])
def test_project_dispatches(num_places: int) -> None:
    given = operands(num_places, 32, 48, {"norm": 1, "bias": 0, "gated": 1, "residual": 0})
    want = expected(given)
    use_kernels("triton")
    names: list[str] = []
    set_recorder(lambda run, *args: (names.append(run.__name__), run(*args))[1])
    torch.testing.assert_close(reference.project(**given), want, rtol=2e-4, atol=2e-4)
    assert names[:1] == ["_rms_norm"] * (num_places > 0)
    assert ("product" in names) == (0 < num_places <= 64)


def test_a_recorded_launch_reads_its_operands_anew() -> None:
    given = operands(4, 32, 48, {"norm": 0, "bias": 1, "gated": 0, "residual": 1})
    calls: list[Any] = []
    set_recorder(lambda launched, *args: calls.append((launched, args)))
    out = torch.full((4, 32), float("nan"))
    run(Tile(16, 16, 16, 1), given, out)
    assert len(calls) == 1 and out.isnan().all()
    for name in ("x_TH", "residual_TO", "bias_O"):
        given[name].mul_(0.5)
    for launched, args in calls:
        launched(*args)
    torch.testing.assert_close(out, expected(given), rtol=2e-4, atol=2e-4)


def test_strided_operands() -> None:
    given = operands(6, 32, 48, {"norm": 0, "bias": 0, "gated": 0, "residual": 1})
    want = expected(given)
    for name in ("x_TH", "residual_TO"):
        wide = torch.full((6, 2 * given[name].shape[1]), float("nan"))
        given[name] = wide[:, ::2].copy_(given[name])
    torch.testing.assert_close(run(Tile(16, 16, 16, 1), given), want, rtol=2e-4, atol=2e-4)


SHAPES = {
    (6144, 4096): 0,
    (4096, 4096): 0,
    (24576, 4096): 1,
    (4096, 12288): 0,
    (4096, 20480): 0,
    (960, 576): 0,
    (576, 576): 0,
    (3072, 576): 1,
    (576, 1536): 0,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_places", [1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 2048])
def test_a_plan_fits_a_multiprocessor(num_places: int, dtype: torch.dtype) -> None:
    for (out_size, in_size), gated in SHAPES.items():
        tile = linear.plan(num_places, out_size, in_size, bool(gated), dtype)
        if num_places > 128:
            assert tile is None
        if num_places <= 16 and out_size <= 4096:
            assert tile is not None
        if tile is not None:
            assert tile.shared_bytes(dtype.itemsize) <= 227 << 10
            assert all(size & (size - 1) == 0 for size in (tile.block_t, tile.block_n, tile.block_k))
            assert tile.num_stages >= 1 and tile.block_n >= 16
