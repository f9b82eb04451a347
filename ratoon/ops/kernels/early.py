# Owns: the wait of a kernel that was launched while the one before it still ran.
# Promises: nothing after it can see memory from before that kernel's end, and the next kernel may then be launched.
# Never: is left out of a kernel that is launched early.
"""Programmatic dependent launch (CUDA, compute capability 9.0 and up)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """First thing in a kernel's body. A kernel that comes after this one waits for it in the same way."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
