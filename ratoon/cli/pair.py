# Owns: how a command gets its engine.
# Promises: models are fetched and options are checked before anything heavy is loaded.
# Never: serves a request.
"""The engine of a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ratoon.cli.options import given

if TYPE_CHECKING:
    from ratoon.lab.bars import Report
    from ratoon.runtime.engine import Engine


def choose_kernels(kernels: str, device: str) -> None:
    """Checks the device and chooses who computes on it."""
    from ratoon.core.settings import interprets_kernels
    from ratoon.ops.launch import use_kernels
    from ratoon.runtime.setup import choose_device

    if choose_device(device).type == "cpu" and kernels == "triton" and not interprets_kernels():
        raise ValueError(
            "--kernels triton needs a GPU (or TRITON_INTERPRET=1, which runs kernels on the CPU, very slowly)"
        )
    use_kernels(kernels)  # pyright: ignore[reportArgumentType]


def open_engine(model: str, kernels: str = "auto", progress: Report | None = None, **settings: Any) -> Engine:
    """An engine, its models fetched first. Plain decoding gets no drafter: its context would be kept for nothing.

    progress: who shows the captures; None for a bar of their own.
    """
    from ratoon.cli.show import fetch_bar
    from ratoon.lab.bars import bar
    from ratoon.models.hub import resolve

    settings = given(**settings)
    if settings.get("method") == "ar":
        settings["drafter"] = "none"
    if settings.get("device", "auto") != "auto" or kernels != "auto":
        choose_kernels(kernels, settings["device"])
    with fetch_bar() as report:
        for name in (model, *({settings["drafter"]} - {"auto", "none"})):
            resolve(name, report)
    from ratoon.runtime.engine import Engine

    choose_kernels(kernels, settings["device"])
    if progress:
        engine = Engine(model, progress=progress, **settings)
    else:
        with bar() as shown:
            engine = Engine(model, progress=shown.report, **settings)
    if settings["drafter"] == "auto" and engine.drafter is None:
        print(f"no drafter is known for {model}: decoding autoregressively (see `ratoon train`)", file=sys.stderr)
    return engine
