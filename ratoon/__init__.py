# Owns: the public names of the package.
# Promises: `import ratoon` is quick: torch is imported with the first use of Engine.
# Never: does work at import.
"""Ratoon: DFlash block-diffusion drafting and DDTree tree verification.

from ratoon import Engine, SamplingParams
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.core.request import RequestOutput, SamplingParams
    from ratoon.runtime.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "Engine": "ratoon.runtime.engine",
    "SamplingParams": "ratoon.core.request",
    "RequestOutput": "ratoon.core.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ratoon' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
