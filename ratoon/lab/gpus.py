# Owns: what GPUs and links can do at best, each figure with its source and date.
# Promises: what was measured is told from what a data sheet or a guess says.
# Never: holds a figure of an engine.
"""Constants of `ratoon plan` (`python -m benchmarks.limits` measures them)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """copy_tb_s: bytes read plus written by a device copy. kernel_us: a tiny kernel inside a graph. products_ms[i]:
    all bfloat16 products of one pass over `products_gb` of weights, for rows[i] rows."""

    name: str
    copy_tb_s: float
    kernel_us: float
    multiprocessors: int
    rows: tuple[int, ...]
    products_ms: tuple[float, ...]
    products_gb: float
    source: str


@dataclass(frozen=True)
class Link:
    """What an all-reduce costs: a start, then bytes over the bandwidth of one direction."""

    name: str
    gb_s: float
    start_us: float
    source: str


H200 = Gpu(
    name="h200",
    copy_tb_s=4.26,
    kernel_us=1.06,
    multiprocessors=132,
    rows=(1, 8, 16, 32, 64, 65, 128, 256),
    products_ms=(4.24, 4.49, 4.32, 4.41, 4.45, 4.48, 4.77, 6.00),
    products_gb=15.1,
    source="measured 2026-11-30, torch 2.11.0+cu130, triton 3.6.0; products of the Qwen3-8B shape by cuBLAS",
)


def _by_data_sheet(name: str, bandwidth_tb_s: float, bf16_tflops: float, multiprocessors: int) -> Gpu:
    """The H200's figures times the ratio of the data sheets (H200: 4.8 TB/s, 989 TFLOP/s dense)."""
    faster, stronger = bandwidth_tb_s / 4.8, bf16_tflops / 989
    one, *_ = H200.products_ms
    return Gpu(
        name,
        H200.copy_tb_s * faster,
        H200.kernel_us,
        multiprocessors,
        H200.rows,
        tuple(one / faster + (ms - one) / stronger for ms in H200.products_ms),
        H200.products_gb,
        f"data sheet ({bandwidth_tb_s:g} TB/s, {bf16_tflops:g} TFLOP/s) times what the H200 reaches; not measured",
    )


GPUS = {gpu.name: gpu for gpu in (H200, _by_data_sheet("b200", 8.0, 2250, 148))}
LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 360.0, 8.0, "80 % of 450 GB/s a direction, start guessed; not measured"),
        Link("pcie", 50.0, 20.0, "80 % of 64 GB/s a direction (5.0 x16), start guessed; not measured"),
    )
}


def gpu_of(name: str) -> Gpu:
    """ValueError with the known ones for any other."""
    if name not in GPUS:
        raise ValueError(f"--gpu '{name}' is not known, its limits were not measured (known: {', '.join(GPUS)})")
    return GPUS[name]


def link_of(name: str) -> Link:
    """ValueError with the known ones for any other."""
    if name not in LINKS:
        raise ValueError(f"--link '{name}' is not known (known: {', '.join(LINKS)})")
    return LINKS[name]
