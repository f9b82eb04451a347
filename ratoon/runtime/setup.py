# Owns: turning what a user asked of the engine into resolved settings and sizes.
# Promises: every default is resolved here once and can be printed; what cannot be served is refused by name.
# Never: loads weights or runs a round.
"""Engine settings: device, dtype, sizes."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import get_args

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import Method
from ratoon.runtime.runner import Mode
from ratoon.spec.budget import Bucket
from ratoon.spec.state import Limits, RoundShape

MAX_NODES = 127
AUTO_NODES = (3, 5, 7, 11, 15, 23, 31, 47, 63)
AUTO_NODES_CPU = (3, 5, 7, 11, 15, 23, 31)
CACHE_TOKENS = 16384
PADDED_CPU_LEN = 1024


@dataclass(frozen=True)
class Settings:
    """Everything an engine was started with, resolved. `budget` None means auto."""

    model: str
    drafter: str | None
    method: Method
    budget: int | None
    topk_cap: int
    dtype: str
    device: str
    mode: Mode
    max_rows: int
    max_model_len: int
    page_size: int
    run_ahead: int
    birth_test: str

    def describe(self) -> str:
        """One line per setting."""
        shown = asdict(self) | {"budget": "auto" if self.budget is None else self.budget}
        return "\n".join(f"{name:>14}: {value}" for name, value in shown.items())


def choose_device(device: str) -> torch.device:
    """'auto' is CUDA where there is a GPU. ValueError for a device that torch does not have here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device '{device}' is unknown: use auto, cpu or cuda") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no GPU here: use --device cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device '{device}' is not supported: use auto, cpu or cuda")
    return chosen


def choose_mode(mode: str, device: torch.device) -> Mode:
    """'auto' is graph on a GPU and eager on a CPU, where a graph is emulated for testing and saves nothing."""
    if mode == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if mode not in get_args(Mode):
        raise ValueError(f"mode '{mode}' is unknown: use auto, {', '.join(get_args(Mode))}")
    return mode  # pyright: ignore[reportReturnType]


def choose_dtype(dtype: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """'auto' is bfloat16 on a GPU; on a CPU the faster of bfloat16 and float32 by a probe of at most a second."""
    known = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}
    if dtype != "auto":
        if dtype not in known:
            raise ValueError(f"dtype '{dtype}' is not supported: use auto, bfloat16 or float32")
        return known[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    return min((torch.bfloat16, torch.float32), key=lambda kind: _probe_s(kind, config))


def _probe_s(dtype: torch.dtype, config: ModelConfig) -> float:
    """Seconds of the products of a few layers for one place and for a small tree."""
    size = (config.intermediate_size, config.hidden_size)
    weights = [torch.full(size, 0.01, dtype=dtype) for _ in range(8)]
    inputs = [torch.ones(places, config.hidden_size, dtype=dtype) for places in (1, 8)]
    best = float("inf")
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.4:
        start = time.perf_counter()
        for x in inputs:
            for weight in weights:
                torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best


def auto_buckets(config: DrafterConfig, device: torch.device) -> tuple[Bucket, ...]:
    """The (block, nodes) pairs that budget auto chooses among, smaller blocks first."""
    sizes = AUTO_NODES_CPU if device.type == "cpu" else AUTO_NODES
    blocks = sorted({max(config.block_size // 2, 2), config.block_size})
    return tuple((block, nodes) for block in blocks for nodes in sizes)


def padded_shapes(limits: Limits, budget: int | None, device: torch.device) -> list[RoundShape]:
    """Shapes that padded modes open at start-up: per row count plain decoding, and the fixed budget or all buckets.

    Row counts are powers of two and max_rows; each shape for the argmax and the general sampler. On a CPU, where
    each capture takes a second of a real model and graphs serve as a test, few of them.
    """
    counts = sorted({min(1 << power, limits.max_rows) for power in range(limits.max_rows.bit_length() + 1)})
    is_cpu = device.type == "cpu"
    if is_cpu:
        counts = sorted({1, limits.max_rows})
    if budget is None:
        buckets = [(block, nodes) for block, nodes in limits.forecast if not is_cpu or nodes in (7, 31)]
    else:
        buckets = [(limits.max_block, budget)] if budget and limits.max_nodes else []
    return [
        RoundShape(rows, rows * (nodes + 1), block, min(limits.max_nodes, rows * nodes), sampler)
        for rows in counts
        for block, nodes in [(0, 0), *buckets]
        for sampler in ("argmax", "general")
    ]


def limits_for(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    *,
    max_rows: int,
    max_model_len: int | None,
    topk_cap: int,
    page_size: int,
    run_ahead: int,
    forecast: tuple[Bucket, ...],
    padded_on_cpu: bool,
) -> Limits:
    """Sizes of the engine's buffers. Raises ValueError for a size that makes no sense."""
    for name, value, least in (("max_rows", max_rows, 1), ("page_size", page_size, 1), ("run_ahead", run_ahead, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if max_model_len is None:
        # Padded rounds read the whole context capacity, which a CPU pays for in every layer.
        max_model_len = min(config.max_position, PADDED_CPU_LEN) if padded_on_cpu else config.max_position
    if not 2 <= max_model_len <= config.max_position:
        raise ValueError(f"max_model_len must be from 2 to the model's {config.max_position}, got {max_model_len}")
    max_nodes = MAX_NODES if drafter else 0
    limits = Limits(
        max_rows=max_rows,
        max_nodes=max_nodes,
        max_block=drafter.block_size if drafter else 0,
        max_depth=drafter.num_drafts if drafter else 0,
        max_ranks=(topk_cap or max_nodes) if drafter else 1,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=2,
        run_ahead=run_ahead,
        forecast=forecast,
    )
    wanted = max(limits.context, min(CACHE_TOKENS, max_rows * limits.context))
    return Limits(**{**asdict(limits), "forecast": forecast, "num_pages": 1 - (-wanted // page_size)})
