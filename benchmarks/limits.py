# Owns: what one machine can do at best: copy bandwidth, kernels in a graph, the products of one forward pass.
# Promises: medians; weights rotate, so that no cache serves them; runs without a GPU, in small.
# Never: uses an engine.
"""Limits of a machine: `python -m benchmarks.limits [--config CONFIG.json] [--rows 1,16,64]`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ratoon.core.config import ModelConfig
from ratoon.models.random import target_shape

CONFIGS = Path(__file__).parent / "configs"


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int = 20, graph: bool = True) -> float:
    """Median milliseconds of `run`, on a GPU as one CUDA graph (or eagerly), on a CPU as it is."""
    with torch.inference_mode():
        for _ in range(3):
            run()
        if device.type != "cuda":
            return statistics.median(_host_ms(run) for _ in range(repeats))
        replay = _captured(run) if graph else run
        for _ in range(2):
            replay()
        return statistics.median(_device_ms(replay) for _ in range(repeats))


def _captured(run: Callable[[], Any]) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _device_ms(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _host_ms(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begun)


def copy_bytes_per_s(device: torch.device, size: int | None = None) -> float:
    """Bytes read plus written per second by a copy inside the device."""
    size = size or (4 << 30 if device.type == "cuda" else 64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / median_ms(lambda: target.copy_(source), device, graph=False)


def kernel_us(device: torch.device, count: int = 400) -> dict[str, float]:
    """Microseconds of the smallest kernel, in a graph and launched one by one."""
    x = torch.zeros(1024, device=device)

    def many() -> None:
        for _ in range(count):
            x.add_(1.0)

    in_graph = 1e3 * median_ms(many, device) / count
    if device.type != "cuda":
        return {"eager": in_graph}

    def launched() -> None:
        many()
        torch.cuda.synchronize()

    launched()
    return {"graph": in_graph, "eager": 1e3 * statistics.median(_host_ms(launched) for _ in range(5)) / count}


def stack(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[int], Any], int]:
    """(run, bytes): `run(rows)` makes the products of one forward pass, the head's included."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    layer = [(heads, hidden), (hidden, config.num_heads * config.head_dim), (2 * wide, hidden), (hidden, wide)]
    sizes = layer * config.num_layers + [(config.vocab_size, hidden)]
    weights = [torch.empty(size, dtype=dtype, device=device).normal_(0.0, 0.02) for size in sizes]
    inputs: dict[tuple[int, int], torch.Tensor] = {}

    def run(rows: int) -> None:
        for weight in weights:
            key = (rows, weight.shape[1])
            if key not in inputs:
                inputs[key] = torch.ones(key, dtype=dtype, device=device)
            F.linear(inputs[key], weight)

    return run, sum(weight.numel() * weight.element_size() for weight in weights)


def measure(config: ModelConfig, rows: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Everything, as one record."""
    bandwidth = copy_bytes_per_s(device)
    run, size = stack(config, dtype, device)
    products = {count: median_ms(lambda count=count: run(count), device) for count in rows}
    return {
        "copy_tb_s": bandwidth / 1e12,
        "kernel_us": kernel_us(device),
        "weights_gb": size / 1e9,
        "floor_ms": 1e3 * size / bandwidth,
        "products_ms": {str(count): ms for count, ms in products.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(CONFIGS / "qwen3-8b.json"))
    parser.add_argument("--rows", default="1,8,16,32,64,128")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    rows = tuple(int(count) for count in given.rows.split(","))
    record = measure(target_shape(given.config), rows, torch.device(given.device), torch.bfloat16)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
