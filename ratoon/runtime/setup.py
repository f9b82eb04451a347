# Owns: turning what a user asked of the engine into resolved settings and sizes.
# Promises: every default is resolved here once and can be printed; what cannot be served is refused by name.
# Never: loads weights or runs a round.
"""Engine settings: device, dtype, sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import MAX_BUDGET, Method, check_budget, check_topk_cap
from ratoon.runtime.graphs import Level
from ratoon.runtime.runner import Mode
from ratoon.spec.budget import Bucket
from ratoon.spec.state import Limits, RoundShape

MAX_NODES = MAX_BUDGET
Admission = Literal["reserve", "worst-case"]
PREFILL_SIZE = {"cpu": 512, "cuda": 2048}
"""Prompt tokens computed between two rounds while others decode: what a decoding row may have to wait for."""
SAMPLE_GROUP = {"cpu": 16, "cuda": 256}
"""Places whose logits exist at once: each group reads the whole head once more, which a GPU feels."""
CACHE_TOKENS = 16384
"""Slots of a CPU's cache, unless one row needs more. A GPU's is sized by its memory (runtime/plan.py)."""
PADDED_CPU_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of an engine beside its networks. None (method also 'auto'): the engine's choice.

    shapes: exactly what padded modes open; cache_tokens: K/V slots in all, at least one row's. admission: seat a
    request when pages for what is known of it are free and some are left for those who run ("reserve": where pages
    run out, the last to come yields and is computed again), or when its longest course is covered ("worst-case").
    Raises ValueError.
    """

    method: Method | Literal["auto"] | None = None
    budget: int | Literal["auto"] = "auto"
    topk_cap: int = 16
    mode: str = "auto"
    max_rows: int = 8
    max_model_len: int | None = None
    page_size: int = 16
    run_ahead: int | None = None
    birth_test: Level = "quick"
    gpu_memory_utilization: float = 0.85
    debug: bool = False
    shapes: Sequence[RoundShape] | None = None
    cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    chunked_prefill_size: int | None = None
    admission: Admission = "reserve"

    def __post_init__(self) -> None:
        if self.method not in (None, "auto", *get_args(Method)):
            raise ValueError(f"method '{self.method}' is unknown: use auto, {', '.join(get_args(Method))}")
        check_budget(self.budget)
        check_topk_cap(self.topk_cap)
        if self.birth_test not in get_args(Level):
            raise ValueError(f"birth_test '{self.birth_test}' is unknown: use {', '.join(get_args(Level))}")
        if self.admission not in get_args(Admission):
            raise ValueError(f"admission '{self.admission}' is unknown: use {', '.join(get_args(Admission))}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        sizes = (
            *(("max_rows", self.max_rows, 1), ("page_size", self.page_size, 1)),
            *(("run_ahead", self.run_ahead, 0), ("chunked_prefill_size", self.chunked_prefill_size, 1)),
        )
        for name, value, least in sizes:
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


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
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    chunked_prefill_size: int
    admission: Admission

    def describe(self) -> str:
        """One line per setting."""
        shown = asdict(self) | {"budget": "auto" if self.budget is None else self.budget}
        return "\n".join(f"{name:>22}: {value}" for name, value in shown.items())


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


def choose_run_ahead(run_ahead: int | None, device: torch.device, mode: Mode) -> int:
    """None is 1 where a GPU replays graphs: it runs a round while the host reads the one before."""
    return run_ahead if run_ahead is not None else int(device.type == "cuda" and mode in ("graph", "static"))


def choose_method(method: str | None, has_drafter: bool) -> Method:
    """None and 'auto' are tree with a drafter, else ar. ValueError for a method that lacks its drafter."""
    if method in (None, "auto"):
        return "tree" if has_drafter else "ar"
    if method != "ar" and not has_drafter:
        raise ValueError(
            f"method '{method}' needs a drafter, and there is none: name one (`ratoon train` makes one), or use "
            "method 'ar'"
        )
    return method  # pyright: ignore[reportReturnType]


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


def limits_for(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    options: Options,
    *,
    run_ahead: int = 0,
    forecast: tuple[Bucket, ...] = (),
    padded_on_cpu: bool = False,
    device: str = "cpu",
) -> Limits:
    """Sizes of the engine's buffers. Raises ValueError for a max_model_len that the model does not have."""
    max_model_len = options.max_model_len
    if max_model_len is None:
        # Padded rounds read the whole context capacity, which a CPU pays for in every layer.
        max_model_len = min(config.max_position, PADDED_CPU_LEN) if padded_on_cpu else config.max_position
    if not 2 <= max_model_len <= config.max_position:
        raise ValueError(f"max_model_len must be from 2 to the model's {config.max_position}, got {max_model_len}")
    max_nodes = MAX_NODES if drafter else 0
    limits = Limits(
        max_rows=options.max_rows,
        max_nodes=max_nodes,
        max_block=drafter.block_size if drafter else 0,
        max_depth=drafter.num_drafts if drafter else 0,
        max_ranks=(options.topk_cap or max_nodes) if drafter else 1,
        max_model_len=max_model_len,
        page_size=options.page_size,
        num_pages=2,
        run_ahead=run_ahead,
        forecast=forecast,
        sample_group=SAMPLE_GROUP[device],
        # No kernel looks for edges: sampled plain rounds would pay twenty times their sampler for a judge's needs.
        edges=device == "cpu",
    )
    wanted = options.cache_tokens or min(CACHE_TOKENS, options.max_rows * limits.context)
    return replace(limits, num_pages=1 - (-max(wanted, limits.context) // options.page_size))
