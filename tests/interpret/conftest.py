# Owns: the interpreter switch of this tier.
# Promises: set before any kernel is defined, so this tier is a pytest process of its own.
# Never: touches a GPU.
"""Triton kernels on a CPU: TRITON_INTERPRET must be in the environment before a kernel is defined."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: it comes with the dev extra on Linux")
