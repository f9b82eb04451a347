# Owns: who computes an operation, the torch reference or its Triton twin, and the one door of kernel launches.
# Promises: kernels serve tensors on a GPU and never where gradients are wanted; every launch goes through `launch`.
# Never: imports Triton (a laptop has none), or decides how a kernel computes.
"""Choice and launch of kernels. `ops/kernels` holds the twins; its modules are imported when a kernel is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kernels = Literal["auto", "torch", "triton"]
Recorder = Callable[..., None]
"""Takes a function and its arguments and runs it as one recorded node (runtime/emulator.py)."""

_choice: Kernels = "auto"
LATE = {"EARLY": False}
"""Launch options of a kernel that starts when the one before it has ended."""

_recorder: Recorder | None = None
_early = True


def use_kernels(choice: Kernels) -> None:
    """'auto': Triton on a GPU; 'torch': references everywhere; 'triton': kernels everywhere (interpreted on a CPU)."""
    global _choice
    if choice not in get_args(Kernels):
        raise ValueError(f"kernels '{choice}' are unknown: use {', '.join(get_args(Kernels))}")
    _choice = choice


def wants_kernel(x: Tensor) -> bool:
    """Whether the Triton twin serves this tensor. Kernels have no backward pass."""
    if _choice == "torch" or torch.is_grad_enabled():
        return False
    return x.is_cuda or _choice == "triton"


def set_recorder(recorder: Recorder | None) -> None:
    """Hands every launch to `recorder` until it is set to None (the emulator's capture)."""
    global _recorder
    _recorder = recorder


@functools.lru_cache(maxsize=16)
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def use_early(wanted: bool) -> None:
    """Whether kernels may be launched while the one before them still runs (programmatic dependent launch)."""
    global _early
    _early = wanted


def early(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel with a constant EARLY, which waits for the kernel before it where that is set.

    Before its wait a kernel may read only what no kernel of a round writes: weights.
    """
    if _early and _can_launch_early(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return LATE


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs a Triton kernel over a grid; an empty grid is no launch. The kernel writes into tensors among `args`."""
    if 0 in grid:
        return

    def run(*args: Any) -> None:
        kernel[grid](*args, **options)

    run.__name__ = getattr(kernel, "__name__", "kernel")
    if _recorder is None:
        run(*args)
    else:
        _recorder(run, *args)
